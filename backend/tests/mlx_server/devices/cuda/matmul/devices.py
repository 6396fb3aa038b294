"""GPUs that forms are chosen for."""

from __future__ import annotations

from mlx_manager.mlx_server.devices.cuda.compiler.device import CudaDevice

H200 = CudaDevice(132, 227 * 1024, 228 * 1024, multiplies_in_groups=True)
RTX4090 = CudaDevice(128, 99 * 1024, 100 * 1024)

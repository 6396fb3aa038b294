"""NVIDIA GPUs: their limits, and CUDA's names of the element types of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.driver import Driver
from mlx_manager.mlx_server.devices.kernel import Unsupported

TYPES: dict[Any, str] = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}
DEVICE_SOURCE = Path(__file__).with_name("device.cu")

# Shared memory that CUDA itself reserves, in bytes.
RESERVED_PER_BLOCK = 1024

# Attribute of a device in the CUDA driver API.
_MULTIPROCESSORS = 16


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """Limits of an NVIDIA GPU.

    multiprocessors: number of multiprocessors. block_memory, multiprocessor_memory: bytes of shared
    memory that a block and a multiprocessor have. multiplies_in_groups: whether the GPU has the
    instructions of hopper.py.
    """

    multiprocessors: int
    block_memory: int
    multiprocessor_memory: int
    multiplies_in_groups: bool = False


def device_for(dtype: mx.Dtype) -> CudaDevice | Unsupported:
    """Return the default device, if kernels for arrays of `dtype` run on it."""
    if dtype not in TYPES:
        return Unsupported(f"{dtype}: the CUDA kernels serve bfloat16 and float16")
    return cuda_device()


def cuda_device() -> CudaDevice | Unsupported:
    """Return the limits of the default device, if it is an NVIDIA GPU that the kernels support.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    if mx.default_device().type != mx.gpu or mx.metal.is_available():
        return Unsupported("the default device is no NVIDIA GPU")
    info = mx.device_info()
    capability = (
        int(str(info["compute_capability_major"])),
        int(str(info["compute_capability_minor"])),
    )
    if capability < (8, 0):
        return Unsupported(f"{info['architecture']}: the CUDA kernels need sm_80 or later")
    large = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228}
    kib = large.get(capability, 100)
    multiprocessors = Driver().attribute(_MULTIPROCESSORS)
    return CudaDevice(multiprocessors, (kib - 1) * 1024, kib * 1024, capability == (9, 0))

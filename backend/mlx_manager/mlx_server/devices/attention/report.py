"""Report on the paged attention kernels of this device, for `mlx-manager doctor`."""

from __future__ import annotations

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention import build, build_chunks
from mlx_manager.mlx_server.devices.attention.check import self_check
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, Rotary
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.report import PORTABLE, KernelReport


def kernel_report() -> KernelReport:
    """Build the kernels for a usual shape and check them as a load does; takes seconds on a GPU."""
    shape = AttentionShape(32, 8, 128, 16, mx.bfloat16)
    match build(shape):
        case Unsupported(reason):
            return KernelReport(f"{PORTABLE} ({reason})")
        case kernels:
            wrong = self_check(kernels, rotary=Rotary(128, traditional=False, epsilon=None))
    if wrong is not None:
        return KernelReport(PORTABLE, wrong)
    platform = "Metal" if mx.metal.is_available() else "CUDA"
    checked = "checked against the reference"
    match build_chunks(shape):
        case Unsupported(reason):
            problem = "" if platform == "Metal" else f"prompts' chunks: {reason}"
            return KernelReport(f"{platform}, {checked}", problem)
        case chunks:
            return KernelReport(f"{platform}, prompts by {chunks.tiles.name}, {checked}")

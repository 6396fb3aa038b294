"""Report on the sampling kernel of this device, for `mlx-manager doctor`."""

from __future__ import annotations

import mlx.core as mx

from mlx_manager.mlx_server.devices.draws import build, checked
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.report import PORTABLE, KernelReport


def draw_report() -> KernelReport:
    """Build the kernel for usual logits and check it as a load does; takes seconds on a GPU."""
    match build(mx.bfloat16):
        case Unsupported(reason):
            return KernelReport(f"{PORTABLE} ({reason})")
    match checked(mx.bfloat16):
        case Unsupported(wrong):
            return KernelReport(PORTABLE, wrong)
    platform = "Metal" if mx.metal.is_available() else "CUDA"
    return KernelReport(f"{platform}, one launch, checked against the definition")

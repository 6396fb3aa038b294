"""Results of the kernel checks that `mlx-manager doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.kinds import ATTENTION, CHUNKS, USUAL
from mlx_manager.mlx_server.devices.draws import SAMPLING
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.kinds import KernelKind

PORTABLE = "portable: by MLX's own operations"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Result of one kernel's check.

    problem: why a kernel that should work on this device does not; "" if there is no problem.
    """

    name: str
    problem: str = ""


def kernel_report() -> KernelReport:
    """Check the attention kernels for a usual shape; takes seconds on a GPU."""
    found = _why_not(ATTENTION, USUAL)
    if found is not None:
        return found
    checked = "checked against the reference"
    match CHUNKS.serving(USUAL):
        case Unsupported(reason):
            problem = "" if mx.metal.is_available() else f"prompts' chunks: {reason}"
            return KernelReport(f"{_platform()}, {checked}", problem)
        case chunks:
            return KernelReport(f"{_platform()}, prompts by {chunks.tiles.name}, {checked}")


def draw_report() -> KernelReport:
    """Check the sampling kernel for usual logits; takes seconds on a GPU."""
    found = _why_not(SAMPLING, mx.bfloat16)
    return found or KernelReport(f"{_platform()}, one launch, checked against the definition")


def _why_not(kind: KernelKind[Any, Any], of: object) -> KernelReport | None:
    """Return why kernels do not serve; None if they do."""
    match kind.outcome(of):
        case Unsupported(reason):
            return KernelReport(f"{PORTABLE} ({reason})")
        case str(wrong):
            return KernelReport(PORTABLE, wrong)
    return None


def _platform() -> str:
    return "Metal" if mx.metal.is_available() else "CUDA"

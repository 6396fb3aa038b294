"""Results of the kernel checks that `mlx-manager doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass

PORTABLE = "portable: by MLX's own operations"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Result of one kernel's check.

    problem: why a kernel that should work on this device does not; "" if there is no problem.
    """

    name: str
    problem: str = ""

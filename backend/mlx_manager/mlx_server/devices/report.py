"""What mlx-manager doctor is told of kernels."""

from __future__ import annotations

from dataclasses import dataclass

PORTABLE = "portable: by MLX's own operations"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """`problem`: why a kernel that should work here does not; "" where none does, or is needed."""

    name: str
    problem: str = ""

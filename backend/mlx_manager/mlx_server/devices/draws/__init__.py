"""Sampling by one launch on a GPU: one block for each row, whatever its sampling parameters.

The operations of `sampling.py` take 27 to 55 launches for the same result; the kernel needs no
sort. Its source, draw.h, is the same for CUDA and Metal; draw.cu and draw.metal hold the parts that
depend on the platform.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from mlx_manager.mlx_server.devices.draws.check import self_check
from mlx_manager.mlx_server.devices.draws.kernel import MOST_TOKENS, DrawKernel, build
from mlx_manager.mlx_server.devices.draws.parameter import Parameter
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.kinds import DTYPES, Case, KernelKind, alone, checks

__all__ = ["MOST_TOKENS", "SAMPLING", "DrawKernel", "Parameter", "build", "checked"]

SAMPLING: KernelKind[mx.Dtype, DrawKernel] = KernelKind(
    "sampling", alone(build), self_check, lambda: (Case(None, dtype, dtype) for dtype in DTYPES)
)


@cache
def checked(dtype: mx.Dtype) -> DrawKernel | Unsupported:
    """Return the kernel for logits of `dtype` on the default device, if it passes its check."""
    return SAMPLING.serving(dtype, checks())

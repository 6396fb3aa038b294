"""Sampling by one launch on a GPU: one block for each row, whatever its sampling parameters.

The operations of `sampling.py` take 27 to 55 launches for the same result; the kernel needs no
sort. Its source, draw.h, is the same for CUDA and Metal; draw.cu and draw.metal hold the parts that
depend on the platform.
"""

from __future__ import annotations

import logging
from functools import cache

import mlx.core as mx

from mlx_manager.mlx_server.devices.draws.check import self_check
from mlx_manager.mlx_server.devices.draws.kernel import MOST_TOKENS, DrawKernel, build
from mlx_manager.mlx_server.devices.draws.wish import Wish
from mlx_manager.mlx_server.devices.kernel import Unsupported

__all__ = ["MOST_TOKENS", "DrawKernel", "Wish", "build", "checked"]

log = logging.getLogger(__name__)


@cache
def checked(dtype: mx.Dtype) -> DrawKernel | Unsupported:
    """Return the kernel for logits of `dtype` on the default device, if it passes its check."""
    kernel = build(dtype)
    if isinstance(kernel, Unsupported):
        return kernel
    try:
        wrong = self_check(kernel, dtype)
    except RuntimeError as error:
        # The compiler or the driver failed.
        wrong = str(error)
    if wrong is None:
        return kernel
    log.warning("tokens are not drawn by the GPU's kernel: %s", wrong)
    return Unsupported(wrong)

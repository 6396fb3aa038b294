"""Tokens drawn by one launch on a GPU: a block a row, whatever each row asks for.

What the operations of `sampling.py` do in 27 to 55 launches, without a sort. The kernel's text,
draw.h, is the same for CUDA and Metal; draw.cu and draw.metal are what it needs of them.
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
    """The kernel for logits of `dtype` on the default device, if it passes its check."""
    kernel = build(dtype)
    if isinstance(kernel, Unsupported):
        return kernel
    try:
        wrong = self_check(kernel, dtype)
    except RuntimeError as error:
        # Of the compiler or the driver.
        wrong = str(error)
    if wrong is None:
        return kernel
    log.warning("tokens are not drawn by the GPU's kernel: %s", wrong)
    return Unsupported(wrong)

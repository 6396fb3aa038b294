"""GPU kernels of the paged engine: decode attention over pages, and the writes into them."""

from __future__ import annotations

import mlx.core as mx

from mlx_manager.mlx_server.engine.kv.kernels import cuda, metal
from mlx_manager.mlx_server.engine.kv.kernels.check import Features, self_check
from mlx_manager.mlx_server.engine.kv.kernels.kernel import (
    AttentionShape,
    PagedKernels,
    Rotary,
    Unsupported,
)
from mlx_manager.mlx_server.engine.kv.kernels.splits import TILE, Splits

__all__ = [
    "AttentionShape",
    "Features",
    "PagedKernels",
    "Rotary",
    "Splits",
    "Unsupported",
    "build",
    "self_check",
]

HEAD_DIMS = (64, 80, 96, 128, 256)


def build(shape: AttentionShape) -> PagedKernels | Unsupported:
    """The kernels for `shape` on the default device. Nothing is compiled before the first use."""
    if shape.head_dim not in HEAD_DIMS:
        return Unsupported(f"head size {shape.head_dim}: the kernels serve {HEAD_DIMS}")
    if shape.page_size % TILE:
        return Unsupported(f"page size {shape.page_size} is no multiple of {TILE}")
    if mx.default_device().type != mx.gpu:
        return Unsupported("the default device is no GPU")
    return metal.build(shape) if mx.metal.is_available() else cuda.build(shape)

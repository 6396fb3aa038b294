"""Latent attention (DeepSeek V3, GLM 4.7 Flash, Kimi) where running rows are one batch.

Each head takes its part of a query, or of a result, through a matrix of its own: mlx-lm's
`MultiLinear`, for (rows, heads, 1, dim). A product of each row with all matrices reads the matrices
once for each row; a product of each matrix with all rows reads them once.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear


def multiply_by_head(model: nn.Module) -> None:
    """Make `model`'s layers of heads' matrices multiply each matrix with all rows."""
    for module in model.modules():
        if type(module) in _BY_HEAD:
            module.__class__ = _BY_HEAD[type(module)]


class _ByHead:
    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rows, _, tokens, _ = x.shape
        turned = rows > 1 and tokens == 1
        given = x.swapaxes(0, 2) if turned else x
        out: mx.array = super().__call__(given, *args, **kwargs)  # type: ignore[misc]
        return out.swapaxes(0, 2) if turned else out


class _Dense(_ByHead, MultiLinear):  # type: ignore[misc]
    pass


class _Packed(_ByHead, QuantizedMultiLinear):  # type: ignore[misc]
    pass


_BY_HEAD: dict[type[Any], type[Any]] = {MultiLinear: _Dense, QuantizedMultiLinear: _Packed}

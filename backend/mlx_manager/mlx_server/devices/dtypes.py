"""Names of MLX's types of numbers."""

from __future__ import annotations

import mlx.core as mx


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name that `mlx.core` has a type under, such as "bfloat16" or "bool_"."""
    name = str(dtype).removeprefix("mlx.core.")
    return "bool_" if name == "bool" else name


def dtype_named(name: str) -> mx.Dtype:
    """Return MLX's type of that name."""
    dtype: mx.Dtype = getattr(mx, name)
    return dtype

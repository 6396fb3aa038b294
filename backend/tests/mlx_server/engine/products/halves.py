"""Numbers of half precision, which NumPy does not have all of."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def rounded(values, dtype):
    """As float32, to the numbers that `dtype` has."""
    return np.array(mx.array(values.astype(np.float32)).astype(dtype).astype(mx.float32))


def bits(values, dtype):
    """As `dtype` stores them."""
    return np.array(mx.array(values).astype(dtype).view(mx.uint16))

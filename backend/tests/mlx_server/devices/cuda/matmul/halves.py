"""Numbers of half precision, which NumPy does not have all of, and packed ones."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cuda.matmul.factors import Activation


def rounded(values, dtype):
    """As float32, to the numbers that `dtype` has."""
    return np.array(mx.array(values.astype(np.float32)).astype(dtype).astype(mx.float32))


def bits(values, dtype):
    """As `dtype` stores them."""
    return np.array(mx.array(values).astype(dtype).view(mx.uint16))


def gated(both, activation):
    """Of gates and then ups, in float32."""
    gate, up = np.split(both, 2, axis=1)
    match activation:
        case Activation.SILU:
            turn = gate
        case Activation.GELU:
            turn = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        case Activation.CLAMPED_SILU:
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
            turn = 1.702 * gate
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-turn)) * up


def in_packs(weight, packing, dtype):
    """As MLX packs it: what it stands for, and its arrays."""
    if packing.floats:
        words, scales = mx.quantize(mx.array(weight), mode="mxfp4")
        stands_for = mx.dequantize(words, scales, mode="mxfp4")
        arrays = {"weight": np.array(words), "scales": np.array(scales)}
        return np.array(stands_for.astype(mx.float32)), arrays
    group, bits_each = packing.group, packing.bits
    words, scales, biases = mx.quantize(mx.array(weight), group, bits_each)
    scales, biases = (rounded(np.array(each), dtype) for each in (scales, biases))
    stands_for = mx.dequantize(words, mx.array(scales), mx.array(biases), group, bits_each)
    arrays = {
        "weight": np.array(words),
        "scales": bits(scales, dtype),
        "biases": bits(biases, dtype),
    }
    return np.array(stands_for), arrays

"""`ProductKernels` in MLX operations: what a GPU's kernels must do, the slow way, on any device."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn
from mlx_lm.models.activations import swiglu_oai

from mlx_manager.mlx_server.devices.cuda.matmul.factors import (
    Activation,
    ExpertScoring,
    Packed,
    Scaled,
    arrays_of,
)
from mlx_manager.mlx_server.devices.cuda.matmul.sums import Two

ACTIVATIONS = {
    Activation.SILU: lambda gate, up: nn.silu(gate) * up,
    Activation.GELU: lambda gate, up: nn.gelu_approx(gate) * up,
    Activation.CLAMPED_SILU: swiglu_oai,
}


class PortableProducts:
    """`ProductKernels` in MLX operations.

    chained: of how many rows products are chained. grouped: from how many on gates are multiplied
    by groups. ahead: rows for whose norms who made them did a part. packed: rows that packed
    weights have been multiplied with.
    """

    def __init__(self, chained: int = 0, grouped: int = 33) -> None:
        self.chained, self.grouped = chained, grouped
        self.ahead: set[int] = set()
        self.packed: set[int] = set()
        self.experts = PortableExperts()
        self.sums = PortableSums()
        self.heads = PortableHeads()

    def serves(self, weight) -> bool:
        return not isinstance(weight, Packed) or weight.mode == "affine"

    def serves_ahead(self, weight) -> bool:
        return True

    def most_rows(self, weight) -> int:
        return 48 if isinstance(weight, Packed) else 32

    def most_gated_rows(self, weight) -> int:
        return 48 if isinstance(weight, Packed) else 64

    def multiply(self, x, weight, *, norm=None, bias=None, residual=None):
        if isinstance(weight, Packed):
            self.packed.add(x.shape[0])
            arrays, kind = arrays_of(weight), (weight.group_size, weight.bits)
            weight = mx.dequantize(*arrays, *kind)
        if isinstance(x, Scaled):
            y = x.rows * mx.rsqrt(x.squares.sum(1, keepdims=True) / x.shape[1] + norm.epsilon)
        else:
            y = x if norm is None else mx.fast.rms_norm(x, norm.weight, norm.epsilon)
        y = y @ weight.T
        y = y if bias is None else y + bias
        return y if residual is None else y + residual

    def gates_by_groups(self, weight, rows):
        return self.grouped <= rows <= 32 and not isinstance(weight, Packed)

    def multiply_ahead(self, x, weight, following, **more):
        self.ahead.add(x.shape[0])
        y = self.multiply(x, weight, **more)
        parts = [part.square().sum(1) for part in mx.split(y, 2, axis=1)]
        return y, Scaled(y * following.weight, mx.stack(parts, axis=1))

    def gated(self, x, weight, *, norm=None, bias=None, activation=Activation.SILU):
        return self.gate(self.multiply(x, weight, norm=norm, bias=bias), activation)

    def gate(self, both, activation):
        gate, up = mx.split(both, 2, axis=-1)
        return ACTIVATIONS[activation](gate, up)

    def chain(self, links):
        return PortableChain(self, links) if self.chained else None


class PortableHeads:
    """`HeadKernels` in MLX operations. rows: that have been multiplied, and whether by rows."""

    def __init__(self) -> None:
        self.rows: set[tuple[int, bool]] = set()

    def serves(self, weight, heads) -> bool:
        return True

    def of_rows(self, x, weight, heads):
        self.rows.add((len(x), True))
        matrices = unpacked(weight).reshape(heads, -1, weight.shape[1])
        return x.reshape(len(x), heads, -1)[..., : weight.shape[1]].swapaxes(
            0, 1
        ) @ matrices.swapaxes(1, 2)

    def to_rows(self, x, weight):
        heads, rows, _ = x.shape
        self.rows.add((rows, False))
        matrices = unpacked(weight).reshape(heads, -1, weight.shape[1])
        return (x @ matrices.swapaxes(1, 2)).swapaxes(0, 1).reshape(rows, -1)


def unpacked(weight):
    return weight.dense if isinstance(weight, Packed) else weight


class PortableSums:
    """`SumKernels` in MLX operations. rows: that have been added, and whether a norm followed."""

    def __init__(self) -> None:
        self.rows: set[tuple[int, bool]] = set()

    def serves(self, width) -> bool:
        return True

    def __call__(self, residual, x, norm, following, scale=None):
        self.rows.add((residual.shape[0], following is not None))
        if isinstance(x, Two):
            by = (x.norm_of_first, x.norm_of_other)
            parts = zip((x.first, x.other), by, strict=True)
            x = sum(mx.fast.rms_norm(rows, weight, norm.epsilon) for rows, weight in parts)
        out = residual + mx.fast.rms_norm(x, norm.weight, norm.epsilon)
        out = out if scale is None else out * scale
        if following is None:
            return [out]
        return [out, mx.fast.rms_norm(out, following.weight, following.epsilon)]


class PortableExperts:
    """`ExpertKernels` in MLX operations. rows: that experts have been multiplied with."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def serves(self, experts) -> bool:
        return True

    def check(self, experts):
        """There is nothing to find out."""

    compare = check

    def __call__(self, hidden, norm, experts, *, alone=False):
        self.rows.add(hidden.shape[0])
        normed = mx.fast.rms_norm(hidden, norm.weight, norm.epsilon)
        by = norm.weight if experts.router_norm is None else experts.router_norm
        logits = mx.fast.rms_norm(hidden, by, norm.epsilon) @ experts.router.T
        if experts.router_bias is not None:
            logits = logits + experts.router_bias
        shared, count = experts.shared, experts.chosen - experts.shared
        logits, always = mx.split(logits, [experts.count - shared], axis=1)
        if experts.scoring is ExpertScoring.SIGMOID:
            scores = mx.sigmoid(logits)
        else:
            scores = mx.softmax(logits, axis=-1)
        correction = 0.0 if experts.correction is None else experts.correction
        chosen = mx.argpartition(-(scores + correction), count - 1, axis=-1)[:, :count]
        scores = mx.take_along_axis(scores, chosen, 1)
        if experts.normalised:
            scores = scores / (scores.sum(axis=1, keepdims=True) + experts.least)
        scores = scores * experts.scale
        if experts.scales is not None:
            scores = scores * experts.scales[chosen]
        last = mx.arange(experts.count - shared, experts.count, dtype=chosen.dtype)
        chosen = mx.concatenate([chosen, mx.broadcast_to(last, (len(scores), shared))], axis=1)
        given = mx.sigmoid(always) if experts.gated else mx.ones((len(scores), shared))
        scores = mx.concatenate([scores, given], axis=1)
        of = (experts.count, experts.inner, experts.width)
        gates, ups = unpacked(experts.gate_up).reshape(2, *of)
        downs = unpacked(experts.down).reshape(of[0], of[2], of[1])
        x = mx.expand_dims(normed, (-2, -3))
        of_gates, of_down = experts.biases or (mx.zeros(2 * of[0] * of[1]), mx.zeros(of[0]))
        of_gates = of_gates.reshape(2, *of[:2])

        def product(x, weights, biases):
            y = mx.gather_mm(x, weights.swapaxes(-1, -2), rhs_indices=chosen)
            return y + biases[chosen][:, :, None]

        gate, up = product(x, gates, of_gates[0]), product(x, ups, of_gates[1])
        gated = ACTIVATIONS[experts.activation](gate, up)
        given = product(gated, downs, of_down.reshape(of[0], -1)).squeeze(-2)
        mixed = (given * scores[..., None]).sum(1)
        return [gated, given, mixed if alone else hidden + mixed]


class PortableChain:
    """`Chain` in MLX operations."""

    def __init__(self, products, links) -> None:
        self.products, self.links = products, links
        self.most_rows = products.chained

    def __call__(self, attended, residual):
        (output, gate_up, down, *following), of = self.links, self.products
        assert all(link.norm is None for link in (output, down))
        hidden = of.multiply(attended, output.weight, bias=output.bias, residual=residual)
        how = {"norm": gate_up.norm, "bias": gate_up.bias, "activation": gate_up.activation}
        gated = of.gated(hidden, gate_up.weight, **how)
        result = of.multiply(gated, down.weight, bias=down.bias, residual=hidden)
        heads = [of.multiply(result, qkv.weight, norm=qkv.norm, bias=qkv.bias) for qkv in following]
        return [mx.concatenate([hidden, gated], axis=1), result, *heads]

"""DecoderSpec decoder on a CPU: the same joined products as on a GPU, and MLX's operations.

On a CPU a step's time is as much that of its operations, some 10 us each on two busy cores, as that
of its products. mlx-lm's module takes 150 operations a layer, of which many are views; here a layer
takes 60.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape
from mlx_manager.mlx_server.devices.cpu.lane import has_lane, in_halves
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore
from mlx_manager.mlx_server.execution.attention.paged import StepPlan, attend
from mlx_manager.mlx_server.execution.base import ABREAST_ON_CPU, OnPages, shortest_first
from mlx_manager.mlx_server.execution.decoder.layers import Block
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, NotApplicable
from mlx_manager.mlx_server.execution.images import MRope
from mlx_manager.mlx_server.execution.spec.decoder import DecoderSpec
from mlx_manager.mlx_server.execution.spec.layers import AttentionSpec, QueryScaling
from mlx_manager.mlx_server.execution.spec.mlps import MLPSpec
from mlx_manager.mlx_server.execution.spec.parts import NotFusable
from mlx_manager.mlx_server.execution.spec.rotation import Rotation, by_axes
from mlx_manager.mlx_server.execution.step import RaggedStep

ByParts = Callable[..., mx.array]
"""Function that computes rows in halves, as `in_halves`, or all at once."""

LEAST_IN_HALVES = 150_000
"""Smallest size of a layer's input, in a step with prompts, that is computed in halves: 300 tokens
of 512.

With fewer numbers too little is saved. Rows alone are never halved: their products take the time of
reading the weights.
"""


class MeanByProduct(nn.RMSNorm):  # type: ignore[misc] # mlx is not typed
    """RMS norm whose mean is a product: 8 operations where MLX's own takes 11 on a CPU."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__(norm.weight.size, norm.eps)
        self.weight = norm.weight
        self._mean = mx.full((norm.weight.size, 1), 1 / norm.weight.size)
        self._epsilon = mx.array([[norm.eps]], mx.float32)
        mx.eval(self._mean, self._epsilon)

    def __call__(self, x: mx.array) -> mx.array:
        size = mx.addmm(self._epsilon, x * x, self._mean)
        out: mx.array = x * mx.rsqrt(size) * self.weight
        return out


@dataclass(frozen=True, slots=True)
class Turns:
    """Rotation of a step's heads: each array is (tokens, heads + 2 * kv_heads, dim)."""

    cosines: mx.array
    sines: mx.array


class HeadRotation:
    """One kind of rotation, for q, k and v as one array. A rotation is linear, so that it is

        y = x * cos + (x @ turn) * sin        where `turn` takes x_j to -y_i and x_i to y_j

    for pairs (i, j) of a head's elements. Elements that are not rotated, all of v among them, have
    cos 1 and sin 0.
    """

    def __init__(
        self, rotation: Rotation, shape: AttentionShape, query_scaling: QueryScaling | None = None
    ) -> None:
        dims, dim = 2 * rotation.frequencies.size, shape.head_dim
        places = np.arange(dims)
        if rotation.traditional:
            pair, partner, first = places // 2, places ^ 1, places % 2 == 0
        else:
            half = dims // 2
            pair, partner, first = places % half, (places + half) % dims, places < half
        turn = np.zeros((dim, dim), np.float32)
        turn[partner, places] = np.where(first, -1, 1)
        axes = np.zeros(dim, np.int32)
        if rotation.axes is not None:
            axes[:dims] = rotation.axes[pair]
        frequencies = np.zeros(dim, np.float32)
        frequencies[:dims] = np.array(rotation.frequencies)[pair]
        amplitudes = np.ones(dim, np.float32)
        amplitudes[:dims] = rotation.amplitude
        self.turn = mx.array(turn)
        self._frequencies = mx.array(frequencies)
        self._amplitudes = None if rotation.amplitude == 1.0 else mx.array(amplitudes)
        self._shape = shape
        self._query_scaling = query_scaling
        self._axes = None if rotation.axes is None else mx.array(axes)
        mx.eval(self.turn, self._frequencies, self._axes)

    def __call__(self, plan: StepPlan) -> Turns:
        """Return the rotation of a step's tokens."""
        turning = by_axes(plan.angles, self._axes).astype(mx.float32)
        angles = turning[:, None] * self._frequencies
        cosines, sines = mx.cos(angles), mx.sin(angles)
        if self._amplitudes is not None:
            cosines, sines = cosines * self._amplitudes, sines * self._amplitudes
        factors = (
            None
            if self._query_scaling is None
            else self._query_scaling(plan.positions)[:, None, None]
        )
        return Turns(self._of_heads(cosines, 1.0, factors), self._of_heads(sines, 0.0, factors))

    def _of_heads(self, table: mx.array, rest: float, factors: mx.array | None) -> mx.array:
        """Return `table` for all heads, with `rest` for heads of v. factors: (tokens, 1, 1), those
        of queries, if there are any."""
        of, (tokens, _, dim) = self._shape, table.shape
        turned = mx.broadcast_to(table, (tokens, of.q_heads + of.kv_heads, dim))
        rest_of_all = mx.full((tokens, of.kv_heads, dim), rest)
        if factors is None:
            return mx.concatenate([turned, rest_of_all], axis=1)
        queries = mx.broadcast_to(table * factors, (tokens, of.q_heads, dim))
        return mx.concatenate([queries, turned[:, of.q_heads :], rest_of_all], axis=1)


class HeadNorms:
    """RMS norms of the heads of q and k, computed at once."""

    def __init__(self, norms: tuple[nn.RMSNorm, nn.RMSNorm], shape: AttentionShape) -> None:
        q, k = norms
        self._heads = shape.q_heads + shape.kv_heads
        self._weights = mx.concatenate(
            [
                mx.broadcast_to(q.weight, (shape.q_heads, q.weight.size)),
                mx.broadcast_to(k.weight, (shape.kv_heads, k.weight.size)),
            ]
        )
        self._epsilon = q.eps
        mx.eval(self._weights)

    def __call__(self, heads: mx.array) -> mx.array:
        """Return `heads`, (tokens, heads + 2 * kv_heads, dim), with q and k normed and v
        unchanged."""
        turned = mx.fast.rms_norm(heads[:, : self._heads], None, self._epsilon) * self._weights
        return mx.concatenate([turned, heads[:, self._heads :]], axis=1)


@dataclass(frozen=True, slots=True)
class JoinedLayer:
    """One layer, as a step needs it. `kind` is the number of its kind of rotation in the model."""

    block: Block
    head_norms: HeadNorms | None
    kind: int
    rotation: HeadRotation
    shape: AttentionShape
    scale: float
    softcap: float | None
    window: int | None

    @staticmethod
    def of(spec: AttentionSpec, kind: int, rotation: HeadRotation) -> JoinedLayer:
        norms = spec.head_norms
        return JoinedLayer(
            block=Block.of(spec, norm=MeanByProduct),
            head_norms=None if norms is None else HeadNorms(norms, spec.shape),
            kind=kind,
            rotation=rotation,
            shape=spec.shape,
            scale=spec.scale,
            softcap=spec.softcap,
            window=spec.window,
        )

    def __call__(
        self,
        hidden: mx.array,
        turns: Sequence[Turns],
        store: LayerStore,
        plan: StepPlan,
        by_parts: ByParts,
    ) -> mx.array:
        tokens, of = hidden.shape[0], self.shape
        by = turns[self.kind]
        heads = by_parts(self._turned, hidden, by.cosines, by.sines)
        q, k, v = mx.split(heads, [of.q_heads, of.q_heads + of.kv_heads], axis=1)
        store.write(k.swapaxes(0, 1), v.swapaxes(0, 1), plan.slots)
        attended = attend(q[:, :, None], store, plan, self.scale, self.window, softcap=self.softcap)
        return by_parts(self.block.after, hidden, attended.reshape(tokens, -1))

    def _turned(self, hidden: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
        """Return q, k and v, (tokens, heads + 2 * kv_heads, dim), normed and rotated."""
        heads = self.block.heads(hidden).reshape(len(hidden), -1, self.shape.head_dim)
        if self.head_norms is not None:
            heads = self.head_norms(heads)
        return heads * cosines + (heads @ self.rotation.turn) * sines


class JoinedForward(OnPages):
    """Forward that runs all tokens of a step in one pass, by joined products; made by `join`."""

    kind: ClassVar[str] = "fused"
    abreast: int = ABREAST_ON_CPU

    def __init__(self, spec: DecoderSpec, layers: Sequence[JoinedLayer], page_size: int) -> None:
        self._page_size = page_size
        self._layers = layers
        self._rotations = list({layer.kind: layer.rotation for layer in layers}.values())
        self._embed, self._scale = spec.embedded, spec.scale
        self._norm = MeanByProduct(spec.norm)
        self._vocabulary = spec.vocabulary
        shapes = [LayerShape.of(layer.shape, layer.window) for layer in layers]
        self.stores = [LayerStore(shape, page_size) for shape in shapes]
        # Sums over ranks of both halves would be under way at once.
        self._halves = all(layer.group is None for layer in spec.layers)
        self._serves = False

    def serve(self) -> None:
        self._serves = self._halves

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        return shortest_first(lengths)

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        step = RaggedStep.of(decode, chunks, self._page_size)
        turns = [rotation(step.plan) for rotation in self._rotations]
        hidden, insertion = self._embed(step.tokens), step.insertion
        if insertion is not None:
            hidden = insertion.into(hidden, self._scale)
        apart = chunks and hidden.size >= LEAST_IN_HALVES and self._serves and has_lane()
        by_parts = in_halves if apart else _whole
        for number, (layer, store) in enumerate(zip(self._layers, self.stores, strict=True)):
            hidden = layer(hidden, turns, store, step.plan, by_parts)
            if insertion is not None:
                hidden = insertion.added(number, hidden)
        hidden = hidden if step.wanted is None else hidden[step.wanted]
        return self._vocabulary(self._norm(hidden))


def join(model: nn.Module, page_size: int, mrope: MRope | None = None) -> JoinedForward:
    """Return the joined form of `model`. mrope: the axes of its positions, if there are several.

    The model goes on working: its weights become views of the joined ones, a layer at a time.
    Nothing has been compared yet.

    Raises:
        NotApplicable: the model is no such decoder, or the device no CPU.
    """
    if mx.default_device() != mx.cpu:
        raise NotApplicable("a GPU has kernels for it, or operations are cheap")
    try:
        spec = DecoderSpec.of(model, page_size, mrope)
    except NotFusable as reason:
        raise NotApplicable(f"the module is no common decoder: {reason}") from reason
    attentions = [layer for layer in spec.layers if isinstance(layer, AttentionSpec)]
    if len(attentions) < len(spec.layers) or any(each.rotary.gated for each in attentions):
        raise NotApplicable("layers without attention, or with gates behind it")
    if any(each.rotary.values or each.rotary.alone for each in attentions) or spec.per_layer:
        raise NotApplicable("norms of values, or keys or inputs beside a layer's own")
    if not all(isinstance(each.mlp, MLPSpec) for each in attentions):
        raise NotApplicable("an MLP of other parts")
    if attentions[0].shape.dtype != mx.float32:
        raise NotApplicable("products in half precision take longer than all the rest")
    rotations: dict[tuple[int, AttentionShape, QueryScaling | None], HeadRotation] = {}
    layers: list[JoinedLayer] = []
    for each, kind in zip(attentions, spec.kinds, strict=True):
        key = (kind, each.shape, each.query_scaling)
        if key not in rotations:
            rotations[key] = HeadRotation(spec.rotations[kind], each.shape, each.query_scaling)
        number = list(rotations).index(key)
        layers.append(JoinedLayer.of(each, number, rotations[key]))
        # Evaluated before the next layer is joined, so that only one layer's weights exist twice.
        mx.eval(each.weights())
    return JoinedForward(spec, layers, page_size)


def _whole(compute: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    return compute(*arrays)

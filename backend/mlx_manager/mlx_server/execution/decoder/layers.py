"""Parts of a step: each layer, the opening before the first, and the ending behind the last."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.attention.kernel import PagedKernels, Rotary
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.attention.splits import Splits
from mlx_manager.mlx_server.devices.cuda.attention.opening import (
    BuildOpening,
    OpeningKernel,
    Turning,
)
from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import StateKernels, Texts
from mlx_manager.mlx_server.devices.cuda.matmul.chain import Chain
from mlx_manager.mlx_server.devices.cuda.matmul.factors import RowNorm
from mlx_manager.mlx_server.devices.cuda.matmul.forms import WarpForm
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.states import DeltaWeights, StateStore
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore
from mlx_manager.mlx_server.execution.alike import arrays_of, kind_of, made_of
from mlx_manager.mlx_server.execution.attention.paged import StepPlan, attend, newest_slots
from mlx_manager.mlx_server.execution.decoder.additions import Addition, NormFor, addition_of
from mlx_manager.mlx_server.execution.decoder.mlps import Mlp, mlp_of
from mlx_manager.mlx_server.execution.decoder.per_layer_input import PerLayerInput
from mlx_manager.mlx_server.execution.decoder.projections import (
    Ahead,
    Head,
    Projection,
    Sum,
    head,
    join,
    table_of,
)
from mlx_manager.mlx_server.execution.spec.decoder import DecoderSpec, PerLayerEmbedding
from mlx_manager.mlx_server.execution.spec.layers import AttentionSpec, LayerSpec, QueryScaling
from mlx_manager.mlx_server.execution.spec.parts import NotFusable
from mlx_manager.mlx_server.execution.spec.rotation import Rotation

Store = LayerStore | StateStore
"""Store of a layer: the rows' keys and values on pages, or their states in slots."""
# Products of ours have a multiple of so many outputs.
WHOLE = 64


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step, of one token a row.

    tokens: (rows,) uint32, the newest of each row. before: (rows,) int32, tokens of each row before
    that one; 0 for padding, whose logits mean nothing. table: (rows, max_pages) int32; every newest
    token has its page already. pools: each layer's keys and values, written in place, (kv_heads,
    slots, head_dim), or the pool of a `StateStore`. splits: from `FusedDecoder.plan`. slots: one
    array, (rows,) int32, each row's slot, where there are recurrent layers. far: whether some row
    is longer than `FusedDecoder.far_from`. shifts: one array, (rows,) int32, added to each row's
    place for the position by which it is rotated, where something is added to any. written: one
    array, (rows,) int32, the slot on pages of each newest token, -1 for padding, where several rows
    have the same pages, as the tokens of a draft do. Such a row sees what those before it write.
    """

    tokens: mx.array
    before: mx.array
    table: mx.array
    pools: Sequence[Sequence[mx.array]]
    splits: Mapping[int | None, Splits]
    slots: Sequence[mx.array] = ()
    far: bool = False
    shifts: Sequence[mx.array] = ()
    written: Sequence[mx.array] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """Products of one layer, joined."""

    norm: nn.RMSNorm
    qkv: Projection
    output: Addition
    mlp: Mlp
    per_layer_input: PerLayerInput | None = None

    @staticmethod
    def of(
        spec: LayerSpec,
        few: ProductKernels | None = None,
        norm: NormFor = lambda own: own,
    ) -> Block:
        """Return the joined products of a layer. The module's weights become views of them: see
        `join`.

        few: kernels that multiply few rows, if the device has any. norm: returns the norm to use in
        place of each of the layer's norms.
        """
        around, own, scale = spec.attention_norms, spec.per_layer_input, spec.layer_scale
        post = spec.mlp_norms.post if own is None else own.norm
        if scale is not None and post is None:
            raise NotFusable("a sum that is scaled, without a norm before it")
        return Block(
            norm=norm(around.pre),
            qkv=join(spec.qkv, few, 1 if isinstance(spec, AttentionSpec) else WHOLE),
            output=addition_of(spec.output, around.post, few, norm, group=spec.group),
            mlp=mlp_of(spec.mlp, spec.mlp_norms, few, norm, None if own else scale),
            per_layer_input=None if own is None else PerLayerInput.of(own, few, norm, scale),
        )

    @property
    def unpacked(self) -> Block:
        """Copy with dense weights in place of packed ones; see `FewOrMany.unpacked`."""
        return replace(
            self,
            qkv=self.qkv.unpacked,
            output=self.output.unpacked,
            mlp=self.mlp.unpacked,
            per_layer_input=self.per_layer_input and self.per_layer_input.unpacked,
        )

    @property
    def unpacked_bytes(self) -> int:
        parts = (self.qkv, self.output, self.mlp, self.per_layer_input)
        return sum(part.unpacked_bytes for part in parts if part is not None)

    def heads(self, hidden: Ahead) -> mx.array:
        """Return the input of attention, (tokens, (heads + 2 * kv_heads) * dim): q, k and v."""
        return self.qkv.normed(hidden, self.norm)

    def expects(self, rows: int) -> tuple[RowNorm | None, RowNorm | None]:
        """Return the norms before `qkv` and before `mlp` of which the maker of so many rows is to
        do a part; None for a norm that is left whole."""
        if not (self.output.sees_rows or self.mlp.by_groups(rows)):
            return None, None
        return self.qkv.expected(self.norm), self.mlp.expected()

    def after(self, hidden: mx.array, attended: mx.array, own: Sequence[mx.array] = ()) -> mx.array:
        """Return the layer's result. attended: (tokens, heads * dim). own: see `PerLayerInput`."""
        return self.launches_after(hidden, attended, None, own)[1].rows

    def launches_after(
        self,
        hidden: mx.array,
        attended: mx.array,
        following: RowNorm | None,
        own: Sequence[mx.array] = (),
    ) -> tuple[list[mx.array], Sum]:
        """Return the intermediate launches and the layer's result, which is not among them.

        following: the next layer's norm, if a part of it is to be done on the way.
        """
        _, expected = self.expects(hidden.shape[0])
        before, added = self.output.launches(hidden, attended, expected)
        last = self.per_layer_input
        made, result = self.mlp.launches(added, following if last is None else None)
        launches = [*before, added.rows, *made]
        if last is None:
            return launches, result
        more, sum_of_all = last.launches(result.rows, own, following)
        return [*launches, result.rows, *more], sum_of_all

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key that is equal for layers whose products are by the same kernels."""
        return kind_of(self)


@dataclass(frozen=True, slots=True)
class Joined:
    """Result of a joint.

    launches: all that it launches. result: the layer's result, (rows, width). heads: those of the
    layer that follows, (rows, (heads + 2 * kv_heads) * dim); None behind the last layer.
    """

    launches: Sequence[mx.array]
    result: mx.array
    heads: mx.array | None


@dataclass(frozen=True, slots=True)
class Joint:
    """Operations between a layer's attention and that of the layer that follows, if one does.

    chain: the kernel that does them in one launch for few rows, if there is one.
    """

    block: Block
    following: Block | None
    chain: Chain | None

    @staticmethod
    def of(block: Block, following: Block | None, few: ProductKernels | None) -> Joint:
        """Return the joint of `block` and the block that follows.

        few: kernels that multiply few rows, if the device has any.
        """
        links = [block.output.link(), *block.mlp.links()]
        if block.per_layer_input is not None:
            links.append(None)
        if following is not None:
            links.append(following.qkv.link(following.norm))
        found = [link for link in links if link is not None]
        if few is None or len(found) < len(links):
            return Joint(block, following, None)
        return Joint(block, following, few.chain(found))

    def __call__(
        self, hidden: mx.array, attended: mx.array, own: Sequence[mx.array] = ()
    ) -> Joined:
        """Return the result of the layer's operations behind attention.

        attended: (rows, heads * dim). own: see `PerLayerInput`.
        """
        if self.chain is not None and hidden.shape[0] <= self.chain.most_rows:
            chained = self.chain(attended, hidden)
            return Joined(chained, chained[1], None if self.following is None else chained[2])
        following = self.following
        expected = None if following is None else following.expects(hidden.shape[0])[0]
        made, result = self.block.launches_after(hidden, attended, expected, own)
        made.append(result.rows)
        if following is None:
            return Joined(made, result.rows, None)
        heads = following.heads(result.ahead)
        return Joined([*made, heads], result.rows, heads)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key that is equal for joints whose launches are by the same kernels."""
        following = self.following
        if self.chain is None and (
            following is None or not any(following.expects(WarpForm.most_rows))
        ):
            return self.block.kind
        return (self.block.kind, None if following is None else following.kind)


@dataclass(frozen=True, slots=True)
class Shared:
    """Arrays that the layers of a step share.

    following: (rows,) int32, `before` of the next step. lengths: (rows or more,) int32, tokens of
    each row, the newest included; 0 for padding. rotations: those of the newest tokens, by kind.
    per_layer_inputs: (rows, layers, width), if there are any. slots: (rows,) int32, the newest
    tokens' slots on pages, -1 for padding; for layers whose kernels do not find the slots.
    """

    following: mx.array
    lengths: mx.array
    rotations: Sequence[mx.array]
    slots: mx.array | None = None
    per_layer_inputs: mx.array | None = None

    def with_slots(self, table: mx.array, page_size: int) -> Shared:
        """Return a copy with the newest tokens' slots. table: the pages of each row."""
        slots = newest_slots(self.following, table, page_size)
        return replace(self, slots=slots)


@dataclass(frozen=True, slots=True)
class Opening:
    """Beginning of a decode step: embeddings, rotations and lengths.

    scale: the factor of embeddings, if there is one. kernel: the one that does all of it in one
    launch, if there is one.
    """

    embed: Callable[[mx.array], mx.array]
    rotations: Sequence[Rotation]
    per_layer: PerLayerEmbedding | None
    scale: float | None
    kernel: OpeningKernel | None

    @staticmethod
    def of(spec: DecoderSpec, build: BuildOpening) -> Opening:
        embed, rotations, per_layer = spec.embedded, spec.rotations, spec.per_layer
        dtype, table = spec.layers[0].shape.dtype, table_of(spec.embed)
        if table is None or table.dtype != dtype:
            return Opening(embed, rotations, per_layer, spec.scale, None)
        kinds = [
            Turning(2 * turn.frequencies.size, turn.traditional, turn.amplitude)
            for turn in rotations
        ]
        kernel = build(table, kinds, spec.scale)
        built = None if isinstance(kernel, Unsupported) else kernel
        return Opening(embed, rotations, per_layer, spec.scale, built)

    def __call__(
        self, tokens: mx.array, before: mx.array, shifts: Sequence[mx.array] = ()
    ) -> tuple[mx.array, Shared]:
        """Return the embeddings, (rows, width), and the arrays that layers share. shifts: see
        `Step`."""
        if self.kernel is not None:
            frequencies = [turn.frequencies for turn in self.rotations]
            hidden, following = self.kernel.open(tokens, before, frequencies, shifts)
            shared = Shared(following, self.kernel.lengths, self.kernel.rotations)
        else:
            # Padding stays at 0: it must not write anywhere.
            lengths = mx.where(before > 0, before + 1, 0)
            turns = [turn(sum(shifts, before)) for turn in self.rotations]
            hidden, shared = self.embed(tokens), Shared(lengths, lengths, turns)
        return hidden, replace(shared, per_layer_inputs=self.of_layers(tokens, hidden))

    def of_layers(self, tokens: mx.array, hidden: mx.array) -> mx.array | None:
        """Return the layers' own inputs for `tokens`, or None if they have none."""
        return None if self.per_layer is None else self.per_layer(tokens, hidden)


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a step: the last norm and the product with the vocabulary.

    product: the one with the vocabulary, if its weight is of a known kind; otherwise `vocabulary`
    multiplies, and finishes. finished: returns the logits of a product; see `DecoderSpec`.
    """

    norm: nn.RMSNorm
    product: Head | None
    vocabulary: Callable[[mx.array], mx.array]
    finished: Callable[[mx.array], mx.array]

    @staticmethod
    def of(spec: DecoderSpec, few: ProductKernels | None) -> Ending:
        """Return the ending of `common`.

        few: kernels that multiply few rows, if the device has any.
        """
        product = head(spec.head, spec.layers[0].shape.dtype, few)
        return Ending(spec.norm, product, spec.vocabulary, spec.finished)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Return the logits, (rows, vocabulary)."""
        if self.product is None:
            return self.vocabulary(self.norm(hidden))
        return self.finished(self.product.normed(hidden, self.norm))


class LayerPart(ABC):
    """Layer without its neighbours' and the decoder's arrays: a part as `alike` defines parts."""

    __slots__ = ()

    block: Block

    @property
    @abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """Key that is equal for parts whose launches, except products, are by the same kernels."""

    @property
    @abstractmethod
    def _own_numbers(self) -> int:
        """Count of the numbers that are made of a token between the first product and the next."""

    @property
    def token_bytes(self) -> int:
        """Bytes of all arrays that are made of a token on the way through the layer: rotated
        queries, the result of attention, and the inputs and results of the products."""
        block = self.block
        # Arrays before and behind the MLP, each with its norm.
        hidden = 4 * block.output.width + block.output.token_numbers
        heads = block.qkv.weight.shape[-2] + self._own_numbers
        size: int = block.norm.weight.dtype.size
        of_input = 0 if block.per_layer_input is None else block.per_layer_input.token_numbers
        return size * (hidden + heads + block.mlp.token_numbers + of_input)

    @property
    @abstractmethod
    def unpacked(self) -> Self:
        """Copy with dense weights in place of packed ones; see `FewOrMany.unpacked`."""

    @property
    def unpacked_bytes(self) -> int:
        return self.block.unpacked_bytes

    @abstractmethod
    def store(self, page_size: int, kernels: KernelSet) -> Store:
        """Return the store of the layer's rows, empty as yet. kernels: those that read pages."""

    @abstractmethod
    def attend(
        self,
        heads: mx.array,
        shared: Shared,
        rotation: int,
        pool: Sequence[mx.array],
        step: Step,
    ) -> mx.array:
        """Return the input of the output projection for each row.

        heads: the result of the first product. rotation: the number of the layer's rotation.
        """

    def ragged(
        self,
        hidden: mx.array,
        rotation: mx.array,
        store: Store,
        plan: StepPlan,
        texts: Texts | None,
        *,
        unpack: bool,
        own: Sequence[mx.array] = (),
    ) -> mx.array:
        """Return the layer's result in a step with prompts in it.

        hidden: (tokens, width). texts: the spans of the plan, for recurrent layers. own: see
        `PerLayerInput`. unpack: whether packed weights are made dense for the step.
        """
        part = self.unpacked if unpack else self
        heads = part.block.heads(hidden)
        attended = part._attend_ragged(heads, rotation, store, plan, texts)
        return part.block.after(hidden, attended, own)

    @abstractmethod
    def _attend_ragged(
        self,
        heads: mx.array,
        rotation: mx.array,
        store: Any,
        plan: StepPlan,
        texts: Texts | None,
    ) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class AttentionPart(LayerPart):
    block: Block
    head_norms: tuple[mx.array, mx.array] | None
    rotary: Rotary
    kernels: PagedKernels
    scale: float
    softcap: float | None
    window: int | None
    sinks: mx.array | None
    query_scaling: QueryScaling | None

    @staticmethod
    def of(spec: AttentionSpec, block: Block, kernels: PagedKernels) -> AttentionPart:
        """Return the part of the layer that `spec` describes.

        block: the same layer's products, joined. kernels: those for the layer's shape.
        """
        return AttentionPart(
            block=block,
            head_norms=spec.head_weights,
            rotary=spec.rotary,
            kernels=kernels,
            scale=spec.scale,
            softcap=spec.softcap,
            window=spec.window,
            sinks=spec.sinks,
            query_scaling=spec.query_scaling,
        )

    @property
    def kind(self) -> tuple[Any, ...]:
        scores = (self.scale, self.softcap, self.sinks is not None, self.query_scaling)
        return (self.kernels.shape, self.window, *scores, self.rotary)

    @property
    def unpacked(self) -> Self:
        return replace(self, block=self.block.unpacked)

    @property
    def _own_numbers(self) -> int:
        shape = self.kernels.shape
        return (3 if self.rotary.gated else 2) * shape.q_heads * shape.head_dim

    def store(self, page_size: int, kernels: KernelSet) -> LayerStore:
        return LayerStore(LayerShape.of(self.kernels.shape, self.window), page_size, kernels)

    def attend(
        self,
        heads: mx.array,
        shared: Shared,
        rotation: int,
        pool: Sequence[mx.array],
        step: Step,
    ) -> mx.array:
        keys, values = pool
        if step.far:
            heads = self._scaled(heads, shared.following - 1)
        fresh = (heads, shared.rotations[rotation], self.head_norms)
        how: dict[str, Any] = {
            "scale": self.scale,
            "splits": step.splits[self.window],
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
        lengths, rotary = shared.lengths, self.rotary
        pages = (keys, values, step.table, lengths)
        if rotary.alone or step.written:
            # Where `alone`, the layer whose keys and values these are has written them already.
            (slots,) = step.written or (lengths,)
            queries = self.kernels.rotate_and_write(*fresh, keys, values, slots, rotary=rotary)
            dep = shared.following[:1]
            attended = self.kernels.attend(queries, *pages, dep, **how)
            attended = attended.reshape(heads.shape[0], -1)
        else:
            attended = self.kernels.attend_fused(*fresh, *pages, rotary=rotary, **how)
        return self._gated(attended, heads)

    def _attend_ragged(
        self,
        heads: mx.array,
        rotation: mx.array,
        store: LayerStore,
        plan: StepPlan,
        texts: Texts | None,
    ) -> mx.array:
        if self.query_scaling is not None and plan.longest > self.query_scaling.tokens:
            heads = self._scaled(heads, plan.positions)
        queries = self.kernels.rotate_and_write(
            heads,
            rotation,
            self.head_norms,
            store.keys,
            store.values,
            plan.numbers.array,
            rotary=self.rotary,
        )
        attended = attend(queries, store, plan, self.scale, self.window, self.sinks, self.softcap)
        return self._gated(attended.reshape(heads.shape[0], -1), heads)

    def _scaled(self, heads: mx.array, positions: mx.array) -> mx.array:
        """Return `heads` of tokens at `positions`, (tokens,), with the queries among them
        multiplied by `query_scaling`'s factors."""
        if self.query_scaling is None:
            return heads
        of = self.kernels.shape
        factors = self.query_scaling(mx.maximum(positions, 0)).astype(heads.dtype)[:, None]
        are_queries = mx.arange(heads.shape[1]) < of.q_heads * of.head_dim
        return mx.where(are_queries, heads * factors, heads)

    def _gated(self, attended: mx.array, heads: mx.array) -> mx.array:
        """Return `attended`, (tokens, heads * dim), through the gates that lie behind each of
        `heads`' queries."""
        if not self.rotary.gated:
            return attended
        tokens, columns = heads.shape
        of = self.kernels.shape
        own = (tokens, of.q_heads, of.head_dim)
        gates = mx.as_strided(heads, own, (columns, 2 * of.head_dim, 1), of.head_dim)
        return _through_gates(attended.reshape(own), gates).reshape(tokens, -1)


@partial(mx.compile, shapeless=True)
def _through_gates(x: mx.array, gates: mx.array) -> mx.array:
    return x * mx.sigmoid(gates)


@dataclass(frozen=True, slots=True)
class StatePart(LayerPart):
    """Part of a layer whose rows keep a state. weights: those that `kernels` take besides the
    products'."""

    block: Block
    kernels: StateKernels
    weights: DeltaWeights | mx.array

    @property
    def kind(self) -> tuple[Any, ...]:
        return (self.kernels.shape,)

    @property
    def unpacked(self) -> Self:
        return replace(self, block=self.block.unpacked)

    @property
    def _own_numbers(self) -> int:
        return self.kernels.shape.numbers

    def store(self, page_size: int, kernels: KernelSet) -> StateStore:
        return StateStore(self.kernels.shape)

    def attend(
        self,
        heads: mx.array,
        shared: Shared,
        rotation: int,
        pool: Sequence[mx.array],
        step: Step,
    ) -> mx.array:
        return self.kernels.step(heads, self.weights, pool, shared.lengths, step.slots[0])

    def _attend_ragged(
        self,
        heads: mx.array,
        rotation: mx.array,
        store: StateStore,
        plan: StepPlan,
        texts: Texts | None,
    ) -> mx.array:
        assert texts is not None
        return self.kernels.chunks(heads, self.weights, store, texts)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the decoder.

    rotation: the number of its rotation among the decoder's kinds. source: the number of the store
    that it works on.
    """

    part: LayerPart
    joint: Joint
    rotation: int
    source: int

    def attend(
        self, heads: mx.array, shared: Shared, pool: Sequence[mx.array], step: Step
    ) -> mx.array:
        """Return attention's result, (rows, heads * dim).

        heads: the layer's own, (rows, (heads + 2 * kv_heads) * dim).
        """
        return self.part.attend(heads, shared, self.rotation, pool, step)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key that is equal for layers whose launches are by the same kernels."""
        return (*self.part.kind, *self.joint.kind)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Layer of a step with prompts, with everything that distinguishes it from others of its kind.

    kind: a number. arrays: those of `part`. rotation: the number of its rotation. source: the
    number of its store.
    """

    part: LayerPart
    kind: int
    arrays: Sequence[mx.array]
    rotation: int
    source: int

    @staticmethod
    def all_of(layers: Sequence[Layer]) -> list[Repeated]:
        parts = [layer.part for layer in layers]
        numbers: dict[tuple[Any, ...], int] = {}
        kinds = [numbers.setdefault(kind_of(part), len(numbers)) for part in parts]
        return [
            Repeated(part, kind, arrays_of(part), layer.rotation, layer.source)
            for part, kind, layer in zip(parts, kinds, layers, strict=True)
        ]

    def run(  # noqa: PLR0917
        self,
        store: Store,
        plan: StepPlan,
        texts: Texts | None,
        unpack: bool,
        hidden: mx.array,
        rotation: mx.array,
        own_inputs: Sequence[mx.array],
        arrays: Sequence[mx.array],
        pages: Sequence[mx.array],
    ) -> tuple[mx.array, mx.array]:
        """Return the result of any layer of this kind, and `written` of its store.

        own_inputs: see `PerLayerInput`. arrays, pages: those of that layer, and of its store.
        texts, unpack: see `LayerPart.ragged`.
        """
        own = store.alike(pages)
        part = made_of(self.part, arrays)
        result = part.ragged(hidden, rotation, own, plan, texts, unpack=unpack, own=own_inputs)
        return result, own.written

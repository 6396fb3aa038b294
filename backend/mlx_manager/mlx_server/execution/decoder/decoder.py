"""Fused decoder as a whole: its construction and its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.attention import kinds as attention
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, Lengths, PagedKernels
from mlx_manager.mlx_server.devices.attention.kernel_set import (
    BuildKernels,
    BuildLatents,
    KernelSet,
)
from mlx_manager.mlx_server.devices.attention.splits import BlockKind, Splits
from mlx_manager.mlx_server.devices.cuda.attention import opening
from mlx_manager.mlx_server.devices.cuda.attention.opening import BuildOpening
from mlx_manager.mlx_server.devices.cuda.linear_attention import delta as recurrent
from mlx_manager.mlx_server.devices.cuda.linear_attention import short
from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import (
    BuildDelta,
    DeltaKernels,
    Texts,
)
from mlx_manager.mlx_server.devices.cuda.linear_attention.short import BuildShort, ShortKernels
from mlx_manager.mlx_server.devices.cuda.matmul import products
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.devices.cuda.mla.latent import LatentKernels
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.states import DeltaShape, ShortShape, StateStore
from mlx_manager.mlx_server.engine.kv.store import LayerStore
from mlx_manager.mlx_server.execution.alike import arrays_of
from mlx_manager.mlx_server.execution.attention.latent_chunks import meeting_of
from mlx_manager.mlx_server.execution.attention.paged import StepPlan, prepare
from mlx_manager.mlx_server.execution.compiled import Compile, Kinds
from mlx_manager.mlx_server.execution.decoder.latent import LatentPart
from mlx_manager.mlx_server.execution.decoder.layers import (
    AttentionPart,
    Block,
    Ending,
    Joint,
    Layer,
    LayerPart,
    Opening,
    Repeated,
    Shared,
    StatePart,
    Step,
    Store,
)
from mlx_manager.mlx_server.execution.images import MRope
from mlx_manager.mlx_server.execution.pieces import Pieces
from mlx_manager.mlx_server.execution.spec.decoder import DecoderSpec
from mlx_manager.mlx_server.execution.spec.layers import (
    AttentionSpec,
    DeltaSpec,
    LayerSpec,
    MLASpec,
    ShortConvSpec,
)
from mlx_manager.mlx_server.execution.spec.parts import NotFusable
from mlx_manager.mlx_server.execution.step import RaggedStep

A = TypeVar("A", AttentionSpec, MLASpec, DeltaSpec, ShortConvSpec)
K = TypeVar("K")
BuildProducts = Callable[[mx.Dtype], ProductKernels | Unsupported]
Cuts = tuple[Sequence[tuple[int | None, bool, BlockKind]], bool]
"""Static part of a step: for each of its splits the window, `divided` and `blocks`; and `far`."""
Stepped = tuple[mx.array, mx.array]
"""Result of a decode step: its logits, and `before` of the next step."""
# Layers of a step with prompts that are queued at a time: the device begins while the host puts the
# next layers together. Queueing releases Python's lock and has to wait for it again.
LAYERS_AT_A_TIME = 8
# Limits of queued work. A queued layer keeps all its arrays, 147 kB a token and layer of an 8B. So
# layers that are queued together have arrays of at most `BYTES_AT_A_TIME`, unless it is one layer,
# and all queued layers of at most `BYTES_AHEAD`, unless it is `LEAST_AHEAD` pieces. One layer at a
# time costs 1 to 2 % of an 8B's prompt rate, and saves half of the memory that two take.
BYTES_AT_A_TIME = 500_000_000
BYTES_AHEAD = 1_300_000_000
LEAST_AHEAD = 3
# Steps of more than `MANY` tokens come where memory is plenty and steps are short. The host's time
# for the next step, 6 to 9 ms, is to be hidden behind the rest of the pieces.
MANY = 2048
LEAST_AHEAD_OF_MANY = 4
# Number of steps whose arrays exist at once, of steps that are queued whole (measured: 1.4 of an
# 8B's of 512 tokens).
STEPS_AHEAD = 1.5
# Tokens of a step with prompts from which on packed weights without dense ones beside them are made
# dense, a layer at a time. That takes as long whatever the tokens, while MLX's products with packed
# weights take 1 ms a layer of an 8B for 64 tokens (H200).
FEWEST_UNPACKED = 65
# Layers of a decode step that are queued at a time where the device waits for the step. All at once
# would be recorded as one graph, which takes the host 2 ms for an 8B's draft.
LAYERS_OF_A_PART = 4


class FusedDecoder:
    """Fused decoder of one model; made by `build`.

    Attributes:
        unpacks: whether weights may be made dense for steps with many tokens; see `keep_packed`.
        far_from: tokens of a row beyond which its queries are multiplied by a factor, or None if
            they never are; see `Temper`.
        hidden: the last step's states behind the last norm, (tokens, width), those of padding
            included; None where they are not kept.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        open: Opening,
        ending: Ending,
        compile: Compile,
    ) -> None:
        self._layers = layers
        self._repeated = Repeated.all_of(layers)
        self._open = open
        self._ending = ending
        parts = [layer.part for layer in layers]
        # For each kind of attention, the number of one store that it reads.
        self._attentions: dict[tuple[AttentionShape, int | None], int] = {}
        self._latents: dict[LatentShape, LatentKernels] = {}
        self._planners: dict[int | None, PagedKernels] = {}
        for number, part in enumerate(parts):
            match part:
                case AttentionPart():
                    self._attentions[part.kernels.shape, part.window] = layers[number].source
                    self._planners[part.window] = part.kernels
                case LatentPart():
                    self._latents[part.kernels.shape] = part.kernels
        # Largest number of bytes that a layer makes for a token, and that a layer's weights take
        # when dense.
        self._layer_bytes = max(part.token_bytes for part in parts)
        self._unpacked_bytes = max(part.unpacked_bytes for part in parts)
        self.unpacks = self._unpacked_bytes > 0
        scalings = [part.query_scaling for part in parts if isinstance(part, AttentionPart)]
        self.far_from = min((each.tokens for each in scalings if each), default=None)
        self._compile = compile
        self._kinds = Kinds(compile)
        self._keeps_hidden = False
        self.hidden: mx.array | None = None

    @staticmethod
    def build(  # noqa: PLR0917
        model: nn.Module,
        page_size: int,
        kernels: BuildKernels = attention.build,
        products: BuildProducts = products.build,
        compile: Compile = mx.compile,
        openings: BuildOpening = opening.build,
        deltas: BuildDelta = recurrent.build,
        latents: BuildLatents = attention.build_latents,
        shorts: BuildShort = short.build,
        mrope: MRope | None = None,
    ) -> FusedDecoder | Unsupported:
        """Return the fused form of `model`, an mlx-lm module on the MLX thread, or the reason why
        there is none. mrope: the axes of its positions, if there are several.

        From here on the module's projections of q, k and v, and of gate and up, share memory with
        the joined ones, a layer at a time. Nothing has been compared yet: see `check`.
        """
        try:
            spec = DecoderSpec.of(model, page_size, mrope)
            parts = _Parts.build(spec, kernels, deltas, latents, shorts)
            return _build(spec, parts, products, compile, openings)
        except NotFusable as reason:
            return Unsupported(f"the module is no common decoder: {reason}")

    def plan(self, lengths: Lengths) -> dict[int | None, Splits]:
        """Return the splits of a step's attention by window. `lengths` are those of the step. The
        splits also serve the steps that follow, as long as the same rows go on (see `Splits`)."""
        cuts: dict[int | None, Splits] = {
            window: kernels.plan(lengths, window=window)
            for window, kernels in self._planners.items()
        }
        for kernels in self._latents.values():
            cuts[None] = kernels.plan(lengths)
        return cuts

    @property
    def by_axes(self) -> bool:
        """Return whether positions have several axes (M-RoPE)."""
        return any(rotation.axes is not None for rotation in self._open.rotations)

    def is_far(self, lengths: Sequence[int]) -> bool:
        """Return whether a step of rows with so many tokens is `far`."""
        return self.far_from is not None and max(lengths) > self.far_from

    @property
    def repeats(self) -> bool:
        """Return whether the last step was repeated from a compiled one."""
        return self._kinds.repeated

    def run(self, step: Step, *, in_parts: bool = False) -> Stepped:
        """Return the logits (rows, vocabulary) of one step, and `before` of the next; not
        evaluated.

        A kind of step is its rows, the width of the table, and the length of the work lists. A kind
        that keeps coming is compiled, which halves the host's time.

        in_parts: queue the layers already, some at a time, since the device has nothing to do.
        """
        kind = (
            step.table.shape,
            step.far,
            len(step.shifts),
            len(step.written),
            *((cut.work, cut.divided, cut.blocks) for cut in step.splits.values()),
        )
        run = partial(self._run, _cuts(step))
        soon = bool(step.written)
        logits, before, states, parts = self._kinds.run(kind, run, *_arrays(step), soon=soon)
        self.hidden = states[0] if states else None
        if in_parts:
            for part in parts:
                mx.async_eval(part)  # type: ignore[no-untyped-call]
        return logits, before

    def keep_hidden(self) -> None:
        """Keep the hidden states of steps from now on."""
        self._keeps_hidden = True
        # Steps that have been compiled return no states.
        self._kinds.forget()

    def launches(self, step: Step) -> list[mx.array]:
        """Return the launches of `run`, in order and not evaluated, in one layer of each kind.

        The first launch of a kernel compiles it, and MLX keeps it on disk. These launches write to
        the same places of the pages as `run`. What they write may differ, since layers before are
        left out.
        """
        return self._all_launches(_cuts(step), *_arrays(step))

    def launches_compiled(self, step: Step) -> list[mx.array]:
        """Return the launches as `launches` does, but of a compiled step; all kinds of steps share
        their kernels."""
        compiled = self._compile(partial(self._all_launches, _cuts(step)))
        found: list[mx.array] = compiled(*_arrays(step))
        return found

    def stores(self, page_size: int, kernels: KernelSet) -> list[Store]:
        """Return the stores of the layers, empty as yet: pages that `kernels` read, or states."""
        return [
            layer.part.store(page_size, kernels)
            for number, layer in enumerate(self._layers)
            if layer.source == number
        ]

    def prepare(self, plan: StepPlan, stores: Sequence[Store]) -> None:
        """Send the arrays that `run_ragged` takes of `plan`. An array that `run_ragged` sends
        itself is sent apart from the others."""
        _ = plan.numbers.array
        for (shape, window), number in self._attentions.items():
            store = stores[number]
            assert isinstance(store, LayerStore)
            prepare(shape.q_heads, store, plan, window)
        for kernels in self._latents.values():
            meeting_of(plan, kernels)

    def restore(self, number: int, store: StateStore, slot: int, kept: list[mx.array]) -> None:
        """Put back the content that `store` of the layer `number` had in a slot; see
        `DeltaKernels.restore`."""
        part = self._layers[number].part
        assert isinstance(part, StatePart)
        part.kernels.restore(store, slot, kept)

    def run_ragged(
        self,
        step: RaggedStep,
        stores: Sequence[Store],
        texts: Texts | None = None,
        before: Pieces | None = None,
    ) -> tuple[mx.array, Pieces]:
        """Return the logits (wanted tokens, vocabulary) of a step with or without chunks of
        prompts, and the pieces that are to be queued before them. The result of a silent step is
        (1, hidden size).

        `stores` are the layers' pages and states, written in place; texts: see `LayerPart.ragged`;
        before: the last step's pieces, where it had some. A layer is put together once for each
        kind, and the graph repeated: that takes the host half as long as putting together all
        layers.
        """
        rotations = [rotation(step.plan.angles) for rotation in self._open.rotations]
        hidden, insertion = self._open.embed(step.tokens), step.insertion
        if insertion is not None:
            hidden = insertion.into(hidden, self._open.scale)
        per_layer_inputs = self._open.of_layers(step.tokens, hidden)
        at_a_time, pieces_ahead = self._ahead(step.tokens.size, self._expanded_bytes(step.plan))
        pieces = Pieces(pieces_ahead, before)
        unpack = self._unpacks(step.tokens.size)
        compiled: dict[int, Callable[..., tuple[mx.array, mx.array]]] = {}
        for number, layer in enumerate(self._repeated):
            store = stores[layer.source]
            if layer.kind not in compiled:
                once = partial(layer.run, store, step.plan, texts, unpack)
                compiled[layer.kind] = self._compile(once)
            run, rotation = compiled[layer.kind], rotations[layer.rotation]
            own = _own(per_layer_inputs, number)
            hidden, store.written = run(hidden, rotation, own, layer.arrays, store.arrays)
            if insertion is not None:
                hidden = insertion.added(number, hidden)
            if (number + 1) % at_a_time == 0:
                pieces.add(hidden)
        if self._keeps_hidden:
            self.hidden = self._ending.norm(hidden)
        last = hidden if step.wanted is None else hidden[step.wanted]
        return last if step.silent else self._ending(last), pieces

    def tokens_at_once(self, tokens: int) -> int:
        """Return the tokens at once: see `Forward`. A step's first pieces are queued while the end
        of the last step runs."""
        whole = min(tokens, int(BYTES_AHEAD / (self._layer_bytes * len(self._layers))))
        at_a_time, pieces = self._ahead(tokens)
        part = STEPS_AHEAD if pieces is None else at_a_time * pieces / len(self._layers)
        return int(max(STEPS_AHEAD * whole, min(part, STEPS_AHEAD) * tokens))

    @property
    def unpacked_at_once(self) -> int:
        """Bytes of the weights that are made dense at once for steps with many tokens. The fewest
        such tokens need the most bytes, since the most layers are queued then."""
        if not self.unpacks:
            return 0
        return self._queued(FEWEST_UNPACKED) * self._unpacked_bytes

    def expanded_at_once(self, tokens: int) -> int:
        """Return the bytes that a step of so many tokens holds beyond those of `tokens_at_once`, if
        its layers expand as many latents as they may."""
        expansions = [of.expansion for of in self._latents.values() if of.expansion is not None]
        if not expansions:
            return 0
        expanded = max(of.most_bytes for of in expansions)
        layer = tokens * self._layer_bytes + expanded
        counted = self.tokens_at_once(tokens) * self._layer_bytes * len(self._layers)
        return max(self._queued(tokens, expanded) * layer - counted, 0)

    @property
    def expands(self) -> bool:
        """Return whether latents may be expanded for steps with many tokens."""
        return any(kernels.expansion is not None for kernels in self._latents.values())

    def keep_packed(self) -> None:
        """Unpack weights and expand latents no more from now on."""
        self.unpacks = False
        for kernels in self._latents.values():
            kernels.expansion = None

    def _unpacks(self, tokens: int) -> bool:
        return self.unpacks and tokens >= FEWEST_UNPACKED

    def _queued(self, tokens: int, expanded: int = 0) -> int:
        """Return the number of layers that are queued at once; see `_ahead`."""
        at_a_time, pieces = self._ahead(tokens, expanded)
        layers = len(self._layers)
        return layers if pieces is None else min(layers, at_a_time * pieces)

    def _expanded_bytes(self, plan: StepPlan) -> int:
        """Return the bytes that a layer of the step takes for expanded latents."""
        found = [meeting_of(plan, kernels).expanded for kernels in self._latents.values()]
        return max((each.bytes for each in found if each is not None), default=0)

    def _ahead(self, tokens: int, expanded: int = 0) -> tuple[int, int | None]:
        """Return the number of layers in a piece of a step of so many tokens, and the largest
        number of pieces at once; None: all.

        expanded: bytes of the latents that a layer expands.
        """
        layer = tokens * self._layer_bytes + expanded
        if self._unpacks(tokens):
            layer += self._unpacked_bytes
        if layer * len(self._layers) <= BYTES_AHEAD:
            return LAYERS_AT_A_TIME, None
        least = LEAST_AHEAD_OF_MANY if tokens > MANY else LEAST_AHEAD
        at_a_time = max(1, min(LAYERS_AT_A_TIME, int(BYTES_AT_A_TIME / layer)))
        return at_a_time, max(least, int(BYTES_AHEAD / (at_a_time * layer)))

    def _run(  # noqa: PLR0917
        self,
        cuts: Cuts,
        tokens: mx.array,
        before: mx.array,
        table: mx.array,
        pools: Sequence[Sequence[mx.array]],
        items: Sequence[mx.array],
        slots: Sequence[mx.array],
        shifts: Sequence[mx.array],
        written: Sequence[mx.array],
    ) -> tuple[mx.array, mx.array, list[mx.array], list[mx.array]]:
        step = _step(cuts, tokens, before, table, pools, items, slots, shifts, written)
        hidden, shared = self._opened(step)
        heads: mx.array | None = None
        parts = []
        for number, layer in enumerate(self._layers):
            fresh = layer.part.block.heads(hidden) if heads is None else heads
            attended = layer.attend(fresh, shared, pools[layer.source], step)
            joined = layer.joint(hidden, attended, _own(shared.per_layer_inputs, number))
            hidden, heads = joined.result, joined.heads
            if (number + 1) % LAYERS_OF_A_PART == 0:
                parts.append(hidden)
        states = [self._ending.norm(hidden)] if self._keeps_hidden else []
        return self._ending(hidden), shared.following, states, parts

    def _opened(self, step: Step) -> tuple[mx.array, Shared]:
        hidden, shared = self._open(step.tokens, step.before, step.shifts)
        for shape in self._latents:
            shared = shared.with_slots(step.table, shape.page_size)
        return hidden, shared

    def _all_launches(self, cuts: Cuts, *arrays: Any) -> list[mx.array]:
        step = _step(cuts, *arrays)
        hidden, shared = self._opened(step)
        found = [shared.following, *shared.rotations, hidden]
        found += [] if shared.per_layer_inputs is None else [shared.per_layer_inputs]
        kinds = set()
        for number, layer in enumerate(self._layers):
            if layer.kind not in kinds:
                kinds.add(layer.kind)
                heads = layer.part.block.heads(hidden)
                attended = layer.attend(heads, shared, step.pools[layer.source], step)
                joined = layer.joint(hidden, attended, _own(shared.per_layer_inputs, number))
                found += [heads, attended, *joined.launches]
                hidden = joined.result
        return [*found, self._ending(hidden)]


def _own(per_layer_inputs: mx.array | None, layer: int) -> list[mx.array]:
    """Return the layer's own input for each token, one array (tokens, width), or none if there is
    none; see `PerLayerInput`."""
    return [] if per_layer_inputs is None else [per_layer_inputs[:, layer]]


def _cuts(step: Step) -> Cuts:
    return [(window, cut.divided, cut.blocks) for window, cut in step.splits.items()], step.far


def _arrays(step: Step) -> tuple[Any, ...]:
    items = [cut.items for cut in step.splits.values()]
    more = list(step.slots), list(step.shifts), list(step.written)
    return step.tokens, step.before, step.table, step.pools, items, *more


def _step(  # noqa: PLR0917
    cuts: Cuts,
    tokens: mx.array,
    before: mx.array,
    table: mx.array,
    pools: Sequence[Sequence[mx.array]],
    items: Sequence[mx.array],
    slots: Sequence[mx.array],
    shifts: Sequence[mx.array],
    written: Sequence[mx.array],
) -> Step:
    windows, far = cuts
    splits = {
        window: Splits(array, divided, blocks)
        for (window, divided, blocks), array in zip(windows, items, strict=True)
    }
    return Step(tokens, before, table, pools, splits, slots, far, shifts, written)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Maker of the layers' parts, over the kernels for their shapes."""

    attentions: dict[AttentionShape, PagedKernels]
    deltas: dict[DeltaShape, DeltaKernels]
    latents: dict[LatentShape, LatentKernels]
    shorts: dict[ShortShape, ShortKernels]

    @staticmethod
    def build(
        spec: DecoderSpec,
        kernels: BuildKernels,
        deltas: BuildDelta,
        latents: BuildLatents,
        shorts: BuildShort,
    ) -> _Parts:
        """Build the kernels for the layers of `common`.

        Raises:
            NotFusable: there are no kernels for some shape.
        """
        own = spec.layers
        attentions = {a.shape: _built(kernels(a.shape)) for a in _one_each(own, AttentionSpec)}
        recurrences = {a.shape: _built(deltas(a.shape)) for a in _one_each(own, DeltaSpec)}
        convolutions = {a.shape: _built(shorts(a.shape)) for a in _one_each(own, ShortConvSpec)}
        met = {
            a.shape: _built(latents(a.shape, traditional=a.rotary.traditional))
            for a in _one_each(own, MLASpec)
        }
        return _Parts(attentions, recurrences, met, convolutions)

    def of(self, spec: LayerSpec, block: Block, few: ProductKernels | None) -> LayerPart:
        """Return the part of the layer that `spec` describes.

        block: the same layer's products, joined. few: kernels that multiply few rows, if the device
        has any.
        """
        match spec:
            case AttentionSpec():
                return AttentionPart.of(spec, block, self.attentions[spec.shape])
            case DeltaSpec():
                return StatePart(block, self.deltas[spec.shape], spec.given)
            case ShortConvSpec():
                return StatePart(block, self.shorts[spec.shape], spec.given)
            case MLASpec():
                return LatentPart.of(spec, block, self.latents[spec.shape], few)
        raise NotFusable(f"a layer of the kind {type(spec).__name__}")


def _one_each(layers: Sequence[Any], kind: type[A]) -> list[A]:
    """Return the layers of that kind, one of each shape."""
    return list({layer.shape: layer for layer in layers if isinstance(layer, kind)}.values())


def _built(kernels: K | Unsupported) -> K:
    if isinstance(kernels, Unsupported):
        raise NotFusable(kernels.reason)
    return kernels


def _build(
    spec: DecoderSpec,
    parts: _Parts,
    products: BuildProducts,
    compile: Compile,
    openings: BuildOpening,
) -> FusedDecoder:
    multiplier = products(spec.layers[0].shape.dtype)
    few = None if isinstance(multiplier, Unsupported) else multiplier
    blocks = []
    for layer in spec.layers:
        blocks.append(Block.of(layer, few))
        # Evaluated before the next layer is joined, so that only one layer's weights exist twice.
        mx.eval([*layer.weights(), *arrays_of(blocks[-1]), spec.norm.weight])
        blocks[-1].mlp.compare()
    joints = [Joint.of(*pair, few) for pair in zip(blocks, [*blocks[1:], None], strict=True)]
    layers = [
        Layer(parts.of(layer, joint.block, few), joint, kind, source)
        for layer, kind, joint, source in zip(
            spec.layers, spec.kinds, joints, spec.sources, strict=True
        )
    ]
    return FusedDecoder(
        layers,
        Opening.of(spec, openings),
        Ending.of(spec, few),
        compile,
    )

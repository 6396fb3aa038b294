"""Ways of running a step's tokens through the model: the first of three that is right is taken.

* `RaggedForward`: every token of the step in one pass, all layers on pages. For models whose
  layers all keep plain or sliding-window keys and values and attend through mlx-lm's function.
* `SeparateForward`: running rows as one batch, each prompt chunk as a pass of its own. For models
  that compute attention themselves (soft caps, latent attention) or keep another kind of state
  (recurrent, linear attention): keys and values are on pages all the same, the other layers'
  state is in mlx-lm's own batch caches.
* `AloneForward`: each row by itself over mlx-lm's own caches. For everything else.

The common decoder has ways of its own over the same pages: `fused` on a GPU, `joined` on a CPU.

The right way is not looked up in a list of families. `select.choose` finds it when a model is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar, Literal, Protocol

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.attention import KernelSet
from mlx_manager.mlx_server.devices.cpu.activations import silu_by_powers
from mlx_manager.mlx_server.devices.cpu.convolution import with_taps
from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.devices.metal.order import IN_ORDER, LaunchOrder
from mlx_manager.mlx_server.devices.table import Device
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore
from mlx_manager.mlx_server.execution.attention.latent import multiply_by_head
from mlx_manager.mlx_server.execution.attention.paged import (
    PagedLayer,
    Pass,
    Reading,
    Span,
    StepPlan,
    is_flash,
    route,
)
from mlx_manager.mlx_server.execution.attention.rotary import share_rotations
from mlx_manager.mlx_server.execution.compiled import Compile
from mlx_manager.mlx_server.execution.modules import ModuleSteps, serves
from mlx_manager.mlx_server.execution.running import padded_rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one sequence's prompt.

    A `final` chunk gives logits for the first token that follows the prompt. A chunk with `every`
    gives the logits of all its tokens.
    """

    key: int
    span: Span
    tokens: list[int]
    final: bool
    every: bool = False


@dataclass(frozen=True, slots=True)
class Decode:
    """The running rows of a step, each with one query.

    keys, tables: the rows' own, in order. lengths: of each row, its newest token included. tokens:
    uint32, the rows' newest; entries after those mean nothing.
    """

    keys: list[int]
    tables: list[PageTable]
    lengths: list[int]
    tokens: mx.array

    @property
    def spans(self) -> list[Span]:
        return list(map(Span, self.tables, self.lengths))

    def after(self, order: LaunchOrder) -> Decode:
        """Return the same rows, in a step whose launches come after earlier ones in `order`."""
        return self if order.kept else replace(self, tokens=order.after(self.tokens))


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """All tokens of a step one after another, those of running rows first.

    tokens: (tokens,) uint32, in the order of the plan's spans, then padding. wanted: (n,) int32,
    the tokens whose logits are wanted; None for all of them. silent: whether no logits are wanted;
    `wanted` then is one token that stands for none.
    """

    tokens: mx.array
    plan: StepPlan
    wanted: mx.array | None
    silent: bool

    @classmethod
    def of(
        cls,
        decode: Decode | None,
        chunks: Sequence[Chunk],
        page_size: int,
        whole: Callable[[int], int] = int,
        order: LaunchOrder = IN_ORDER,
    ) -> RaggedStep:
        """Return the step of these rows and chunks.

        whole: returns the number that so many tokens are padded to. order: the order of launches
        that the step follows.
        """
        spans = [*(decode.spans if decode else ()), *(chunk.span for chunk in chunks)]
        parts = [decode.tokens[: len(decode.keys)]] if decode else []
        rows = list(range(len(decode.keys) if decode else 0))
        end = len(rows)
        for chunk in chunks:
            start, end = end, end + len(chunk.tokens)
            if chunk.every:
                rows += range(start, end)
            elif chunk.final:
                rows.append(end - 1)
        padding = whole(end) - end
        known = chain(chain.from_iterable(chunk.tokens for chunk in chunks), repeat(0, padding))
        if chunks or padding:
            numbers = np.fromiter(known, np.int32)
            parts.append(send(numbers).view(mx.uint32))
        tokens = order.after(parts[0] if len(parts) == 1 else mx.concatenate(parts))
        all_wanted = len(rows) == end + padding
        wanted = None if all_wanted else send(np.array(rows or [0], np.int32))
        return cls(tokens, StepPlan(spans, page_size, padding), wanted, silent=not rows)


Prefixes = Literal["pages", "snapshot", "copy"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a row's layers that are not on pages, after some prefix.

    leaves: the arrays of each such layer. caches: all the row's caches, where none are on pages.
    """

    leaves: list[list[mx.array | None]]
    caches: Sequence[Any] = ()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for leaf in self.leaves for array in leaf if array is not None)


class Forward(Protocol):
    """Protocol of a way of running one model's steps.

    Attributes:
        kind: "fused", "ragged", "separate" or "alone".
        stores: the layers' pages; empty when the rows keep mlx-lm's own caches.
        token_bytes: bytes that a row keeps for each of its tokens besides pages. row_bytes: bytes
            that a row keeps whatever its length, while one step's state follows the other's.
        prefixes: the parts of a prefix: "pages" alone, pages and a "snapshot" of the other layers'
            state, or a "copy" of all that a row keeps, of which each row that continues the prefix
            has its own. worth: tokens that a snapshot must save to be worth the step that ends at
            it.
        looks_ahead: whether a step may be queued before the last one's tokens have been read: not
            where the pages would be copied, since the step under way holds them.
        puts_together_ahead: whether `run` may be called before the last step's tokens have been
            read, even if its result is computed only afterwards.
        horizon: tokens that the rows' pages are wanted to reach ahead, so that the tables need not
            be sent to the device at every step.
        grain: a step with prompts in it had best have a multiple of so many tokens.
        attends_whole: whether modules attend by themselves, all queries of a chunk at once.
        abreast: running rows that are enough for a step: twice as many take little longer in two. 0
            where a step takes about as long however many rows there are, or where the other rows'
            state would have to be put aside.
    """

    kind: ClassVar[str]
    stores: list[LayerStore]
    token_bytes: int
    row_bytes: int
    prefixes: Prefixes
    worth: int
    looks_ahead: bool
    puts_together_ahead: bool
    horizon: int
    grain: int
    abreast: int
    attends_whole: bool

    def serve(self) -> None:
        """End the load: from now on the thread that calls `run` computes its result, too."""
        ...

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return the indices that put decoding rows in the order that `run` wants."""
        ...

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        """Return logits (rows + those of chunks, vocabulary), rows first; not evaluated.

        Without chunks, rows that mean nothing may follow. Where no logits are wanted, the result is
        one row that means nothing. The step has been done when the result and `state` have been
        evaluated.
        """
        ...

    @property
    def unfinished(self) -> bool:
        """Return whether `run` has left a part of its pass to `finish`, since a GPU's memory should
        not hold all of the pass at once. The device is busy with the first part."""
        ...

    def finish(self) -> None:
        """Queue the rest of the last `run`, waiting for the device in between."""
        ...

    def abandon(self) -> None:
        """Drop the rest of a failed step, which refers to pages that are gone."""
        ...

    def forget(self, key: int) -> None:
        """Drop the state of a sequence besides its pages: it has ended or is paused."""
        ...

    def state(self) -> list[mx.array]:
        """Return the arrays that outlive a step and must be evaluated with it."""
        ...

    def tokens_at_once(self, tokens: int) -> int:
        """Return the number of tokens whose results of all layers a GPU's memory holds together,
        while steps of so many tokens follow each other."""
        ...

    def unpacked_bytes(self, tokens: int) -> int:
        """Return the bytes that steps of so many tokens take for what they unpack: weights, made
        dense, and latents, made keys and values of heads."""
        ...

    def keep_packed(self) -> None:
        """Unpack nothing from now on: there is no memory for it."""
        ...

    def snapshot(self, key: int) -> Snapshot | None:
        """Return a snapshot of a sequence whose prompt is being processed, or None if it has no
        state of its own. The snapshot is of the state after the last step, which has been queued
        whole."""
        ...

    def restore(self, key: int, snapshot: Snapshot) -> None:
        """Begin a sequence with the state of another one that had the same prefix."""
        ...


class NotApplicable(Exception):
    """Error: this way of running cannot serve this model; the message says why."""


class Plain:
    """Defaults of the `Forward` protocol."""

    looks_ahead: bool = False
    puts_together_ahead: bool = False
    horizon: int = 0
    grain: int = 1
    abreast: int = 0
    attends_whole: bool = False
    worth: int = 0
    token_bytes: int = 0
    row_bytes: int = 0
    stores: list[LayerStore]
    order_of_launches: LaunchOrder = IN_ORDER

    def serve(self) -> None:
        self.order_of_launches.forget()

    @property
    def unfinished(self) -> bool:
        return False

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        self.order_of_launches.forget()

    def tokens_at_once(self, tokens: int) -> int:
        return tokens

    def unpacked_bytes(self, tokens: int) -> int:
        return 0

    def keep_packed(self) -> None:
        pass

    def snapshot(self, key: int) -> Snapshot | None:
        return None

    def restore(self, key: int, snapshot: Snapshot) -> None:
        pass

    def _pages(self) -> list[mx.array]:
        return [array for store in self.stores for array in (store.keys, store.values)]


# A step of 128 rows of the embedded model takes two cores 26 ms, and two of 64 take 30.
ABREAST_ON_CPU = 48


class OnPages(Plain):
    """Common part of forwards whose rows' state is on pages, all of it."""

    prefixes: Prefixes = "pages"
    puts_together_ahead: bool = True

    def forget(self, key: int) -> None:
        pass

    def state(self) -> list[mx.array]:
        return self._pages()


class RaggedForward(OnPages):
    """Forward that runs all tokens of a step in one pass, (tokens, 1).

    kernels: those that write to the pages and read them for running rows, on a GPU. compile:
    compiles steps of running rows alone.
    """

    kind: ClassVar[str] = "ragged"

    def __init__(
        self,
        model: nn.Module,
        page_size: int,
        reading: Reading,
        kernels: KernelSet | None = None,
        compile: Compile = mx.compile,
    ) -> None:
        self._model = model
        self._page_size = page_size
        self._pass = Pass()
        self._selection = HiddenSelection(model)
        self.looks_ahead = kernels is not None
        if kernels is not None:
            self.order_of_launches = kernels.order
        self._caches = _paged(
            make_prompt_cache(model),
            probe(model),
            lambda shape: LayerStore(shape, page_size, kernels),
            self._pass,
            reading,
        )
        self.layers = _layers(self._caches)
        self.stores = [layer.store for layer in self.layers]
        if len(self.stores) < len(self._caches):
            raise NotApplicable("some layers keep another kind of state than keys and values")
        route(model)
        self.rows: ModuleSteps | None = None
        if kernels is not None and serves(self.layers):
            call = partial(self._selection.logits, model, self._caches)
            how = (self._pass, page_size, compile, padded_rows)
            self.rows = ModuleSteps(call, self.layers, (), *how)
        if kernels is None and mx.default_device() == mx.cpu:
            self.abreast = ABREAST_ON_CPU
            share_rotations(model, self.stores[0].shape.key_dim)
            silu_by_powers(model)

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        # Kernels divide the work by themselves. Without kernels, rows of similar length are
        # gathered.
        if self.looks_ahead:
            return list(range(len(lengths)))
        return shortest_first(lengths)

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        logits = self._run(decode, chunks)
        self.order_of_launches.then(logits)
        return logits

    def _run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        order = self.order_of_launches
        if self.rows is not None:
            if decode is not None and not chunks:
                return self.rows.run(decode.after(order))
            self.rows.pause()
        step = RaggedStep.of(decode, chunks, self._page_size, order=order)
        self._pass.plan = step.plan
        tokens, wanted = step.tokens[:, None], step.wanted
        hidden = _as_it_is if wanted is None else (lambda h: h[wanted])
        return self._selection.logits(self._model, self._caches, tokens, hidden)

    def abandon(self) -> None:
        super().abandon()
        if self.rows is not None:
            self.rows.pause()

    def state(self) -> list[mx.array]:
        return super().state() + ([] if self.rows is None else self.rows.state())


def shortest_first(lengths: Sequence[int]) -> list[int]:
    """Return `Forward.order` for rows that are gathered with others of similar length."""
    return sorted(range(len(lengths)), key=lengths.__getitem__)


def order_after(before: Sequence[int], keys: Sequence[int]) -> list[int]:
    """Return `Forward.order` for rows that stay where they were in the last step; new rows
    follow."""
    place = {key: i for i, key in enumerate(before)}
    return sorted(range(len(keys)), key=lambda i: place.get(keys[i], len(place)))


class SeparateForward(Plain):
    """Forward that runs the running rows as one batch, (rows, 1), and each chunk as (1, tokens).

    kernels: those that write to the pages on a GPU, and read them where the module attends over
    pages. compile: compiles the rows' pass.
    """

    kind: ClassVar[str] = "separate"

    def __init__(
        self,
        model: nn.Module,
        page_size: int,
        reading: Reading,
        kernels: KernelSet | None = None,
        compile: Compile = mx.compile,
    ) -> None:
        self._model = model
        self._page_size = page_size
        self._pass = Pass()
        leaves = _filled(model, 2)
        self._shapes = list(map(_shape, leaves))
        # A step's state exists beside the last one's, and a grown batch beside the new row's state.
        self.row_bytes = 2 * sum(_nbytes(leaf) for leaf in leaves if isinstance(leaf, ArraysCache))
        self._reading = reading
        self.looks_ahead = kernels is not None
        if kernels is not None:
            self.order_of_launches = kernels.order
        self.attends_whole = gathered = reading in (Reading.GATHERED, Reading.GROUPED)
        self._shared = _paged(
            make_prompt_cache(model),
            self._shapes,
            lambda shape: LayerStore(shape, page_size, kernels, gathered=gathered),
            self._pass,
            reading,
        )
        self._selection = HiddenSelection(model)
        self.layers = _layers(self._shared)
        self.stores = [layer.store for layer in self.layers]
        paged = all(_is_paged(entry) for entry in self._shared)
        self.prefixes: Prefixes = "pages" if paged else "snapshot"
        self._own: dict[int, list[Any]] = {}
        self._batch: list[Any] = []
        self._rows: list[int] = []
        route(model)
        self.rows: ModuleSteps | None = None
        if kernels is not None and serves(self.layers):
            # Caches of a batch, which are empty except during its pass.
            caches = self._fresh()
            call = partial(self._selection.logits, model, caches)
            how = (self._pass, page_size, compile, int)
            self.rows = ModuleSteps(call, self.layers, _unpaged(caches), *how)
        if mx.default_device() == mx.cpu:
            with_taps(model)
            silu_by_powers(model)
            multiply_by_head(model)

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        return order_after(self._rows, keys)

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        logits: list[mx.array] = []
        out, order = mx.zeros((1, 1)), self.order_of_launches
        if decode:
            self._arrange(decode.keys)
            out = self._pass_of_rows(decode.after(order))
            logits.append(out)
        elif self.rows is not None:
            self.rows.pause()
        for number, chunk in enumerate(chunks):
            if (decode or number) and not self.looks_ahead:
                # Each pass writes to the same pages. When the passes before have been evaluated, it
                # writes in place.
                mx.eval(logits, self.state())
            own = self._own.get(chunk.key)
            if own is None:
                own = self._own[chunk.key] = self._fresh()
            tokens = order.after(mx.array([chunk.tokens], mx.int32))
            if self.looks_ahead:
                # A GPU would run several passes at a time, whose launches count arrivals in one
                # place. The added number is 0: it makes this pass depend on the one before.
                tokens = tokens + (out.reshape(-1)[:1] < -mx.inf).astype(mx.int32)
            out = self._pass_of_chunk(chunk, tokens, own)
            if chunk.final or chunk.every:
                logits.append(out)
        # The last pass comes after all others.
        order.then(out)
        # Where no logits are wanted, the result is evaluated all the same, to wait for the pass.
        return mx.concatenate(logits) if logits else out

    def forget(self, key: int) -> None:
        self._own.pop(key, None)
        if key in self._rows:
            keep = [i for i, row in enumerate(self._rows) if row != key]
            self._rows = [self._rows[i] for i in keep]
            self._batch = [_filter(entry, keep) for entry in self._batch] if keep else []

    def state(self) -> list[mx.array]:
        own = [*self._batch, *chain.from_iterable(self._own.values())]
        rows = [] if self.rows is None else self.rows.state()
        return self._pages() + kept_in(own) + rows

    def abandon(self) -> None:
        super().abandon()
        if self.rows is not None:
            self.rows.pause()

    def snapshot(self, key: int) -> Snapshot | None:
        own = self._own.get(key)
        if own is None:
            return None
        # Layers replace their arrays and never write into them, so keeping the arrays suffices.
        # Slices, as convolutions leave them, are copied: they would keep all of the chunk's inputs.
        leaves = [[None if a is None else mx.contiguous(a) for a in c.cache] for c in _unpaged(own)]
        mx.async_eval(leaves)  # type: ignore[no-untyped-call]
        return Snapshot(leaves)

    def restore(self, key: int, snapshot: Snapshot) -> None:
        own = self._own[key] = self._fresh()
        for leaf, arrays in zip(_unpaged(own), snapshot.leaves, strict=True):
            leaf.cache = list(arrays)

    def _fresh(self) -> list[Any]:
        """Return a row's own caches, with the pages that all rows share."""
        return [
            _combine(shared, fresh)
            for shared, fresh in zip(self._shared, make_prompt_cache(self._model), strict=True)
        ]

    def _arrange(self, keys: list[int]) -> None:
        """Make the batch hold exactly `keys`, in that order."""
        gone = [key for key in self._rows if key not in set(keys)]
        for key in gone:
            self.forget(key)
        joining = [key for key in keys if key not in set(self._rows)]
        if joining:
            rows = [self._own.pop(key) for key in joining]
            merged = [_merge(list(entries)) for entries in zip(*rows, strict=True)]
            self._batch = (
                [_extend(a, b) for a, b in zip(self._batch, merged, strict=True)]
                if self._batch
                else merged
            )
            self._rows += joining

    def _pass_of_rows(self, decode: Decode) -> mx.array:
        if self.rows is not None:
            return self.rows.run(decode, _unpaged(self._batch))
        self._pass.plan, self._pass.chunk = StepPlan(decode.spans, self._page_size), False
        return self._selection.logits(self._model, self._batch, decode.tokens[:, None])

    def _pass_of_chunk(self, chunk: Chunk, tokens: mx.array, caches: list[Any]) -> mx.array:
        self._pass.plan, self._pass.chunk = StepPlan([chunk.span], self._page_size), True
        wanted = _as_it_is if chunk.every else (lambda h: h[:, -1:])
        return self._selection.logits(self._model, caches, tokens, wanted)


class AloneForward(Plain):
    """Forward that runs each row by itself, over mlx-lm's own caches."""

    kind: ClassVar[str] = "alone"
    prefixes: Prefixes = "copy"
    attends_whole: bool = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: dict[int, list[Any]] = {}
        self.stores = []
        # Caches grow by `KVCache.step` tokens at a time. Windows, whose caches stop growing, are
        # not taken into account.
        few, more = (sum(map(_nbytes, _filled(model, n * KVCache.step))) for n in (1, 2))
        self.token_bytes = -(-(more - few) // KVCache.step)
        self.row_bytes = few

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        return list(range(len(keys)))

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        logits = []
        if decode:
            for i, key in enumerate(decode.keys):
                logits.append(self._row(key, decode.tokens[i : i + 1][None]))
        for chunk in chunks:
            out = self._row(chunk.key, mx.array([chunk.tokens], mx.int32))
            if chunk.every:
                logits.append(out)
            elif chunk.final:
                logits.append(out[-1:])
        return mx.concatenate(logits) if logits else mx.zeros((1, 1))

    def forget(self, key: int) -> None:
        self._own.pop(key, None)

    def state(self) -> list[mx.array]:
        return [array for own in self._own.values() for array in kept_in(own)]

    def snapshot(self, key: int) -> Snapshot | None:
        own = self._own.get(key)
        if own is None:
            return None
        # Copies of arrays share their content until one of them is written into.
        kept = deepcopy(own)
        return Snapshot([[*kept_in(kept)]], kept)

    def restore(self, key: int, snapshot: Snapshot) -> None:
        self._own[key] = deepcopy(list(snapshot.caches))

    def _row(self, key: int, tokens: mx.array) -> mx.array:
        own = self._own.get(key)
        if own is None:
            own = self._own[key] = make_prompt_cache(self._model)
        logits: mx.array = self._model(tokens, cache=own)[0]
        return logits


# ---------------------------------------------------------------------------------------------
# Caches
# ---------------------------------------------------------------------------------------------


def probe(model: nn.Module) -> list[LayerShape | None]:
    """Return the shape of each key-value cache of `model`, in order, found by two tokens.

    The shape is None for caches of any other kind. A `CacheList` counts as its members.
    """
    return list(map(_shape, _filled(model, 2)))


def _filled(model: nn.Module, tokens: int) -> list[Any]:
    """Return the caches after a pass over so many tokens, not evaluated: shapes and sizes are known
    before anything is computed."""
    caches = make_prompt_cache(model)
    model(mx.ones((1, tokens), mx.int32), cache=caches)
    return [leaf for entry in caches for leaf in _leaves(entry)]


def _nbytes(leaf: Any) -> int:
    return sum(array.nbytes for array in kept_in([leaf]))


def vocabulary_of(model: nn.Module) -> int:
    """Return the size of the vocabulary, which is that of the widest product."""
    return max(_widths(model))


def _widths(model: nn.Module) -> list[int]:
    """Return the number of outputs of each product of the model."""
    # Modules are asked, not the parameters: weights stored in blocks are no parameter of the name.
    weights = [getattr(module, "weight", None) for _, module in model.named_modules()]
    return [w.shape[-2] for w in weights if isinstance(w, mx.array) and w.ndim > 1]


def working_bytes(model: nn.Module, forward: Forward | None, tokens: int, rows: int) -> int:
    """Return an estimate of the bytes that a step of so many tokens holds at its peak.

    rows: the number of tokens whose logits the step makes. forward: the way the model is run; None
    where that is not known yet: then the estimate is at most that of any way.

    On a CPU a layer's results are gone before the next one's. The estimate counts, for each token,
    the widest product's result as float32 with its inputs and the results made of it; for each row,
    the logits and their copies; and the scores of the blocks of attention under way (MLX queues
    some operations ahead). On a GPU, a queued operation's results are held until it has run: about
    twice the products' results, in half precision (measured: 166 kB a token and layer of an 8B).
    """
    outputs = _widths(model)
    vocabulary = max(outputs)
    widest: int = max([n for n in outputs if n != vocabulary] or outputs)
    logits = 4 * 4 * rows * vocabulary
    device = devices.current()
    if device.kind == "cpu":
        return logits + 4 * (6 * tokens * widest + 20 * (device.scores or 0))
    if forward is None:
        return logits
    products: int = sum(n for n in outputs if n != vocabulary)
    unpacked = forward.unpacked_bytes(tokens) + _scores_bytes(forward, device)
    return logits + unpacked + 4 * forward.tokens_at_once(tokens) * products


def _scores_bytes(forward: Forward, device: Device) -> int:
    """Return the bytes of a block's scores that a GPU holds, where MLX's attention of many queries
    makes the scores one by one. The scores are held in half precision before and after the softmax,
    and masked."""
    shapes = [store.shape for store in forward.stores]
    held = forward.attends_whole or not all(
        is_flash(shape.key_dim, shape.value_dim) for shape in shapes
    )
    return 8 * device.scores if held and device.scores is not None else 0


HEADS = ("n_heads", "num_heads", "num_attention_heads")
"""Names of the attribute in mlx-lm's attention modules that holds the number of query heads."""
MANY_HEADS = 128
"""The largest number of query heads of any model: that of DeepSeek V3."""


def query_heads(model: nn.Module) -> int:
    """Return the number of query heads of the model's attention, as its modules say; `MANY_HEADS`
    if none does."""
    said = [vars(module).get(name) for module in model.modules() for name in HEADS]
    return max((heads for heads in said if isinstance(heads, int)), default=MANY_HEADS)


def _shape(cache: Any) -> LayerShape | None:
    match cache:
        case KVCache():
            window = None
        case RotatingKVCache(keep=0):
            window = cache.max_size
        case ArraysCache():
            return None
        case _:
            raise NotApplicable(f"a cache of type {type(cache).__name__} cannot be batched")
    if cache.keys is None:
        raise NotApplicable("a layer does not use its cache")
    _, heads, _, key_dim = cache.keys.shape
    return LayerShape(heads, key_dim, cache.values.shape[-1], cache.keys.dtype, window)


def _paged(
    caches: Sequence[Any],
    shapes: Sequence[LayerShape | None],
    make_store: Callable[[LayerShape], LayerStore],
    current: Pass,
    reading: Reading,
) -> list[Any]:
    """Return `caches` with pages in place of keys and values."""
    remaining = iter(shapes)

    def replace(entry: Any) -> Any:
        if isinstance(entry, CacheList):
            return CacheList(*(replace(member) for member in entry.caches))
        shape = next(remaining)
        if shape is None:
            return entry
        return PagedLayer(make_store(shape), reading, current)

    return [replace(entry) for entry in caches]


def _leaves(entry: Any) -> Iterable[Any]:
    if isinstance(entry, CacheList):
        for member in entry.caches:
            yield from _leaves(member)
    else:
        yield entry


def _layers(caches: Sequence[Any]) -> list[PagedLayer]:
    return [leaf for e in caches for leaf in _leaves(e) if isinstance(leaf, PagedLayer)]


def _unpaged(caches: Sequence[Any]) -> list[Any]:
    return [leaf for e in caches for leaf in _leaves(e) if not isinstance(leaf, PagedLayer)]


def _is_paged(entry: Any) -> bool:
    return all(isinstance(leaf, PagedLayer) for leaf in _leaves(entry))


def _combine(shared: Any, fresh: Any) -> Any:
    """Return `fresh` with the pages of `shared` in place of keys and values."""
    if isinstance(shared, CacheList):
        return CacheList(*map(_combine, shared.caches, fresh.caches))
    return shared if isinstance(shared, PagedLayer) else fresh


def _merge(entries: list[Any]) -> Any:
    first = entries[0]
    if isinstance(first, CacheList):
        return CacheList(*(_merge(list(m)) for m in zip(*(e.caches for e in entries), strict=True)))
    return first if isinstance(first, PagedLayer) else type(first).merge(entries)


def _extend(batch: Any, more: Any) -> Any:
    if isinstance(batch, CacheList):
        return CacheList(*map(_extend, batch.caches, more.caches))
    if not isinstance(batch, PagedLayer):
        batch.extend(more)
    return batch


def _filter(batch: Any, keep: list[int]) -> Any:
    for leaf in _leaves(batch):
        if not isinstance(leaf, PagedLayer):
            leaf.filter(keep)
    return batch


def kept_in(caches: Sequence[Any]) -> list[mx.array]:
    """Return the arrays of the caches that are not pages, layer by layer."""
    found: list[mx.array] = []
    for leaf in (leaf for entry in caches for leaf in _leaves(entry)):
        if isinstance(leaf, ArraysCache):
            found += [array for array in leaf.cache if array is not None]
        elif isinstance(leaf, PagedLayer) or leaf.empty():
            continue
        elif hasattr(leaf, "keys"):
            found += [leaf.keys, leaf.values]
        else:
            # A cache that the architecture brings itself (DeepSeek V4.1).
            found += [array for _, array in tree_flatten(leaf.state) if array is not None]
    return found


# ---------------------------------------------------------------------------------------------
# Logits only where they are wanted
# ---------------------------------------------------------------------------------------------


def _as_it_is(hidden: mx.array) -> mx.array:
    return hidden


class HiddenSelection:
    """Selection of the tokens whose logits are wanted, before the output projection.

    mlx-lm's models are a body that gives hidden states and a head that gives logits, with no seam
    between them, and a vocabulary of 128 000 costs more than a layer. `HiddenSelection` gives the
    body's class a subclass that selects the hidden states for the head. Models without a
    recognisable body compute all logits, and the selection is made afterwards.
    """

    def __init__(self, model: nn.Module) -> None:
        self._select: Callable[[mx.array], mx.array] | None = None
        self._inside = False
        body = _body(model)
        if body is not None:
            self._inside = True
            self._install(body)

    def logits(
        self,
        model: nn.Module,
        caches: Sequence[Any],
        tokens: mx.array,
        select: Callable[[mx.array], mx.array] = _as_it_is,
    ) -> mx.array:
        """Return logits of `model`, (rows, vocabulary), of the tokens that `select` picks out of
        (batch, tokens, …)."""
        self._select = select
        logits: mx.array = model(tokens, cache=caches)
        if not self._inside:
            logits = select(logits)
        return logits[:, -1] if logits.shape[1] == 1 else logits.reshape(-1, logits.shape[-1])

    def _install(self, body: nn.Module) -> None:
        base = type(body)
        origin = getattr(base, "selects_from", base)
        selection = self

        class Selecting(origin):  # type: ignore[misc, valid-type]
            selects_from = origin

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                out = super().__call__(*args, **kwargs)
                chosen, selection._select = selection._select, None
                return out if chosen is None else chosen(out)

        Selecting.__module__ = origin.__module__
        body.__class__ = Selecting


def _body(model: nn.Module) -> nn.Module | None:
    """Return the module under the head: every family calls it `model`, `transformer` or `backbone`.
    None if there is no module of such a name."""
    while "language_model" in model.children():
        model = model["language_model"]
    for name in ("model", "transformer", "backbone"):
        if name in model.children():
            body: nn.Module = model[name]
            return body
    return None

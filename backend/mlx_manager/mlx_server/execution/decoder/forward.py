"""Forward of a model on a GPU by its fused decoder. The rows get pages together, for `HORIZON`
steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.attention.splits import BlockKind
from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import Texts
from mlx_manager.mlx_server.devices.cuda.mapped import send, together
from mlx_manager.mlx_server.devices.metal.order import IN_ORDER, LaunchOrder
from mlx_manager.mlx_server.devices.states import StateStore
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.kv.store import LayerStore
from mlx_manager.mlx_server.execution.attention.paged import FEW_QUERIES, Span
from mlx_manager.mlx_server.execution.base import OnPages, order_after
from mlx_manager.mlx_server.execution.decoder.check import check
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.layers import Step, Store
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Prefixes, Snapshot
from mlx_manager.mlx_server.execution.pieces import Pieces
from mlx_manager.mlx_server.execution.running import HORIZON, ROWS, DeviceBatch, Running
from mlx_manager.mlx_server.execution.slots import Slots
from mlx_manager.mlx_server.execution.step import RaggedStep
from mlx_manager.mlx_server.utils.progress import Doing, counted, unheard

# A step with prompts in it has a multiple of so many tokens. The sizes are few, and MLX reuses the
# buffers of a size that comes again. For a new size it allocates buffers and frees others: 10 to 20
# ms.
GRAIN = 128
# Sizes of small steps with prompts, which have kernels of their own. Such a step has the rest of a
# prompt of which all but the end is cached.
FEW = (16, 32, 64)
# Tokens of a prompt that the device computes in the host's time for a step.
WORTH = 256
# A context that is divided among blocks, so that the kernels for divided contexts are compiled,
# too. A prompt's chunk at the end of such a context has its latents expanded, if the model has
# latents.
LONG = 4096


class FusedForward(OnPages):
    """Forward by the fused decoder: decode steps in few shapes, and ragged steps with prompts in
    them.

    A row's draft is tried in a decode step, too, in which each of its tokens is a row of the same
    pages: such steps come in as few shapes, and are compiled. Recurrent layers take the tokens of a
    row one after another, as a prompt's.

    stores: those of all layers, from `decoder`.
    """

    kind: ClassVar[str] = "fused"
    looks_ahead: bool = True
    horizon: int = HORIZON
    grain: int = GRAIN
    worth: int = WORTH

    def __init__(
        self,
        stores: Sequence[Store],
        decoder: FusedDecoder,
        page_size: int,
        order: LaunchOrder = IN_ORDER,
    ) -> None:
        self.order_of_launches = order
        self._decoder = decoder
        self._page_size = page_size
        self._pieces = Pieces()
        self._tokens = 0
        self._of_layers = stores
        self._states = {
            number: store for number, store in enumerate(stores) if isinstance(store, StateStore)
        }
        self._slots = Slots(list(self._states.values()))
        self._slots_of = self._slots.of if self._states else _no_slots
        self._running = Running(decoder.plan, slots=self._slots_of)
        self.stores = [store for store in stores if isinstance(store, LayerStore)]
        self.prefixes: Prefixes = "snapshot" if self._states else "pages"
        # A full pool of slots grows to twice its size: see `Slots`.
        self.row_bytes = 2 * sum(store.shape.slot_bytes for store in self._states.values())

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        last = self._running.batch
        return order_after(() if last is None else last.keys, keys)

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        logits = self._run(decode, chunks)
        self.order_of_launches.then(logits)
        self._tokens = len(_keys(decode, ())) + sum(len(chunk.tokens) for chunk in chunks)
        return logits

    def keep_hidden(self, *, fed: bool = False) -> bool:
        if fed:
            return False
        self._decoder.keep_hidden()
        return True

    @property
    def hidden(self) -> mx.array | None:
        states = self._decoder.hidden
        return None if states is None else states[: self._tokens]

    def _run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        order = self.order_of_launches
        if decode is None or chunks:
            self._running.batch = None
            if not self._states and _are_drafts(decode, chunks):
                return self._run_drafts(decode, chunks)
            self.repeats = True
            slots = self._slots_of(_keys(decode, chunks))
            with together():
                ragged = RaggedStep.of(decode, chunks, self._page_size, whole, order)
                self._decoder.prepare(ragged.plan, self._of_layers)
                texts = _texts(decode, chunks, ragged.tokens.size, slots) if slots else None
            logits, self._pieces = self._decoder.run_ragged(
                ragged, self._of_layers, texts, self._pieces
            )
            return logits
        self._pieces = Pieces()
        batch = self._running.next(decode.keys, decode.tables, decode.lengths, decode.shifts)
        tokens = batch.padded(order.after(decode.tokens))
        step = self._step(tokens, batch)
        logits, batch.before = self._decoder.run(step, in_parts=decode.waited)
        self.repeats = self._decoder.repeats
        return logits

    def _run_drafts(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        """Return the logits of rows and of all tokens of drafts."""
        rows = [*zip(decode.keys, decode.tables, decode.lengths, strict=True)] if decode else []
        own = [decode.tokens[: len(rows)]] if decode else []
        shifts = [*decode.shifts] if decode else []
        running = len(rows)
        for chunk in chunks:
            of, ends = chunk.span, range(chunk.span.length - chunk.span.queries, chunk.span.length)
            rows += [(chunk.key, of.table, place + 1) for place in ends]
        if shifts:
            shifts += [0] * (len(rows) - running)
        size = self._page_size
        written = [
            int(table.pages[(length - 1) // size]) * size + (length - 1) % size
            for _, table, length in rows
        ]
        batch = self._running.begin(
            [key for key, _, _ in rows],
            [table for _, table, _ in rows],
            [length for _, _, length in rows],
            shifts,
            written,
        )
        drafted = np.zeros(batch.before.size - running, np.int32)
        drafted[: len(rows) - running] = [token for chunk in chunks for token in chunk.tokens]
        own.append(send(drafted).view(mx.uint32))
        tokens = own[0] if len(own) == 1 else mx.concatenate(own)
        self._pieces = Pieces()
        step = self._step(self.order_of_launches.after(tokens), batch)
        logits, _ = self._decoder.run(step, in_parts=True)
        self.repeats = self._decoder.repeats
        return logits

    @property
    def unfinished(self) -> bool:
        return self._pieces.unfinished

    def finish(self) -> None:
        self._pieces.finish()

    def abandon(self) -> None:
        super().abandon()
        self._running.batch, self._pieces = None, Pieces()

    def forget(self, key: int) -> None:
        self._slots.release(key)

    def snapshot(self, key: int) -> Snapshot | None:
        slot = self._slots.known(key)
        if slot is None:
            return None
        # Queued now, since the next step writes to the slot.
        kept = Snapshot([list(store.kept(slot)) for store in self._states.values()])
        mx.async_eval(kept.leaves)  # type: ignore[no-untyped-call]
        return kept

    def restore(self, key: int, snapshot: Snapshot) -> None:
        (slot,) = self._slots.of([key])
        for (number, store), kept in zip(self._states.items(), snapshot.leaves, strict=True):
            own = [part for part in kept if part is not None]
            self._decoder.restore(number, store, slot, own)
        mx.async_eval([store.written for store in self._states.values()])  # type: ignore[no-untyped-call]

    def state(self) -> list[mx.array]:
        # Pages are written in place, by launches that the logits come after.
        last = self._running.batch
        return [] if last is None else [last.before]

    def tokens_at_once(self, tokens: int) -> int:
        return self._decoder.tokens_at_once(tokens)

    def unpacked_bytes(self, tokens: int) -> int:
        return self._decoder.unpacked_at_once + self._decoder.expanded_at_once(tokens)

    def keep_packed(self) -> None:
        self._decoder.keep_packed()

    def compare(self, model: nn.Module, doing: Doing = unheard) -> str | None:
        """Compare decode steps with those of `model`, the module that the decoder was made of; see
        `check`."""
        return check(self._decoder, model, self._page_size, doing=doing)

    def warm(self, doing: Doing = unheard) -> None:
        """Compile all kernels that steps and prompts need, which would otherwise delay the first
        request.

        These are kernels for long contexts, for batches of long and of short ones, and MLX's own
        kernels for compiled steps: 17 s in all the first time on a machine (H200).

        Writes to the first page; call before there is anything in it.
        """
        size, device = self._page_size, devices.current()
        length, most = device.warm_chunk, device.warm_rows
        prompt = Span(PageTable([0] * -(-length // size)), length, length)
        chunk = Chunk(-1, prompt, [0] * length, final=True)
        tall = islice(((rows, LONG) for rows in ROWS if self._are_tall(rows)), 1)
        far_from = self._decoder.far_from
        far = [(1, far_from - far_from % size + size)] if far_from else []
        crowd = [(most, size)] if most > 1 else []
        steps = ((1, LONG), (1, size), *crowd, *tall, *far)
        for rows, length in counted(doing, "its steps are compiled", steps):
            tokens = mx.zeros((rows,), mx.uint32)
            tables = [PageTable([0] * (length // size))] * rows
            # All rows have one key, whose state is dropped in the end.
            decode = Decode([chunk.key] * rows, tables, [length] * rows, tokens)
            own = decode.keys, decode.tables, decode.lengths
            step = self._step(tokens, self._running.begin(*own))
            mx.eval(self._decoder.launches(step))
            mx.eval(self._decoder.launches_compiled(step))
            if self._decoder.by_axes and rows == 1:
                mx.eval(self._decoder.launches(self._step(tokens, self._running.begin(*own, [1]))))
            if most > 1:
                self._prompted(decode, chunk)
        if most == 1:
            self._prompted(None, chunk)
        if self._decoder.expands:
            rest = Span(PageTable([0] * (LONG // size)), LONG, device.warm_chunk)
            self._prompted(None, Chunk(chunk.key, rest, chunk.tokens, final=True))
        self._put_back(chunk.key)
        self.forget(chunk.key)
        self._slots.clear()

    def _prompted(self, decode: Decode | None, chunk: Chunk) -> None:
        """Run a step with a prompt in it, which has no effect but its writes to pages and
        states."""
        ragged = RaggedStep.of(decode, [chunk], self._page_size, whole)
        slots = self._slots_of(_keys(decode, [chunk]))
        texts = _texts(decode, [chunk], ragged.tokens.size, slots) if slots else None
        logits, _ = self._decoder.run_ragged(ragged, self._of_layers, texts)
        mx.eval([logits])

    def _put_back(self, key: int) -> None:
        """Copy a sequence's states, where there are any, and put the copy in another slot.

        Raises:
            RuntimeError: the states in the other slot differ from the copied ones.
        """
        kept = self.snapshot(key)
        if kept is None:
            return
        other = key - 1
        self.restore(other, kept)
        again = self.snapshot(other)
        assert again is not None
        for mine, own in zip(again.leaves[0], kept.leaves[0], strict=True):
            assert mine is not None
            assert own is not None
            mx.eval([mine, own])
            # The host compares bytes, which compiles nothing.
            if not np.array_equal(np.array(mine.view(mx.uint8)), np.array(own.view(mx.uint8))):
                raise RuntimeError("states that are put back are not what they were")
        self.forget(other)

    def _are_tall(self, rows: int) -> bool:
        """Return whether so many rows of `LONG` tokens are attended by tall blocks."""
        splits = self._decoder.plan(np.full(rows, LONG))
        return any(cut.blocks is BlockKind.TALL for cut in splits.values())

    def _step(self, tokens: mx.array, batch: DeviceBatch) -> Step:
        pools = [
            (store.keys, store.values) if isinstance(store, LayerStore) else store.pool
            for store in self._of_layers
        ]
        far = self._decoder.is_far(batch.lengths)
        own = (batch.slots, far, batch.shifts, batch.written)
        return Step(tokens, batch.before, batch.table, pools, batch.splits, *own)


def _no_slots(_: Sequence[int]) -> list[int]:
    """Return no slots: the model has no recurrent layers."""
    return []


def _keys(decode: Decode | None, chunks: Sequence[Chunk]) -> list[int]:
    """Return the keys of the rows and then of the chunks."""
    return [*(decode.keys if decode else ()), *(chunk.key for chunk in chunks)]


def _are_drafts(decode: Decode | None, chunks: Sequence[Chunk]) -> bool:
    """Return whether all chunks are of few tokens of which all have logits, in a step of no more
    tokens than decode steps are compiled for. In a decode step a row without tokens before its own
    is padding."""
    total = len(decode.keys) if decode else 0
    for chunk in chunks:
        span, tokens = chunk.span, len(chunk.tokens)
        total += tokens
        seen = chunk.shown is not None or chunk.angles is not None or span.runs
        if seen or not chunk.every or tokens > FEW_QUERIES or span.length == span.queries:
            return False
    return total <= ROWS[-1]


def whole(tokens: int) -> int:
    """Return the number that the tokens of a step with prompts in it are padded to."""
    return next((size for size in FEW if size >= tokens), tokens + -tokens % GRAIN)


def _texts(
    decode: Decode | None, chunks: Sequence[Chunk], tokens: int, slots: Sequence[int]
) -> Texts:
    """Return the spans of a step of so many tokens, padding included, for recurrent layers.

    slots: those of the rows and then of the chunks.
    """
    counts = [1] * (len(decode.keys) if decode else 0)
    positions = [length - 1 for length in decode.lengths] if decode else []
    counts += [chunk.span.queries for chunk in chunks]
    positions += [chunk.span.length - chunk.span.queries for chunk in chunks]
    return Texts.of(counts, slots, positions, tokens)

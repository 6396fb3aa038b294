"""Disk as the tier below the pages in memory, and below pictures' features. All of it on the MLX
thread, but for `threads`.

Copied off the device, and written: blocks that are used a second time, those whose pages are about
to be given up, and all when the model is unloaded. Copies take a small share of the time of steps
while steps follow each other.

Read: what a prompt goes on from beyond its prefix in memory. Blocks are put into the prompt's own
pages as they come, and its first tokens are computed meanwhile, up to the first that is read. When
both have met, the prompt goes on behind what was read.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Timer
from time import perf_counter

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices.dtypes import dtype_name
from mlx_manager.mlx_server.engine.disk.arrays import (
    Piece,
    Sheet,
    leaves_of,
    on_device,
    on_host,
    part_of,
    state_tensors,
)
from mlx_manager.mlx_server.engine.disk.blocks import PrefixBlock, Tensor
from mlx_manager.mlx_server.engine.disk.names import (
    BLOCK_TOKENS,
    PICTURE,
    PLAIN,
    STATE,
    BlockName,
    PrefixChain,
)
from mlx_manager.mlx_server.engine.disk.pictures import KeptFeatures, tensors_of
from mlx_manager.mlx_server.engine.disk.prices import LearntRate, Prices
from mlx_manager.mlx_server.engine.disk.threads import BlockDisk, Reading
from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.kv.store import LayerStore
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.execution.forward import Forward, Snapshot
from mlx_manager.mlx_server.execution.images import Features

SHARE = 0.1
"""Part of the time of steps that copies and puts may take."""
AT_REST = 0.005
"""Seconds that they may take at once where no step is under way."""
MOST_CREDIT = 0.01
"""Most seconds that they may take beside one step, if earlier ones had nothing to copy."""
MOST_WANTED = 4096
"""Blocks that may wait to be copied; the oldest wishes are dropped."""
LOW = 16
"""One part of so many pages: where fewer are free and no more can be made, the oldest are about to
be given up."""
TURNS = 8
"""Turns between two looks for these."""
HEADER = 1 << 15
"""Bytes of a file's header, or more."""
PATIENCE = 2.0
"""Seconds in which nothing may come, beyond twice those that a whole read is expected to take while
steps follow each other."""


@dataclass(frozen=True, slots=True)
class Label:
    """Place of an indexed page: the digest of the prefix that it ends, its number there, and the
    digest of the prefix before it."""

    digest: bytes
    number: int
    before: bytes


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Figures of a model's blocks on disk. queries, hits: prompt tokens beyond memory that were
    looked up, and that were read. picture_queries, picture_hits: the same of pictures whose
    features were wanted. read_bytes, written_bytes: by this process. dropped: blocks that were not
    written. files_bytes, budget: of all models. written_today, daily: of all models; daily None: no
    limit."""

    queries: int
    hits: int
    picture_queries: int
    picture_hits: int
    read_bytes: int
    written_bytes: int
    dropped: int
    files_bytes: int
    budget: int
    written_today: int
    daily: int | None


@dataclass(eq=False)
class PrefixLoad:
    """Blocks on their way into a prompt's pages.

    start, end: pages that are read, `end` excluded. patience: seconds in which nothing may come for
    anybody. due: when to give up. filled: the page behind those that have come. state: that of
    recurrent layers after `end`. over: nothing more comes. rung: whether `timer` has gone off.
    """

    sequence: Sequence
    reading: Reading
    start: int
    end: int
    patience: float
    due: float
    timer: Timer | None = None
    rung: bool = False
    filled: int = 0
    state: Snapshot | None = None
    over: bool = False


@dataclass(eq=False)
class Copy:
    """A block on its way off the device, in pieces.

    block: the host's copy. left: yields the next pieces. queued: those that are under way. broken:
    one of its pages has been given up.
    """

    block: PrefixBlock
    left: Iterator[list[Piece]] = field(default_factory=lambda: iter(()))
    queued: list[Piece] = field(default_factory=list)
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """A block that is to be copied. nbytes: its size, or more. features: returns those of the
    picture that it is of, None if they are not in memory any more; None for pages."""

    nbytes: int
    features: Callable[[], Features | None] | None = None


class DiskTier:
    """Prefixes of one engine on disk.

    Args:
        disk: writes and reads blocks, for which it has room.
        forward: how the model is run.
        pool: the pages in memory.
        attainable: returns the number of pages that there could be.
        clear_stale: see `PageMemory.clear_stale`.
        arrived: told of a prompt that goes on behind what was read, with the state to keep there;
            or that goes on without, for nothing could be read.
        wake: called on another thread when a read has taken too long.
        ahead: whether results are read when a later step has been queued, as on a GPU.

    Attributes:
        prices: of computing and of reading.
        pictures: features of pictures on disk.
    """

    def __init__(
        self,
        disk: BlockDisk,
        forward: Forward,
        pool: PagePool,
        *,
        attainable: Callable[[], int],
        clear_stale: Callable[[], None],
        arrived: Callable[[Sequence, Snapshot | None], None],
        wake: Callable[[], None],
        ahead: bool,
    ) -> None:
        self._disk, self._forward, self._pool = disk, forward, pool
        self._stores = stores_of(forward)
        self._attainable, self._clear_stale = attainable, clear_stale
        self._arrived, self._wake, self._ahead = arrived, wake, ahead
        self._block = block_pages(pool.page_size)
        on_pages = sum(store.token_bytes for store in self._stores)
        self._page_bytes = max(1, on_pages * pool.page_size)
        self._block_bytes = block_bytes(forward, pool.page_size)
        self.prices = Prices(on_pages)
        self.prices.read = disk.read_rate
        self.pictures = KeptFeatures(disk, self._want_picture)
        self._stateful = forward.prefixes == "snapshot"
        self._pages: dict[bytes, int] = {}
        self._wanted: OrderedDict[BlockName, Wish] = OrderedDict()
        self._copy: Copy | None = None
        self._loads: dict[int, PrefixLoad] = {}
        self._filling: tuple[PrefixLoad, PrefixBlock] | None = None
        self._busy = False
        # Done once all that was queued here is, on devices whose steps need to know.
        self._last: mx.array | None = None
        self._credit = 0.0
        self._turns = 0
        self._turned = perf_counter()
        self.queries = self.hits = 0

    # -- figures -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether prompts wait for blocks."""
        return bool(self._loads)

    @property
    def awaited(self) -> bool:
        """Return whether prompts wait for blocks, whose coming wakes the thread."""
        now = perf_counter()
        return (
            bool(self._loads)
            and self._disk.waiting
            and self._filling is None
            and not any(load.over or now > load.due for load in self._loads.values())
        )

    @property
    def fills(self) -> bool:
        """Return whether something has come that is to be put into pages."""
        return self._filling is not None or not self._disk.waiting

    @property
    def has_copies(self) -> bool:
        """Return whether there is something to be copied, and the writer would take it."""
        if self._copy is not None:
            return True
        return bool(self._wanted) and self._disk.writable(self._next_wish.nbytes)

    @property
    def _next_wish(self) -> Wish:
        return next(iter(self._wanted.values()))

    def stats(self) -> DiskStats:
        """Return the current figures. Safe on any thread."""
        disk, limits = self._disk, self._disk.folder.limits
        return DiskStats(
            self.queries,
            self.hits,
            self.pictures.queries,
            self.pictures.hits,
            disk.read_bytes,
            disk.written_bytes,
            disk.dropped,
            disk.folder.nbytes,
            limits.budget,
            disk.folder.written_today,
            limits.daily,
        )

    # -- names ---------------------------------------------------------------------------------

    def indexed(self, sequence: Sequence, number: int, page: int) -> None:
        """Label a page that has been indexed: page `number` of the sequence."""
        chain = self._chain(sequence)
        digest = chain.at(sequence.content, number)
        before = chain.at(sequence.content, number - 1) if number else b""
        self._pool.label(page, Label(digest, number, before))
        if len(self._pages) > 2 * self._pool.size + 1024:
            of_labels = self._pool.labels.items()
            self._pages = {of.digest: n for n, of in of_labels if isinstance(of, Label)}
        if self._label(page) is not None:
            self._pages[digest] = page

    def _label(self, page: int) -> Label | None:
        label = self._pool.labels.get(page)
        return label if isinstance(label, Label) else None

    def _chain(self, sequence: Sequence) -> PrefixChain:
        if sequence.chain is None:
            sequence.chain = PrefixChain(self._pool.page_size, sequence.names)
        return sequence.chain

    def _name(self, sequence: Sequence, kind: str, end: int) -> BlockName:
        """Return the name of the block that ends with a sequence's first `end` pages."""
        digest = self._chain(sequence).at(sequence.content, end - 1)
        return BlockName(digest, kind, (end - 1) // self._block * self._block, end)

    # -- prompts -------------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> None:
        """Have what an admitted prompt goes on from beyond memory read, if that is worth it."""
        size, block = self._pool.page_size, self._block
        known = sequence.computed // size
        for end in range(block, known + 1, block):
            self._want(self._name(sequence, PLAIN, end))
        if known and self._stateful:
            self._want(self._name(sequence, STATE, known))
        if self._disk.space is None:
            return
        self.queries += max(len(sequence.tokens) - 1 - sequence.computed, 0)
        names = self._found(sequence, known)
        if not names or names[-1].end <= known:
            return
        tokens = (names[-1].end - known) * size
        ahead = self.prices.computed_meanwhile(tokens)
        if ahead is None:
            return
        # Beside others a prompt is computed a little at a time.
        start = self._start(sequence, known, known + (0 if self._busy else ahead // size))
        reading = self._disk.read([name for name in names if name.end > start])
        patience = PATIENCE + 2 * self.prices.reading(tokens, SHARE)
        due = perf_counter() + patience
        load = PrefixLoad(sequence, reading, start, names[-1].end, patience, due, filled=start)
        self._watch(load)
        self._loads[sequence.key] = load
        sequence.awaits, sequence.arrives = start * size, load.end * size

    def _watch(self, load: PrefixLoad) -> None:
        """Have the engine woken when a load is due."""

        def ring() -> None:
            load.rung = True
            self._wake()

        load.rung = False
        load.timer = Timer(max(load.due - perf_counter(), 0.0) + 0.01, ring)
        load.timer.daemon = True
        load.timer.start()

    def _found(self, sequence: Sequence, known: int) -> list[BlockName]:
        """Return the blocks on disk that follow each other from page `known` on."""
        disk, block = self._disk, self._block
        limit = (len(sequence.tokens) - 1) // self._pool.page_size
        names: list[BlockName] = []
        for end in range(known // block * block + block, limit + 1, block):
            if not disk.has(name := self._name(sequence, PLAIN, end)):
                break
            names.append(name)
        if not self._stateful:
            return names
        begun = known // block
        last = min(limit, (begun + len(names) + 1) * block)
        least = max(1, -(-self._forward.worth // self._pool.page_size))
        for end in range(last, known + least - 1, -1):
            if disk.has(state := self._name(sequence, STATE, end)):
                return [*names[: state.first // block - begun], state]
        return []

    def _start(self, sequence: Sequence, known: int, start: int) -> int:
        """Return the page from which on blocks are read, `start` or before: the first of a block,
        and in no picture whose tokens see all of it."""
        size, block = self._pool.page_size, self._block
        start = max(known, start // block * block)
        for first, behind in reversed(sequence.runs):
            if first < start * size < behind:
                start = max(known, first // size // block * block)
        return start

    def forget(self, sequence: Sequence) -> None:
        """Cancel what is read for a sequence: it has ended or is paused."""
        load = self._loads.pop(sequence.key, None)
        if load is not None:
            self._end(load)

    def _end(self, load: PrefixLoad) -> None:
        load.over = load.reading.cancelled = True
        load.sequence.awaits = load.sequence.arrives = sys.maxsize
        if load.timer is not None:
            load.timer.cancel()
        # Blocks that have come for nobody would stay in memory, and hold up the thread that reads.
        while not self._loads and self._disk.arrived() is not None:
            pass

    # -- arrivals ------------------------------------------------------------------------------

    def arrive(self, busy: bool) -> bool:
        """Put the blocks that have come into pages; only for a part of the time where `busy`:
        where steps follow each other. Return whether there were any."""
        begun, filled = perf_counter(), False
        cost = self.prices.fill.seconds(self._page_bytes)
        while self._may(begun, cost, busy) and (piece := self._next_piece()) is not None:
            load, block = piece
            self._fill(load, block, self._at_once(self.prices.fill, busy))
            filled = True
            if load.filled >= block.name.end:
                self._filling = None
        if filled:
            self._queue([array for store in self._stores for array in (*store.held, store.written)])
        self._look_after_loads(filled)
        self._credit -= min(perf_counter() - begun, self._credit)
        return filled

    def _look_after_loads(self, filled: bool) -> None:
        """Let prompts go on for which all has come that will come. filled: something has come for
        one of them; blocks come in the order in which prompts have asked for them, so that the
        others wait for as long again."""
        now, comes = perf_counter(), filled or self.fills
        for load in list(self._loads.values()):
            if comes:
                load.due = max(load.due, now + load.patience)
            if load.over or load.filled >= load.end or now > load.due:
                self._conclude(load)
            elif load.rung:
                self._watch(load)

    def _may(self, begun: float, cost: float, busy: bool) -> bool:
        """Return whether there is time for something of this cost in the turn that began then."""
        taken = perf_counter() - begun
        if not busy:
            return taken < AT_REST
        return taken + min(cost, MOST_CREDIT / 2) < self._credit

    def _next_piece(self) -> tuple[PrefixLoad, PrefixBlock] | None:
        """Return a block that has come, and is not all in pages yet, with its load."""
        while self._filling is None or self._filling[0].over:
            self._filling = None
            came = self._disk.arrived()
            if came is None:
                return None
            loads = self._loads.values()
            load = next((load for load in loads if load.reading is came.reading), None)
            if load is None or load.over:
                continue
            block = came.block
            follows = block is not None and block.name.first <= load.filled < block.name.end
            if block is None or not follows or not fits(self._stores, self._pool.page_size, block):
                load.over = True
            else:
                self._filling = load, block
        return self._filling

    def _fill(self, load: PrefixLoad, block: PrefixBlock, most: int) -> None:
        """Put at most so many pages of a block into the prompt's pages."""
        name, size, begun = block.name, self._pool.page_size, perf_counter()
        first = load.filled
        end = min(name.end, first + most)
        pages: list[int] = load.sequence.table.pages[first:end].tolist()
        self._clear_stale()
        slots = slice((first - name.first) * size, (end - name.first) * size)
        for number, store in enumerate(self._stores):
            first_part, second_part = (
                on_device(part_of(block.tensors[f"{part}.{number}"], slots)) for part in store.parts
            )
            store.fill(pages, first_part, second_part)
        if name.kind == STATE and end == name.end:
            load.state = Snapshot(leaves_of(block.tensors))
        load.filled = end
        self.prices.fill.observe(len(pages) * self._page_bytes, perf_counter() - begun)

    def _conclude(self, load: PrefixLoad) -> None:
        """Let a prompt go on behind what has been read, once it has come so far."""
        sequence, size = load.sequence, self._pool.page_size
        gains = load.filled > load.start and (not self._stateful or load.state is not None)
        if gains and sequence.computed < load.start * size:
            return
        del self._loads[sequence.key]
        self._end(load)
        if gains:
            self.hits += (load.filled - load.start) * size
            if load.state is not None:
                self._forward.restore(sequence.key, load.state)
            sequence.jump(load.filled * size)
        self._arrived(sequence, load.state if gains else None)

    # -- copies --------------------------------------------------------------------------------

    def turn(self, busy: bool) -> None:
        """Copy a little of what is to be written; only for a part of the time where `busy`, as
        in `arrive`."""
        begun, self._busy = perf_counter(), busy
        self._credit = min(self._credit + SHARE * (begun - self._turned), MOST_CREDIT)
        self._turned = begun
        self._turns += 1
        if self._turns % TURNS == 0:
            self._want_oldest()
        cost = self.prices.copy.seconds(self._page_bytes)
        while self.has_copies and self._may(begun, cost, busy):
            if not self._copy_more(busy):
                break
        self._credit -= min(perf_counter() - begun, self._credit)

    def _want_picture(self, name: BlockName, features: Callable[[], Features | None]) -> None:
        """Have a picture's features copied and written, unless they are on disk, or larger than all
        the room for copies."""
        found = features()
        if found is not None and found.nbytes <= self._disk.writes.limit:
            self._want(name, Wish(found.nbytes, features))

    def _want(self, name: BlockName, wish: Wish | None = None) -> None:
        """Have a block copied and written, unless it is on disk. wish: None for pages."""
        if not self._disk.usable or name in self._wanted or self._disk.has(name):
            return
        self._wanted[name] = wish or Wish(self._block_bytes)
        if len(self._wanted) > MOST_WANTED:
            self._wanted.popitem(last=False)
            self._disk.dropped += 1

    def _want_oldest(self) -> None:
        """Have the pages copied that are about to be given up."""
        pool = self._pool
        low = max(2 * self._block, pool.size // LOW)
        if pool.free < low and pool.cached and self._attainable() - pool.size < low:
            self._want_pages(pool.oldest(2 * low))

    def _want_pages(self, pages: list[int]) -> None:
        for page in pages:
            label = self._label(page)
            if label is None:
                continue
            end = label.number + 1
            first = label.number // self._block * self._block
            if end % self._block == 0:
                self._want(BlockName(label.digest, PLAIN, first, end))
            if self._stateful and self._pool.attachment(page) is not None:
                self._want(BlockName(label.digest, STATE, first, end))

    def _copy_more(self, busy: bool) -> bool:
        """Go on with the copy under way, or begin the next; return whether there is more to do in
        this turn: not where steps follow, in whose time the device copies what has been queued."""
        copy = self._copy = self._copy or self._next_copy()
        if copy is None:
            return False
        self._read_out(copy)
        copy.queued = next(copy.left, [])
        if copy.broken:
            self._copy = None
        elif copy.queued:
            self._queue([array for array, _ in copy.queued])
            return not busy
        else:
            self._copy = None
            self._disk.write(copy.block)
        return True

    def _read_out(self, copy: Copy) -> None:
        """Move what the device has copied to the host."""
        begun, nbytes = perf_counter(), 0
        for array, place in copy.queued:
            place[...] = on_host(array)
            nbytes += array.nbytes
        if copy.block.name.kind != PICTURE:
            self.prices.copy.observe(nbytes, perf_counter() - begun)
        copy.queued = []

    def _next_copy(self) -> Copy | None:
        """Return the copy of the next block that is wanted and still in memory, if there is room
        for it."""
        while self._wanted and self._disk.writable(self._next_wish.nbytes):
            name, wish = self._wanted.popitem(last=False)
            if self._disk.has(name):
                continue
            if wish.features is None:
                copy = self._copy_of_pages(name)
            else:
                features = wish.features()
                copy = None if features is None else self._copy_of_picture(name, features)
            if copy is not None:
                return copy
        return None

    def _memory(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Return memory for a copy of so many bytes; None if there is no room for it."""
        room = self._disk.writes
        if room.take(nbytes):
            return room.memory(nbytes)
        self._disk.dropped += 1
        return None

    def _pages_of(self, name: BlockName) -> list[int] | None:
        """Return the pages in memory that hold a block; None if some are not there."""
        page = self._page(name.digest)
        found: list[int] = []
        while page is not None:
            found.append(page)
            label = self._label(page)
            if label is None:
                return None
            if label.number == name.first:
                return found[::-1]
            page = self._page(label.before)
        return None

    def _page(self, digest: bytes) -> int | None:
        page = self._pages.get(digest)
        if page is None:
            return None
        label = self._label(page)
        return page if label is not None and label.digest == digest else None

    def _copy_of_pages(self, name: BlockName) -> Copy | None:
        """Return the copy of a block of pages, with nothing copied yet; None if they, or the state
        behind them, have been given up, or there is no room."""
        pages = self._pages_of(name)
        if pages is None:
            return None
        snapshot = None
        if name.kind == STATE:
            attached = self._pool.attachment(pages[-1])
            if not isinstance(attached, Snapshot):
                return None
            snapshot = attached
        size = self._pool.page_size
        nbytes = 0 if snapshot is None else snapshot.nbytes
        nbytes += len(pages) * size * sum(store.token_bytes for store in self._stores)
        memory = self._memory(nbytes)
        if memory is None:
            return None
        sheet, tensors = Sheet(memory), dict[str, Tensor]()
        places: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        for number, store in enumerate(self._stores):
            pair = []
            for part, held in zip(store.parts, store.held, strict=True):
                heads, _, dim = held.shape
                shape = (heads, len(pages) * size, dim)
                tensors[f"{part}.{number}"], data = sheet.tensor(held.dtype, shape)
                pair.append(data)
            places.append((pair[0], pair[1]))
        states = [] if snapshot is None else list(state_tensors(snapshot, tensors, sheet))
        labels = [self._pool.labels.get(page) for page in pages]
        copy = Copy(PrefixBlock(name, tensors))
        self._disk.writes.lend(nbytes, memory, copy.block)
        copy.left = self._pieces(copy, pages, labels, places, states)
        return copy

    def _copy_of_picture(self, name: BlockName, features: Features) -> Copy | None:
        """Return the copy of a picture's features, with nothing copied yet; None if there is no
        room."""
        memory = self._memory(features.nbytes)
        if memory is None:
            return None
        tensors, places = tensors_of(features, Sheet(memory))
        copy = Copy(PrefixBlock(name, tensors), self._row_pieces(places))
        self._disk.writes.lend(features.nbytes, memory, copy.block)
        return copy

    def _row_pieces(self, places: list[Piece]) -> Iterator[list[Piece]]:
        """Yield some rows of features at a time, as many bytes as of pages."""
        for array, place in places:
            done, row_bytes = 0, max(1, array.nbytes // max(1, len(array)))
            while done < len(array):
                most = self._at_once(self.prices.copy, self._busy) * self._page_bytes
                end = done + max(1, most // row_bytes)
                yield [(array[done:end], place[done:end])]
                done = end

    def _pieces(
        self,
        copy: Copy,
        pages: list[int],
        labels: list[object],
        places: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]],
        states: list[Piece],
    ) -> Iterator[list[Piece]]:
        """Yield the arrays of the next pieces, which are described as late as they are queued; sets
        `broken` where a page has been given up meanwhile."""
        size, done = self._pool.page_size, 0
        while done < len(pages):
            run = pages[done : done + self._at_once(self.prices.copy, self._busy)]
            held = [self._pool.labels.get(page) for page in run]
            if any(a is not b for a, b in zip(held, labels[done:], strict=False)):
                copy.broken = True
                return
            slots = slice(done * size, (done + len(run)) * size)
            queued = []
            for store, (first, second) in zip(self._stores, places, strict=True):
                ours = store.copied(run)
                queued += [(ours[0], first[:, slots]), (ours[1], second[:, slots])]
            yield queued
            done += len(run)
        for state in states:
            yield [state]

    def _at_once(self, rate: LearntRate, busy: bool) -> int:
        """Return the number of pages to copy or to fill at once."""
        if not busy:
            return self._block
        affordable = self._credit * (rate.value or 0.0) / self._page_bytes
        return int(min(max(1.0, affordable), self._block))

    def _queue(self, arrays: list[mx.array]) -> None:
        """Queue operations on pages behind the step under way."""
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        if not self._ahead:
            self._last = mx.zeros((1,), mx.int32) + 1
            mx.async_eval(self._last)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Wait until nothing that was queued here holds the pages. On a CPU they are written in
        place only if nothing else does, and the next step would copy them all."""
        if self._last is not None:
            mx.eval(self._last)
            self._last = None

    # -- the end -------------------------------------------------------------------------------

    def spill(self, seconds: float) -> None:
        """Have all pages written that are kept for reuse, those used last first, as far as there
        is time."""
        due = perf_counter() + seconds
        held = [page for page in self._pool.labels if self._pool.references(page)]
        self._want_pages([*held, *self._pool.newest])
        self.copy_wanted(due)

    def copy_wanted(self, due: float) -> None:
        """Have all copied that is wanted, until a time of `perf_counter`."""
        self._busy = False
        while (self._copy or self._wanted) and (left := due - perf_counter()) > 0:
            if not self.has_copies:
                if not self._disk.wait(self._next_wish.nbytes, min(left, 0.05)):
                    break
                continue
            self._copy_more(False)

    def purge(self) -> None:
        """Forget all blocks, on disk as well."""
        self._give_copies_up()
        self._disk.purge()

    def reset(self) -> None:
        """Forget what pages hold: they are gone."""
        loads, self._loads = self._loads, {}
        for load in loads.values():
            self._end(load)
        self._give_copies_up()
        self._filling = None
        self._pages.clear()

    def _give_copies_up(self) -> None:
        """Copy no more of what is wanted now."""
        self._wanted.clear()
        if self._copy is not None:
            # What yields its pieces knows the copy, and both would stay until they are collected.
            self._copy.left = iter(())
        self._copy = None

    def close(self, seconds: float) -> None:
        """Write what memory holds, as far as there is time, and end the threads."""
        due = perf_counter() + seconds
        self.spill(seconds)
        self.reset()
        self._disk.close(due - perf_counter())


def stores_of(forward: Forward) -> list[LayerStore]:
    """Return the layers' pages; none where this process has only a share of them, as in a group of
    devices."""
    stores = [store for store in forward.stores if isinstance(store, LayerStore)]
    return stores if len(stores) == len(forward.stores) else []


def block_pages(page_size: int) -> int:
    """Return the number of pages in a block."""
    return max(1, BLOCK_TOKENS // page_size)


def block_bytes(forward: Forward, page_size: int) -> int:
    """Return the bytes of the largest file of a model's pages, or a little more."""
    on_pages = sum(store.token_bytes for store in stores_of(forward))
    return HEADER + block_pages(page_size) * page_size * on_pages + forward.row_bytes


def fits(stores: list[LayerStore], page_size: int, block: PrefixBlock) -> bool:
    """Return whether a block has the keys and values of these stores."""
    for number, store in enumerate(stores):
        for part, held in zip(store.parts, store.held, strict=True):
            tensor = block.tensors.get(f"{part}.{number}")
            heads, _, dim = held.shape
            shape = (heads, block.name.pages * page_size, dim)
            if tensor is None or (tensor.dtype, tensor.shape) != (dtype_name(held.dtype), shape):
                return False
    return True

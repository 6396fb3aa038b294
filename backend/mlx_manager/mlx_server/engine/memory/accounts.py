"""The accounts of one engine, and what it gives up when memory is short."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.engine.disk.room import BLOCKS, LEAST, room_of
from mlx_manager.mlx_server.engine.disk.tier import DiskTier
from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.memory.line import Line
from mlx_manager.mlx_server.engine.memory.pages import PageMemory
from mlx_manager.mlx_server.engine.memory.snapshots import SnapshotMemory
from mlx_manager.mlx_server.engine.memory.states import StateMemory
from mlx_manager.mlx_server.engine.memory.stores import Stores
from mlx_manager.mlx_server.engine.memory.working import WorkingMemory
from mlx_manager.mlx_server.engine.pictures.pictures import Pictures
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation.speculation import FEW
from mlx_manager.mlx_server.execution.forward import Forward
from mlx_manager.mlx_server.utils.memory import Ledger, Relief, clear_cache, shares_memory
from mlx_manager.mlx_server.utils.pressure import Pressure

# Seconds of another model's wait that pages which nobody needs at the moment are written in.
SPILL = 0.5
# One part of so many of the memory that a model could have is for blocks on their way to disk and
# back, or up to one of so few where that is not enough for the fewest blocks.
USUAL_PART, LARGEST_PART = 8, 4
# MLX keeps freed buffers for reuse; steps of changing sizes leave many behind.
STEPS_BETWEEN_TRIMS = 512


class EngineMemory:
    """Memory of an engine: the scheduler takes from it, and the ledger's relief gives back.

    Args:
        name: of the model.
        forward: how the model is run; keeps what rows have besides pages.
        limits: of the engine.
        size: what a step works on.
        ledger: asked before anything is taken.
        disturb: called when pages have been copied.
        busy: returns whether the engine has work.
        pictures: what sees pictures, if something does.
        draft: how a draft model is run, if there is one; its layers are on the same pages.
        beside: bytes that each row keeps for it besides pages.
        block_bytes: of the largest block of pages, if there is a disk for them.

    Attributes:
        disk: keeps pages beyond memory, if there is a disk for them; set once it has been made.
        room: bytes that blocks may take on their way to disk, and as many on their way back, as
            long as the engine lives; 0: there is no memory for them.
        kv_format: format of the numbers in pages, by which kept prefixes differ, too.

    Raises:
        OutOfMemory: the ledger does not grant the bytes that a step works on.
    """

    def __init__(
        self,
        name: str,
        forward: Forward,
        limits: EngineLimits,
        size: StepSize,
        ledger: Ledger,
        *,
        disturb: Callable[[], None],
        busy: Callable[[], bool],
        pictures: Pictures | None = None,
        draft: Forward | None = None,
        beside: int = 0,
        block_bytes: int | None = None,
    ) -> None:
        pages, states, snapshots = (
            Line(ledger, f"{kind}:{name}") for kind in ("pages", "states", "snapshots")
        )
        self.pool = PagePool(limits.page_size, prefix_cache=limits.prefix_cache)
        drafting = limits.speculation != "off" and forward.prefixes == "snapshot"
        self.states = StateMemory(
            states,
            forward.row_bytes + beside,
            limits.max_rows,
            # A row that brings a draft keeps a state more than a step and the next one take.
            copy_bytes=forward.row_bytes // 2 if drafting else 0,
            copies=limits.max_rows if limits.speculation == "on" else FEW,
        )
        # Layers of different sizes have different groups.
        self.kv_format = ", ".join(sorted({store.format for store in forward.stores}))
        self._forwards = [forward] if draft is None else [forward, draft]
        stores = [store for each in self._forwards for store in each.stores]
        on_pages = sum(store.token_bytes for store in stores)
        self.pages = PageMemory(
            self.pool,
            Stores(stores, disturb),
            pages,
            self.states,
            snapshots,
            page_bytes=limits.page_size * (on_pages + forward.token_bytes),
            ahead=bool(forward.horizon),
        )
        self.snapshots = SnapshotMemory(forward, self.pool, snapshots)
        self.working = WorkingMemory(name, size, ledger)
        self._ledger = ledger
        self._on_their_way = Line(ledger, f"disk:{name}")
        self.room = 0 if block_bytes is None else self._reserve_room(block_bytes)
        self._busy = busy
        self._pictures = pictures
        self.disk: DiskTier | None = None
        self._frees_at_once = devices.current().frees_at_once
        # The first step before which memory is given up again, while it is short.
        self._trim_at = 0
        ledger.add_relief(Relief.PAGES, self._relieve, self._spare)

    # -- rows ----------------------------------------------------------------------------------

    def grow(self, lacking: int, *, urgent: bool) -> bool:
        """Add at least `lacking` pages if the ledger grants them; see `PageMemory.grow`."""
        return self.pages.grow(lacking, urgent=urgent)

    def enter(self, sequence: Sequence) -> bool:
        """Reserve the memory that a row keeps besides pages; return whether the ledger grants
        it."""
        return self.states.enter(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free what a sequence keeps besides pages."""
        self.forget_state(sequence.key)
        self.states.leave(sequence)
        if self._pictures is not None:
            self._pictures.forget(sequence)
        if self.disk is not None:
            self.disk.forget(sequence)

    def forget_state(self, key: int) -> None:
        """Drop what the model, and a draft model, hold of a sequence besides its pages."""
        for forward in self._forwards:
            forward.forget(key)

    @property
    def attainable_pages(self) -> int:
        """Return the number of pages that there could be; see `PageMemory.attainable`."""
        return self.pages.attainable

    @property
    def pages_of_others(self) -> int:
        """Return the number of pages that idle models would have to give memory up for."""
        return self._ledger.relievable(self._relieve) // max(self.pages.page_bytes, 1)

    def _reserve_room(self, block_bytes: int) -> int:
        """Reserve memory for blocks on their way to disk and back, and return the bytes for either
        direction; 0 if there is not enough."""
        if not shares_memory():
            return room_of(block_bytes)
        attainable = self._ledger.attainable()
        for blocks in range(BLOCKS, LEAST - 1, -1):
            room = room_of(block_bytes, blocks)
            most = attainable // (USUAL_PART if blocks > LEAST else LARGEST_PART)
            if 2 * room <= most and self._on_their_way.reserve(2 * room):
                return room
        return 0

    # -- steps ---------------------------------------------------------------------------------

    def mind_others(self, step: int) -> Pressure:
        """Give up what is only kept for reuse where macOS says that memory is short, and return
        what it says."""
        pressure = self._ledger.pressure()
        if pressure is Pressure.NORMAL:
            self._trim_at = 0
        elif step >= self._trim_at:
            self._trim_at = step + STEPS_BETWEEN_TRIMS
            clear_cache()
            self.give_up_pages()
            self._give_up_features(self._features)
        return pressure

    def trim(self, step: int) -> None:
        """Give MLX's buffer cache back now and then."""
        if step % STEPS_BETWEEN_TRIMS == 0 and self._frees_at_once:
            self._ledger.trim()

    def rest(self) -> None:
        """Make room where there are no rows: a step that has been put together would hold the
        stores as they were.

        Give pages up where they have taken the room of snapshots, as a crowd does. The cached ones
        are of no use then.
        """
        lacking, page_bytes = self.snapshots.take_lacking(), self.pages.page_bytes
        # Layers that are all recurrent have pages of no bytes.
        if lacking and page_bytes:
            self.give_up_pages(-(-lacking // page_bytes))
        if self._frees_at_once:
            clear_cache()

    # -- relief --------------------------------------------------------------------------------

    def give_up_pages(self, most: int | None = None) -> None:
        """Forget cached pages, then remove free pages at the end of the stores, `most` at most."""
        self.pool.drop_cached()
        self.snapshots.record()
        if not self._busy():
            self.working.give_ample_up()
        self.pages.shrink(most)

    def drop_all(self) -> None:
        """Drop all pages, states, snapshots and features of pictures."""
        if self.disk is not None:
            self.disk.reset()
        self.snapshots.line.record(0)
        self.states.clear()
        if self._pictures is not None:
            self._pictures.drop_all()
        self.pages.drop_all()

    def close(self) -> None:
        """Give back what steps work on, and answer no more calls for relief."""
        self._ledger.remove_relief(self._relieve)
        self._on_their_way.record(0)
        self.working.close()

    def _relieve(self, lacking: int) -> None:
        """Give up features of pictures, then cached pages, and the free ones at the end of the
        stores."""
        had = self._features
        if had and self.disk is not None and self._pictures is not None and not self._busy():
            self._pictures.keep_all()
            self.disk.copy_wanted(perf_counter() + SPILL)
        self._give_up_features(lacking)
        lacking -= had - self._features
        if lacking <= 0:
            return
        if self.pages.line.reserving or self.states.line.reserving:
            self.snapshots.give_up(lacking)
        else:
            if self.disk is not None and not self._busy():
                self.disk.spill(SPILL)
            self.give_up_pages()

    def _spare(self) -> int:
        """Return the bytes that `_relieve` could give back."""
        ample = 0 if self._busy() else self.working.ample_bytes
        kept = self.snapshots.line.nbytes + self._features
        return self.pages.removable_bytes + kept + ample

    @property
    def _features(self) -> int:
        """Bytes of pictures' features that no row holds."""
        return 0 if self._pictures is None else self._pictures.cache.spare

    def _give_up_features(self, lacking: int) -> None:
        if self._pictures is not None:
            self._pictures.cache.give_up(lacking)

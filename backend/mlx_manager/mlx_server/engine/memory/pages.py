"""Memory of KV pages: how many there are, and when there are more."""

from __future__ import annotations

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.memory.line import Line
from mlx_manager.mlx_server.engine.memory.states import StateMemory
from mlx_manager.mlx_server.engine.memory.stores import Stores

# Fewest new pages, as a share of the pool, that are worth copying all pages for while cached pages
# could be given up instead. On a GPU the copy takes 60 ms, and memory left over is of use to steps:
# MLX's buffers of one size are of no use to another, and to free them takes 10 to 20 ms.
WORTHWHILE = 1 / 8
WORTHWHILE_AHEAD = 1 / 2


class PageMemory:
    """Pages of an engine.

    Args:
        pool: the pages, none at first.
        stores: the arrays behind them.
        line: `pages:<model>`; its ledger is asked before pages are added.
        states: what rows take besides.
        kept: the line of what is kept for reuse besides pages.
        page_bytes: bytes of a page, in all layers.
        ahead: whether rows get pages many steps ahead.
    """

    def __init__(
        self,
        pool: PagePool,
        stores: Stores,
        line: Line,
        states: StateMemory,
        kept: Line,
        *,
        page_bytes: int,
        ahead: bool,
    ) -> None:
        self.pool = pool
        self.line = line
        self.page_bytes = page_bytes
        self._stores = stores
        self._ledger = line.ledger
        self._states = states
        self._kept = kept
        self._ahead = ahead
        self._device = devices.current()

    @property
    def attainable(self) -> int:
        """Return the number of pages that there could be if no other row held any, nothing was kept
        for reuse, and no other model had to give anything up. Safe on any thread."""
        figures = self._ledger.figures()
        kept = sum(figures.get(line.name, 0) for line in (self._kept, self._states.line))
        spare = max(0, figures["available"] + figures["buffer_cache"] + kept)
        have = self.pool.size * self.page_bytes + spare - self._states.row_bytes
        if not self.page_bytes:
            return 0 if have < 0 else 1 << 40
        return max(0, have) // self.page_bytes

    @property
    def removable_bytes(self) -> int:
        """Return the bytes that `shrink` would give back once nothing is cached."""
        return self.pool.removable * self.page_bytes

    def clear_stale(self) -> None:
        """Remove what other sequences have left in pages that have been handed out."""
        if stale := self.pool.take_stale():
            self._stores.clear(stale)

    # -- fewer ---------------------------------------------------------------------------------

    def shrink(self, most: int | None = None) -> None:
        """Remove the free pages at the end, `most` at most."""
        if self.pool.shrink(most):
            self._stores.resize(self.pool.size)
            self.line.record(self.pool.size * self.page_bytes)

    def drop_all(self) -> None:
        """Drop all pages, also those that the ledger granted and that were never made, if the step
        failed while making them."""
        self.pool.reset()
        self._stores.resize(0)
        self.line.record(0)

    # -- more ----------------------------------------------------------------------------------

    def grow(self, lacking: int, *, urgent: bool) -> bool:
        """Add at least `lacking` pages if the ledger grants them.

        Only urgent growth may cost others something; other growth takes memory that is free. It
        takes all of that if there is little, since each growth copies the pages.
        """
        granted = self._granted(lacking, urgent=urgent)
        if granted:
            self._stores.resize(self.pool.size + granted)
            self.pool.grow(granted)
        return granted > 0

    def _granted(self, lacking: int, *, urgent: bool) -> int:
        """Return how many pages to add, `lacking` or more, which the ledger has granted; 0 if
        none."""
        wanted = max(lacking, self._usual_growth())
        spare = max(self._ledger.available() - self._to_come(), 0)
        affordable = spare // max(self.page_bytes, 1)
        if urgent and self._states.row_bytes:
            wanted = max(lacking, min(affordable, wanted))
        if self._grants(wanted, urgent=urgent):
            return wanted
        worthwhile = WORTHWHILE_AHEAD if self._ahead else WORTHWHILE
        if not urgent and affordable < worthwhile * self.pool.size:
            return 0
        fewer = max(lacking, min(affordable, wanted))
        return fewer if self._grants(fewer, urgent=urgent) else 0

    def _usual_growth(self) -> int:
        """Return the pages to add: half of those there are, within the device's limits. The limits
        of a GPU with memory of its own are for compiled steps, as each new size of the pool costs a
        compilation."""
        device = self._device
        if device.growth_part and not self._ahead:
            device = devices.CPU
        least, most = device.growth
        part = 0.0
        if device.growth_part:
            part = device.growth_part * self._ledger.available() // self.page_bytes
        return int(min(max(least, part, self.pool.size // 2), most))

    def _grants(self, pages: int, *, urgent: bool) -> bool:
        nbytes = pages * self.page_bytes
        spare = urgent or not nbytes or self._ledger.spare(nbytes + self._to_come())
        return spare and self.line.reserve(nbytes)

    def _to_come(self) -> int:
        pages = self.pool.size * self.page_bytes
        return self._states.to_come(self._ledger.available() + pages)

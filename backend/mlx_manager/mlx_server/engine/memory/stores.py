"""The arrays of all layers' pages, made larger and smaller together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_manager.mlx_server.engine.kv.store import LayerStore
from mlx_manager.mlx_server.utils.memory import Ledger


class Stores:
    """Page stores of a model's layers.

    Args:
        stores: one a layer.
        ledger: told of the room in the stores, which takes no memory.
        disturb: called when pages have been copied, which the step under way waits for.
    """

    def __init__(
        self, stores: Sequence[LayerStore], ledger: Ledger, disturb: Callable[[], None]
    ) -> None:
        self._stores = stores
        self._ledger = ledger
        self._disturb = disturb
        # Bytes of the arrays beyond their pages, which the ledger allows for.
        self._room = 0

    def resize(self, pages: int, most: int) -> None:
        """Change the number of pages, with room for `most` where room costs nothing."""
        self._ledger.note_peak()
        copied = [store.resize(pages, most) for store in self._stores]
        before, self._room = self._room, sum(store.room_bytes for store in self._stores)
        self._ledger.allow_for(self._room - before)
        if any(copied):
            self._disturb()

    def clear(self, pages: Sequence[int]) -> None:
        """Remove what other sequences have left in `pages`."""
        for store in self._stores:
            store.clear(pages)

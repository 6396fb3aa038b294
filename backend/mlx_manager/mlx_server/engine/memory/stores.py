"""The arrays of all layers' pages, made larger and smaller together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_manager.mlx_server.execution.forward import PageStore


class Stores:
    """Page stores of a model's layers.

    Args:
        stores: one a layer.
        disturb: called when pages have been copied, which the step under way waits for.
    """

    def __init__(self, stores: Sequence[PageStore], disturb: Callable[[], None]) -> None:
        self._stores = stores
        self._disturb = disturb

    def resize(self, pages: int) -> None:
        """Change the number of pages."""
        copied = [store.resize(pages) for store in self._stores]
        if any(copied):
            self._disturb()

    def clear(self, pages: Sequence[int]) -> None:
        """Remove what other sequences have left in `pages`."""
        for store in self._stores:
            store.clear(pages)

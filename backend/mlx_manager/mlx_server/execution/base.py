"""Defaults of the `Forward` protocol, for the ways of running a model to begin with."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.metal.order import IN_ORDER, LaunchOrder
from mlx_manager.mlx_server.engine.kv.coded import CodedStore
from mlx_manager.mlx_server.engine.kv.store import LayerStore
from mlx_manager.mlx_server.execution.forward import Prefixes, Snapshot


class PlainForward:
    """Defaults of the `Forward` protocol."""

    looks_ahead: bool = False
    puts_together_ahead: bool = False
    horizon: int = 0
    grain: int = 1
    abreast: int = 0
    attends_whole: bool = False
    copies: int = 1
    worth: int = 0
    repeats: bool = True
    token_bytes: int = 0
    row_bytes: int = 0
    stores: list[LayerStore]
    order_of_launches: LaunchOrder = IN_ORDER

    def serve(self) -> None:
        self.order_of_launches.forget()

    def queue(self) -> None:
        pass

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

    def keep_hidden(self, *, fed: bool = False) -> bool:
        return False

    @property
    def hidden(self) -> mx.array | None:
        return None

    def keep_in_8_bits(self, readers: KernelSet | None = None) -> None:
        assert not any(store.writes_in_place for store in self.stores)
        self.stores = [CodedStore(of.shape, of.page_size, readers) for of in self.stores]

    def _pages(self) -> list[mx.array]:
        return [array for store in self.stores for array in store.held]


# A step of 128 rows of the embedded model takes two cores 26 ms, and two of 64 take 30.
ABREAST_ON_CPU = 48


class OnPages(PlainForward):
    """Common part of forwards whose rows' state is on pages, all of it."""

    prefixes: Prefixes = "pages"
    puts_together_ahead: bool = True

    def forget(self, key: int) -> None:
        pass

    def state(self) -> list[mx.array]:
        return self._pages()


def shortest_first(lengths: Sequence[int]) -> list[int]:
    """Return `Forward.order` for rows that are gathered with others of similar length."""
    return sorted(range(len(lengths)), key=lengths.__getitem__)


def order_after(before: Sequence[int], keys: Sequence[int]) -> list[int]:
    """Return `Forward.order` for rows that stay where they were in the last step; new rows
    follow."""
    place = {key: i for i, key in enumerate(before)}
    return sorted(range(len(keys)), key=lambda i: place.get(keys[i], len(place)))

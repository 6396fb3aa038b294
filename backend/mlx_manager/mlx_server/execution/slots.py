"""Which slot of the recurrent layers' states is whose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlx_manager.mlx_server.devices.states import StateStore

# How many there are: at most twice as many as sequences, and few sizes, since compiled steps are
# put together anew for each. The last is also by how many they grow then.
SIZES = (2, 4, 8, 16, 32)


class Slots:
    """Slots of sequences, by their keys. There are as many as there have been sequences at once."""

    def __init__(self, stores: Sequence[StateStore]) -> None:
        self._stores = stores
        self._of: dict[int, int] = {}
        self._free: list[int] = []

    def of(self, keys: Iterable[int]) -> list[int]:
        """Who has none gets one, with anything in it. The states must not be in use by what has not
        been queued yet."""
        found = []
        for key in keys:
            if key not in self._of:
                if not self._free:
                    self._grow()
                self._of[key] = self._free.pop()
            found.append(self._of[key])
        return found

    def known(self, key: int) -> int | None:
        return self._of.get(key)

    def release(self, key: int) -> None:
        if (slot := self._of.pop(key, None)) is not None:
            self._free.append(slot)
        if not self._of and len(self._free) > SIZES[-1]:
            # A crowd has gone.
            self.clear()

    def clear(self) -> None:
        """Give the memory up, if nobody has a slot."""
        if not self._of:
            self._free = []
            for store in self._stores:
                store.resize(0)

    def _grow(self) -> None:
        have = len(self._of)
        size = next((size for size in SIZES if size > have), have + SIZES[-1])
        for store in self._stores:
            store.resize(size)
        # The lowest first.
        self._free = list(range(size - 1, have - 1, -1))

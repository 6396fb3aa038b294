"""Assignment of slots in the recurrent layers' states to sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlx_manager.mlx_server.devices.states import StateStore

# Numbers of slots: at most twice as many as sequences, and few sizes, since compiled steps are put
# together anew for each. Beyond the last size, slots grow by that number at a time.
SIZES = (2, 4, 8, 16, 32)


class Slots:
    """Slots of sequences, by the sequences' keys. There are as many slots as the most sequences at
    once, rounded up to one of `SIZES`."""

    def __init__(self, stores: Sequence[StateStore]) -> None:
        self._stores = stores
        self._of: dict[int, int] = {}
        self._free: list[int] = []

    def of(self, keys: Iterable[int]) -> list[int]:
        """Return the slots of the sequences with these keys.

        A sequence without a slot gets one, whose content is arbitrary. Call while no operation on
        the states is still to be queued: the states may be resized.
        """
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
            # No sequence is left where there are more slots than the largest of `SIZES`: give the
            # memory back.
            self.clear()

    def clear(self) -> None:
        """Give the memory of the states back, unless some sequence has a slot."""
        if not self._of:
            self._free = []
            for store in self._stores:
                store.resize(0)

    def _grow(self) -> None:
        have = len(self._of)
        size = next((size for size in SIZES if size > have), have + SIZES[-1])
        for store in self._stores:
            store.resize(size)
        # Slots are taken from the end: the lowest first.
        self._free = list(range(size - 1, have - 1, -1))

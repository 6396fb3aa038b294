"""The rows of decode steps, as they are on a GPU.

Arrays that change little from step to step stay on the device. The page tables are sent again when
some row has new pages, and lengths advance on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices.attention.splits import Splits
from mlx_manager.mlx_server.devices.cuda.mapped import send, together
from mlx_manager.mlx_server.engine.kv.pages import PageTable

# Steps after which the attention's work is divided anew, and for which rows get pages ahead.
HORIZON = 16
# Rows that a step is padded to, and multiples of the last: few sizes, since each is compiled.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
# Pages that tables are padded to: few sizes, too, since each is compiled.
WIDTHS = tuple(64 * 8**i for i in range(8))


def padded_rows(rows: int) -> int:
    """Return the number that so many rows are padded to."""
    return next((size for size in ROWS if size >= rows), -(-rows // ROWS[-1]) * ROWS[-1])


@dataclass(slots=True)
class DeviceBatch:
    """The rows of the last step, as they are on the device.

    Attributes:
        keys: the rows' keys, in order. lengths: tokens of each row in the last step.
        pages: the number of pages that the rows had in all when `table` was made.
        table: (padded rows, n), the rows' pages. before: (padded rows,), tokens of each row before
            the next step, 0 for padding. splits: those of each kind of attention, made `age` steps
            ago. slots: one array, (padded rows,), each row's slot, if recurrent layers have slots.
        shifts: one array, (padded rows,), added to each row's place for the position by which it is
        rotated, if something is added to any. written: one array, (padded rows,), the slot on pages
        that each row's newest token is written to, -1 for padding, if rows may have the same pages.
    """

    keys: list[int]
    lengths: list[int]
    pages: int
    table: mx.array
    before: mx.array
    splits: Mapping[Any, Splits]
    slots: Sequence[mx.array]
    shifts: Sequence[mx.array] = ()
    written: Sequence[mx.array] = ()
    age: int = 0

    def padded(self, tokens: mx.array) -> mx.array:
        """Return the rows' `tokens`, padded to the batch's size. The tokens of padding mean
        nothing."""
        size: int = self.before.size
        if tokens.size == size:
            return tokens
        own = tokens[: len(self.keys)]
        return mx.pad(own, (0, size - own.size)) if own.size < size else own


class Running:
    """The batch of running rows that stays on the device from step to step.

    Args:
        plan: cuts a step's attention; see `Splits`.
        size: returns the number that so many rows are padded to.
        slots: returns the slots of the rows of these keys, where recurrent layers have some.

    Attributes:
        batch: None if the last step had prompts in it.
    """

    def __init__(
        self,
        plan: Callable[[NDArray[np.int32]], Mapping[Any, Splits]],
        size: Callable[[int], int] = padded_rows,
        slots: Callable[[Sequence[int]], list[int]] = lambda _: [],
    ) -> None:
        self._plan = plan
        self._size = size
        self._slots = slots
        self.batch: DeviceBatch | None = None

    def next(
        self,
        keys: list[int],
        tables: Sequence[PageTable],
        lengths: list[int],
        shifts: Sequence[int] = (),
    ) -> DeviceBatch:
        """Return the rows of the next step. Its caller sets `before` of the result for the step
        after."""
        last = self.batch
        if last is None or last.keys != keys or lengths != [length + 1 for length in last.lengths]:
            self.batch = self.begin(keys, tables, lengths, shifts)
            return self.batch
        pages = sum(map(len, tables))
        if pages != last.pages:
            last.pages, last.table = pages, self._table(tables)
        if last.age >= HORIZON:
            last.age, last.splits = 0, self._plan(self._padded(lengths))
        last.age += 1
        last.lengths = lengths
        return last

    def begin(
        self,
        keys: list[int],
        tables: Sequence[PageTable],
        lengths: list[int],
        shifts: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> DeviceBatch:
        """Return a batch of these rows as if no step had come before. shifts: see `Decode`.
        written: slots on pages; see `DeviceBatch`."""
        padded = self._padded(lengths)
        slots = self._slots(keys)
        with together():
            return DeviceBatch(
                keys,
                lengths,
                sum(map(len, tables)),
                self._table(tables),
                send(np.maximum(padded - 1, 0)),
                self._plan(padded),
                [send(self._padded(slots))] if slots else [],
                [send(self._padded(shifts))] if len(shifts) else [],
                [send(self._padded(written, -1))] if len(written) else [],
            )

    def _table(self, tables: Sequence[PageTable]) -> mx.array:
        """Return all the pages that the rows have, also those that they will grow into."""
        longest = max(map(len, tables))
        width = next(width for width in WIDTHS if width >= longest)
        table = np.zeros((self._size(len(tables)), width), np.int32)
        for row, own in enumerate(tables):
            table[row, : len(own)] = own.pages
        return send(table)

    def _padded(self, numbers: Sequence[int], by: int = 0) -> NDArray[np.int32]:
        padded = np.full(self._size(len(numbers)), by, np.int32)
        padded[: len(numbers)] = numbers
        return padded

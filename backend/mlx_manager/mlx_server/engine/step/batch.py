"""The batch: rows that go through steps together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.sampling import SamplingBatch
from mlx_manager.mlx_server.engine.sequence import Sequence as Row


class Batch:
    """Batch of rows. Values that are the same in every step of these rows are computed once.

    Attributes:
        rows: in the order of the step.
        plain: whether every row draws its most likely token in all steps and wants nothing else.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.plain = all(row.plain for row in rows)

    @cached_property
    def keys(self) -> list[int]:
        return [row.key for row in self.rows]

    @cached_property
    def tables(self) -> list[PageTable]:
        return [row.table for row in self.rows]

    @cached_property
    def shifts(self) -> list[int]:
        """Shift of each row; empty if no row has one."""
        shifts = [row.shift for row in self.rows]
        return shifts if any(shifts) else []

    @cached_property
    def sampling(self) -> SamplingBatch:
        return SamplingBatch([row.sampler for row in self.rows])

    @property
    def needs_host(self) -> bool:
        """Return whether the last step's tokens must be read before the next ones are drawn."""
        return not self.plain and any(row.needs_host for row in self.rows)

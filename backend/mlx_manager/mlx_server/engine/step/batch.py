"""The batch: rows that go through steps together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.sampling import SamplerState, SamplingBatch
from mlx_manager.mlx_server.engine.sequence import Sequence as Row
from mlx_manager.mlx_server.engine.speculation.draft import Draft


class Batch:
    """Batch of rows. Values that are the same in every step of these rows are computed once.

    Args:
        drafts: those of the rows.

    Attributes:
        rows: in the order of the step.
        drafts: by their rows' keys.
        plain: whether every row draws its most likely token in all steps and wants nothing else.
    """

    def __init__(self, rows: Sequence[Row], drafts: Sequence[Draft] = ()) -> None:
        self.rows = list(rows)
        self.drafts = {draft.sequence.key: draft for draft in drafts}
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
        """Return the parameters of each draw."""
        if not self.drafts:
            return SamplingBatch([row.sampler for row in self.rows])
        states = [self._samplers(row) for row in self.rows]
        return SamplingBatch([state for own in states for state in own])

    @property
    def drawn(self) -> list[int]:
        """Return the number of tokens that are drawn before each draw."""
        if not self.drafts:
            return [row.drawn for row in self.rows]
        return [row.drawn + place for row in self.rows for place in range(self.places(row))]

    @property
    def drawing(self) -> list[Row]:
        """Return the row of each draw."""
        if not self.drafts:
            return self.rows
        return [row for row in self.rows for _ in range(self.places(row))]

    def places(self, row: Row) -> int:
        """Return the number of tokens that are drawn for a row in the step."""
        return self.drafts[row.key].places if row.key in self.drafts else 1

    def _samplers(self, row: Row) -> Sequence[SamplerState]:
        return self.drafts[row.key].samplers if row.key in self.drafts else [row.sampler]

    @property
    def needs_host(self) -> bool:
        """Return whether the last step's tokens must be read before the next ones are drawn."""
        return not self.plain and any(row.needs_host for row in self.rows)

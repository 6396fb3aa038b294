"""Memory of what rows keep besides pages."""

from __future__ import annotations

from mlx_manager.mlx_server.engine.memory.line import Line
from mlx_manager.mlx_server.engine.sequence import Sequence


class StateMemory:
    """States of the rows: of recurrent layers, or of mlx-lm's own caches.

    Args:
        line: `states:<model>`.
        row_bytes: bytes of one row's state.
        max_rows: most rows that there may be.
        copy_bytes: bytes of the copy of a state that a row with a draft keeps.
        copies: most such rows of a step.

    Attributes:
        lacking: whether the last row that came found no memory for its state.
    """

    def __init__(
        self, line: Line, row_bytes: int, max_rows: int, *, copy_bytes: int = 0, copies: int = 0
    ) -> None:
        self.line = line
        self.row_bytes = row_bytes
        self.lacking = False
        self._copy_bytes, self._copies = copy_bytes, copies
        self._most = self._bytes_of(max_rows)
        self._rows: set[int] = set()

    def enter(self, sequence: Sequence) -> bool:
        """Reserve a row's state; return whether the ledger grants it."""
        more = self._bytes_of(len(self._rows) + 1) - self._held
        self.lacking = not self.line.reserve(more)
        if not self.lacking:
            self._rows.add(sequence.key)
        return not self.lacking

    def leave(self, sequence: Sequence) -> None:
        """Give back the state of a sequence that has no row any more, if it had one."""
        self._rows.discard(sequence.key)
        if self.row_bytes:
            self.line.record(self._held)

    def clear(self) -> None:
        """Give back the states of all rows."""
        self._rows.clear()
        self.line.record(0)

    def to_come(self, memory: int) -> int:
        """Return the bytes that growth that is not urgent leaves to the states of rows that may
        come, and to their snapshots: half of all memory, if states take as much, and two rows'
        states in any case. Pages are not given up again for states while rows run.

        memory: bytes that pages have or could have.
        """
        half = (memory + self._held) // 2
        return max(min(self._most, half) - self._held, 2 * self.row_bytes)

    @property
    def _held(self) -> int:
        return self._bytes_of(len(self._rows))

    def _bytes_of(self, rows: int) -> int:
        return self.row_bytes * rows + self._copy_bytes * min(rows, self._copies)

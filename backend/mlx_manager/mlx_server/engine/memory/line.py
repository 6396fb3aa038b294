"""One line of the ledger."""

from __future__ import annotations

from mlx_manager.mlx_server.utils.memory import Ledger


class Line:
    """Bytes that one part of an engine holds.

    Attributes:
        ledger: has the line.
        name: the line's name in the ledger, as `pages:<model>`.
        reserving: whether bytes are being reserved now. Pages must not be given up then: the
            reservation counts on them, and the stores would be copied twice.
    """

    def __init__(self, ledger: Ledger, name: str) -> None:
        self.ledger = ledger
        self.name = name
        self.reserving = False

    @property
    def nbytes(self) -> int:
        return self.ledger.figures().get(self.name, 0)

    def reserve(self, nbytes: int) -> bool:
        """Return whether the ledger grants `nbytes` more."""
        if not nbytes:
            return True
        self.reserving = True
        try:
            return self.ledger.reserve(self.name, nbytes)
        finally:
            self.reserving = False

    def record(self, nbytes: int) -> None:
        """Set the line to measured bytes; 0 removes it."""
        self.ledger.record(self.name, nbytes)

"""Memory that steps work on."""

from __future__ import annotations

from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.errors import OutOfMemory
from mlx_manager.mlx_server.utils.memory import Ledger, working_line
from mlx_manager.mlx_server.utils.text import sized

# The memory of larger steps is taken where there is so many times as much.
PLENTY = 8
# Long steps in a row after which the memory of larger steps is given up.
OFTEN = 32


class WorkingMemory:
    """Working memory of a model's steps, and the memory of larger steps where there is plenty.

    Args:
        name: of the model.
        size: what steps of either kind work on.
        ledger: has it in the line `working:<model>`.

    Attributes:
        has_ample: whether there is memory for larger steps.

    Raises:
        OutOfMemory: the ledger does not grant the bytes that a step works on.
    """

    def __init__(self, name: str, size: StepSize, ledger: Ledger) -> None:
        self.has_ample = False
        self._line = working_line(name)
        self._size = size
        self._ledger = ledger
        # Long steps in a row.
        self._long = 0
        if not ledger.reserve_if_attainable(self._line, size.working_bytes):
            raise OutOfMemory(
                f"A step of {name} works on up to {sized(size.working_bytes)}, and "
                f"{sized(ledger.attainable())} of {sized(ledger.total)} are left beside its "
                "weights.",
                retry_after=10,
            )
        self._take_ample()

    @property
    def ample_bytes(self) -> int:
        """Return the bytes that `give_ample_up` would give back."""
        return self._size.ample_bytes if self.has_ample else 0

    def weigh_ample(self, short: bool | None) -> None:
        """Have the memory of larger steps if they are short, and give it up if they are long again
        and again: the first ones compile. None: not known."""
        self._long = self._long + 1 if short is False else 0
        if short and not self.has_ample:
            self._take_ample()
        elif self._long > OFTEN:
            self.give_ample_up()

    def give_ample_up(self) -> None:
        if self.has_ample:
            self.has_ample = False
            self._ledger.release(self._line, self._size.ample_bytes)

    def close(self) -> None:
        self.has_ample = False
        self._ledger.record(self._line, 0)

    def _take_ample(self) -> None:
        """Reserve the memory of larger steps, if that leaves pages nearly all there is."""
        more = self._size.ample_bytes
        plenty = 0 < more <= self._ledger.available() // PLENTY
        self.has_ample = plenty and self._ledger.reserve(self._line, more)

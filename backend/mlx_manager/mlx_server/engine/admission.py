"""Admission control: which sequences are refused, and why."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.engine.memory.accounts import EngineMemory
from mlx_manager.mlx_server.engine.scheduler.scheduler import Scheduler
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.errors import MLXManagerError, OutOfMemory, Overloaded
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.pressure import Pressure, out_of_reach
from mlx_manager.mlx_server.utils.text import sized


class AdmissionControl:
    """Judge of sequences: when they come, and while they wait.

    Args:
        scheduler: has the queue.
        memory: says how many pages there could be.
        ledger: says how much memory others need.
        limits: of the queue.
    """

    def __init__(
        self, scheduler: Scheduler, memory: EngineMemory, ledger: Ledger, limits: EngineLimits
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._ledger = ledger
        self._limits = limits

    def refusal(self, sequence: Sequence) -> MLXManagerError | None:
        """Return why a new sequence can't be taken on; None if it can. Its limit is then lowered to
        the tokens that there could be pages for."""
        if self._ledger.pressure() is Pressure.CRITICAL:
            return out_of_reach("The request is not begun")
        scheduler, memory, limits = self._scheduler, self._memory, self._limits
        rows = limits.max_rows - scheduler.queues.admitted
        if not scheduler.may_queue(sequence, limits.max_waiting + max(rows, 0)):
            return Overloaded(
                f"The queue is full: {len(scheduler.queues.waiting)} requests are waiting, and at "
                f"most {limits.max_waiting} may (MLX_SERVER_MAX_WAITING). Try again shortly.",
                retry_after=2,
            )
        attainable = memory.attainable_pages
        if memory.pool.pages_for(len(sequence.tokens) + sequence.limit) > attainable:
            # Memory of idle models is left to them until the pages are needed.
            attainable += memory.pages_of_others
        shortage = self._shortage(sequence, attainable)
        if shortage is None:
            room = attainable * limits.page_size - len(sequence.tokens)
            sequence.limit = min(sequence.limit, room)
        return shortage

    def stranded(self) -> Iterator[tuple[Sequence, MLXManagerError]]:
        """Yield sequences that wait for memory that others have taken since, with the reason why
        they can't go on. There are none while a row may end and free some."""
        queues = self._scheduler.queues
        if queues.admitted or (queues.waiting and self._ledger.more_to_come()):
            return
        for sequence in tuple(queues.waiting):
            shortage: OutOfMemory | None
            if self._scheduler.closed:
                shortage = out_of_reach("The request is not begun")
            else:
                shortage = self._shortage(sequence, self._memory.attainable_pages)
            if shortage is not None:
                yield sequence, shortage

    def _shortage(self, sequence: Sequence, attainable: int) -> OutOfMemory | None:
        """Return an error if the sequence's next token could not be drawn even with no other
        row."""
        page_bytes, own = self._memory.pages.page_bytes, self._memory.states.row_bytes
        needed = self._memory.pool.pages_for(len(sequence.tokens) + 1)
        if needed <= attainable:
            return None
        what = "KV pages" if not own else f"KV pages, beside {sized(own)} that every row takes"
        return OutOfMemory(
            f"The prompt of {len(sequence.tokens)} tokens takes {sized(needed * page_bytes)} of "
            f"{what}, and at most {sized(attainable * page_bytes)} can be had.",
            retry_after=30,
        )

"""A worker's side of the memory that the server grants it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from mlx_manager.mlx_server.utils.memory import Ledger, Relief
from mlx_manager.mlx_server.workers.messages import (
    DeviceFull,
    GaveBack,
    GiveBack,
    Granted,
    Need,
    Using,
)

EVERY = 0.1
"""Seconds between two looks at what is left."""
LOW = 1 / 16
"""Share of the granted memory: while less is unused, more is asked for before a step needs it."""
NOTEWORTHY = 1 / 128
"""Share of the granted memory: a larger change in use is reported to the server."""
MOMENT = 0.05
"""Seconds that an engine without anything else to do waits for an answer in one go."""
AGAIN = 1.0
"""Seconds after which more is asked for again where none was to be had."""


class GrantedMemory:
    """Granted memory of a worker: keeps a ledger's limit at it, and asks for more ahead of need.

    The MLX thread owns the ledger. While a model is loaded (`waits`) that thread waits for what
    it asks for; between steps it never does, and rows that lack pages wait their turn instead.

    Attributes:
        waits: whether the MLX thread may wait for more.
        beyond: bytes that could be had on top of what is granted, as the server has told last.
    """

    def __init__(self, ledger: Ledger, send: Callable[[object], None]) -> None:
        self.waits = True
        self.beyond = 0
        self._ledger = ledger
        self._send = send
        self._asked = False
        self._asked_at = self._looked_at = 0.0
        self._answers: deque[Granted] = deque()
        self._answered = threading.Event()
        self._told = Using(0, 0)
        self._device_limit = 0
        ledger.more_to_come = self._await_answer
        ledger.add_relief(Relief.IDLE_MODELS, self._relieve, lambda: self.beyond)

    # -- on the MLX thread ---------------------------------------------------------------------

    def take(self, nbytes: int) -> bool:
        """Have at least `nbytes` granted beyond what is in use; False if they can't be had."""
        if self._ledger.available() < nbytes:
            self._relieve(nbytes - self._ledger.available())
        return self._ledger.available() >= nbytes

    def begin(self, total: int) -> None:
        """Set the bytes that all models together may take."""
        self._ledger.total = self._device_limit = total

    def apply(self) -> None:
        """Take what has been granted."""
        while self._answers:
            granted = self._answers.popleft()
            self.beyond = granted.beyond
            self._asked = False
            self._ledger.extend(granted.nbytes)

    def give_back(self, wanted: GiveBack) -> None:
        """Give back what is not used, and with `kept` what is only kept for reuse."""
        if wanted.kept:
            self._ledger.free(wanted.nbytes)
        unused = self._ledger.available()
        spare = unused if wanted.kept else unused - int(LOW * self._ledger.limit)
        given = max(0, min(wanted.nbytes, spare))
        self._ledger.extend(-given)
        # The rest of what it has lost may be had again.
        self.beyond += given
        self._send(GaveBack(given))
        self.tell()

    def _relieve(self, lacking: int) -> None:
        if self.waits:
            # An answer that is under way is to an earlier question.
            self._wait()
            self._ask(lacking, urgent=True)
            self._wait()
        elif lacking <= self.beyond or monotonic() > self._asked_at + AGAIN:
            self._ask(lacking, urgent=True)

    def _wait(self) -> None:
        while self._asked:
            self._answered.wait()
            self._answered.clear()
            self.apply()

    def _await_answer(self) -> bool:
        """Wait a moment for what has been asked for, if nothing else is to be done; False if it is
        not on its way, nor has come."""
        if not self._asked:
            return False
        before = self._ledger.limit
        self._answered.wait(MOMENT)
        self._answered.clear()
        self.apply()
        return self._asked or self._ledger.limit > before

    # -- on any thread -------------------------------------------------------------------------

    def granted(self, message: Granted) -> None:
        """Accept an answer of the server; `apply` must then be called on the MLX thread."""
        self._answers.append(message)
        self._answered.set()

    def look_ahead(self) -> None:
        """Ask for more if little is left unused, and tell what is used; at most so often."""
        now = monotonic()
        if self.waits or now < self._looked_at + EVERY:
            return
        self._looked_at = now
        ledger = self._ledger
        low = int(LOW * ledger.limit)
        if ledger.available() < low and (self.beyond or now > self._asked_at + AGAIN):
            self._ask(2 * low, urgent=False)
        self.tell(NOTEWORTHY)

    def tell(self, change: float = 0.0) -> None:
        """Tell the server what is used, if it has changed by more than that part of the grant, and
        what the device has turned out to lack."""
        self._look_at_device()
        limit, used, kept = self._ledger.limit, self._ledger.used(), self._ledger.kept()
        moved = abs(used - self._told.nbytes) + abs(kept - self._told.kept)
        if moved > change * limit:
            self._told = Using(used, kept)
            self._send(self._told)

    def _ask(self, nbytes: int, *, urgent: bool) -> None:
        if self._asked:
            return
        self._asked, self._asked_at = True, monotonic()
        self._send(Need(nbytes, urgent))

    def _look_at_device(self) -> None:
        lost = self._device_limit - self._ledger.total
        if lost > 0:
            self._device_limit = self._ledger.total
            self._send(DeviceFull(lost))

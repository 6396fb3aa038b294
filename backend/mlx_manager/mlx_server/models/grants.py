"""The memory that is granted to workers: who has how much, and who gives back for whom.

All memory that models may take is granted ahead: a model that is alone has everything. A worker
that needs more is given, in this order: free memory; memory that others have and do not use; if
the need is urgent, memory that others only keep for reuse; and last the memory of idle models,
which are unloaded for it. For an urgent need that can't be met, nothing is taken from anybody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mlx_manager.mlx_server.workers.messages import (
    Beyond,
    DeviceFull,
    GaveBack,
    GiveBack,
    Granted,
    Need,
    Using,
)

ANSWER_SECONDS = 2.0
"""Seconds to wait for a worker that is asked to give back."""


class Holder(Protocol):
    """Anything that is granted memory and can be sent messages: a worker."""

    def send(self, message: object) -> None: ...


H = TypeVar("H", bound=Holder)


@dataclass(slots=True)
class Share:
    """One worker's part, in bytes. used, kept: the worker's last report. told: bytes that the
    worker could have on top, as it was last told."""

    granted: int = 0
    used: int = 0
    kept: int = 0
    told: int = 0

    @property
    def unused(self) -> int:
        return max(0, self.granted - self.used)


class Grants(Generic[H]):
    """The grants of all workers. Any thread may call.

    idle: returns the workers whose models nobody uses and which may be ended for others.
    evict: ends such a worker; False if it is in use by now. A call of `ended` follows.

    Attributes:
        limit: bytes that all workers may have.
    """

    def __init__(
        self,
        limit: int | None,
        idle: Callable[[], Iterable[H]],
        evict: Callable[[H], bool],
    ) -> None:
        self.limit = limit or 0
        self._idle = idle
        self._evict = evict
        self._shares: dict[H, Share] = {}
        self._needs: deque[tuple[H, Need]] = deque()
        # Workers that the first need waits for: to give back, with the timer that ends the wait,
        # or to end (None). `_asked`: workers that were asked for this need, each with `kept`.
        self._awaited: dict[H, threading.Timer | None] = {}
        self._asked: set[tuple[H, bool]] = set()
        self._lock = threading.RLock()

    # -- figures -------------------------------------------------------------------------------

    def free(self) -> int:
        """Return the bytes that are granted to nobody."""
        with self._lock:
            return self.limit - sum(share.granted for share in self._shares.values())

    def available(self) -> int:
        """Return the bytes that nobody uses, granted or not."""
        with self._lock:
            return self.limit - sum(share.used for share in self._shares.values())

    def attainable(self, holder: H) -> int:
        """Return the bytes that `holder` could be granted on top, if it needed them badly."""
        with self._lock:
            others = [other for other in self._shares if other is not holder]
            idle = {other for other in self._idle() if other in others}
            found = self.free()
            for other in others:
                share = self._shares[other]
                found += share.granted if other in idle else share.unused + share.kept
            return found

    def tell(self, holder: H) -> None:
        """Let a worker know what it could have, before it is asked for what may need that."""
        with self._lock:
            share = self._shares.get(holder)
            if share is not None and share.told != (beyond := self.attainable(holder)):
                share.told = beyond
                holder.send(Beyond(beyond))

    # -- what workers say ----------------------------------------------------------------------

    def enter(self, holder: H) -> None:
        """Enter a worker, with no memory granted yet."""
        with self._lock:
            self._shares[holder] = Share()

    def heard(self, holder: H, news: Need | GaveBack | DeviceFull | Using) -> None:
        with self._lock:
            share = self._shares.get(holder)
            if share is None:
                return
            match news:
                case Need():
                    self._needs.append((holder, news))
                case GaveBack(nbytes):
                    share.granted -= nbytes
                    self._await_no_more(holder)
                case DeviceFull(nbytes):
                    share.granted -= nbytes
                    self.limit -= nbytes
                case Using(nbytes, kept):
                    share.used, share.kept = nbytes, kept
            self._serve()

    def ended(self, holder: H) -> None:
        """Free the memory of a worker that has ended, and drop its needs."""
        with self._lock:
            self._shares.pop(holder, None)
            self._await_no_more(holder)
            if self._needs and self._needs[0][0] is holder:
                self._asked.clear()
            self._needs = deque(need for need in self._needs if need[0] is not holder)
            self._serve()

    # -- granting ------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Go on with the first need until it is met, or can't be, or somebody is waited for."""
        while self._needs and not self._awaited:
            holder, need = self._needs[0]
            if not self._gather(holder, need):
                self._needs.popleft()
                self._asked.clear()
                self._grant(holder, need)

    def _gather(self, holder: H, need: Need) -> bool:
        """Have others give back what the need lacks; False if there is nobody to wait for."""
        others = {o: s for o, s in self._shares.items() if o is not holder}
        unused = sum(share.unused for share in others.values())
        free = self.free()
        if need.urgent and need.nbytes > self.attainable(holder):
            return False
        if free < (wanted := self._wanted(holder, need)) and unused > 0:
            self._ask_back(others, wanted - free, kept=False)
        if self._awaited or not need.urgent or self.free() >= need.nbytes:
            return bool(self._awaited)
        self._ask_back(others, need.nbytes - self.free(), kept=True)
        if not self._awaited:
            self._evict_for(holder, need.nbytes)
        return bool(self._awaited)

    def _wanted(self, holder: H, need: Need) -> int:
        """Return the bytes to grant: the need, and an equal part of what nobody uses beyond it."""
        unused = sum(share.unused for other, share in self._shares.items() if other is not holder)
        spare = max(0, self.free() + unused - need.nbytes)
        return need.nbytes + spare // len(self._shares)

    def _ask_back(self, others: dict[H, Share], nbytes: int, *, kept: bool) -> None:
        """Ask the worker that has the most to give and was not asked for this need before."""
        give = {
            other: share.unused + (share.kept if kept else 0)
            for other, share in others.items()
            if (other, kept) not in self._asked
        }
        if not give:
            return
        other = max(give, key=give.__getitem__)
        if give[other] <= 0:
            return
        self._asked.add((other, kept))
        timer = threading.Timer(ANSWER_SECONDS, self._give_up, (other,))
        timer.daemon = True
        self._awaited[other] = timer
        timer.start()
        other.send(GiveBack(nbytes, kept))

    def _await_no_more(self, holder: H) -> None:
        timer = self._awaited.pop(holder, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, holder: H) -> None:
        """Stop waiting for a worker that does not answer."""
        with self._lock:
            timer = self._awaited.get(holder)
            # The worker may have answered and been asked again, with another timer.
            if timer is threading.current_thread():
                del self._awaited[holder]
                self._serve()

    def _evict_for(self, needy: H, need: int) -> None:
        """Evict idle models if that frees enough."""
        idle = [h for h in self._idle() if h in self._shares and h is not needy]
        lacking = need - self.free()
        if lacking > sum(self._shares[holder].granted for holder in idle):
            return
        for holder in idle:
            if lacking > 0 and self._evict(holder):
                self._awaited[holder] = None
                lacking -= self._shares[holder].granted

    def _grant(self, holder: H, need: Need) -> None:
        free, share = max(0, self.free()), self._shares[holder]
        granted = min(free, self._wanted(holder, need))
        if need.urgent and granted < need.nbytes:
            granted = 0
        share.granted += granted
        if need.urgent and granted:
            # The worker's next report comes later than the use.
            share.used = min(share.granted, share.used + need.nbytes)
        share.told = self.attainable(holder)
        holder.send(Granted(granted, share.told))

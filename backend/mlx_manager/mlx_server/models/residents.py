"""The models in memory, and who uses them.

Several threads share this table: asyncio takes and gives back leases, and a worker's connection
removes what has died or goes for another. A lock, held for a few lines at a time, makes "nobody
uses it, so it goes" one step: no model in use is ever evicted, nor one that somebody has waited for
and not had.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.facts import ModelFacts
from mlx_manager.mlx_server.models.settings import Recipe
from mlx_manager.mlx_server.workers.proxy import Proxy
from mlx_manager.mlx_server.workers.worker import Worker


@dataclass(eq=False, slots=True)
class Resident:
    """A loaded model, its source and its recipe.

    `leases`, `uses` and `used_at` belong to `Residents`. uses: number of its last use in the count
    over all models. used_at: time of its last use by the clock.
    """

    id: str
    facts: ModelFacts
    backend: Proxy
    source: ModelSource
    recipe: Recipe
    worker: Worker
    leases: int = field(default=0, init=False)
    uses: int = field(default=0, init=False)
    used_at: float = field(default=0.0, init=False)


class Residents:
    """Loaded models by id. Every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._models: dict[str, Resident] = {}
        self._awaited: Counter[str] = Counter()
        self._uses = 0
        self._lock = threading.Lock()

    def add(self, resident: Resident) -> None:
        with self._lock:
            self._touch(resident)
            self._models[resident.id] = resident

    def __contains__(self, model_id: str) -> bool:
        with self._lock:
            return model_id in self._models

    def get(self, model_id: str) -> Resident | None:
        """Return the model, which may be removed at any time; None if it is not here."""
        with self._lock:
            return self._models.get(model_id)

    def of(self, worker: Worker) -> Resident | None:
        """Return the model in that worker; None if it is not here."""
        return next((r for r in self.all() if r.worker is worker), None)

    def lease(self, model_id: str) -> Resident | None:
        """Return the model and keep it until it is given back; None if it is not here."""
        with self._lock:
            resident = self._models.get(model_id)
            if resident is not None:
                resident.leases += 1
                self._touch(resident)
            return resident

    @contextmanager
    def awaited(self, model_id: str) -> Iterator[None]:
        """Count a caller that waits for the model to be loaded and leases it in the context."""
        with self._lock:
            self._awaited[model_id] += 1
        try:
            yield
        finally:
            with self._lock:
                # The subtraction drops names that nobody waits for any more.
                self._awaited -= Counter([model_id])

    def in_use(self, resident: Resident) -> bool:
        """Return whether somebody has a lease, or is about to take the first."""
        return bool(resident.leases) or resident.id in self._awaited

    def give_back(self, resident: Resident) -> None:
        with self._lock:
            resident.leases -= 1
            self._touch(resident)

    def idle(self) -> list[Resident]:
        """Return the models that nobody uses, the least recently used first."""
        with self._lock:
            idle = [r for r in self._models.values() if not self.in_use(r)]
            return sorted(idle, key=lambda resident: resident.uses)

    def remove_idle(self, fits: Callable[[Resident], bool]) -> Resident | None:
        """Remove and return the least recently used idle model that fits; None if there is none."""
        with self._lock:
            idle = [r for r in self._models.values() if not self.in_use(r) and fits(r)]
            if not idle:
                return None
            return self._models.pop(min(idle, key=lambda resident: resident.uses).id)

    def remove(self, resident: Resident) -> None:
        """Remove a model, in use or not, if it is here."""
        with self._lock:
            if self._models.get(resident.id) is resident:
                del self._models[resident.id]

    def idle_for(self, resident: Resident) -> float:
        """Return the seconds since the last lease ended; 0 while there is one."""
        return 0.0 if resident.leases else self._clock() - resident.used_at

    def all(self) -> tuple[Resident, ...]:
        with self._lock:
            return tuple(self._models.values())

    def _touch(self, resident: Resident) -> None:
        self._uses += 1
        resident.uses = self._uses
        resident.used_at = self._clock()


class Returns:
    """Count of the leases given back, whose increase can be awaited."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def announce(self) -> None:
        self.count += 1
        self._next.set()

    async def wait(self, seen: int, seconds: float | None) -> None:
        """Wait until `count` exceeds `seen`, or the seconds have passed."""
        if self.count > seen:
            return
        self._next.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._next.wait()

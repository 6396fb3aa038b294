"""The models in memory, and who uses them.

The one table that two threads share: asyncio takes and gives back leases, the MLX thread adds
models and removes idle ones. A lock, held for a few lines at a time, makes "nobody uses it, so it
goes" one step: no model in use is ever evicted, nor one that somebody has waited for and not had.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_manager.mlx_server.core import RowStatus, TokenizerInfo
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.encoder_loading import LoadedEncoder
from mlx_manager.mlx_server.models.loading import LoadedModel
from mlx_manager.mlx_server.models.settings import Recipe


class ModelBackend(Protocol):
    """A backend whose model this process holds. What it answers depends on the model's kind."""

    def tokenizer_info(self) -> TokenizerInfo:
        """What clients need to know of the tokenizer."""
        ...

    def rows(self) -> list[RowStatus]:
        """Every row that has not ended. Any thread may ask."""
        ...

    def stats(self) -> Any:
        """Figures of its engine, a dataclass."""
        ...

    def make_ahead(self) -> None:
        """Make what a request may need and would hold every stream up for. Any thread may ask."""
        ...

    def drop_prefixes(self) -> None:
        """Forget the prompts that are kept for reuse. On the MLX thread."""
        ...

    def close(self) -> None:
        """Fail what is running and free everything. On the MLX thread."""
        ...


@dataclass(eq=False, slots=True)
class Resident:
    """A loaded model, where it came from and what it was made by.

    backend: a `ModelBackend` that answers what `loaded.kind` says; who leases it names that kind.
    complete: whether its backend was told to make ahead what it can.
    The rest belongs to `Residents`: `uses` counts everybody's uses up to its last one, which was
    at `used_at` by the clock.
    """

    id: str
    loaded: LoadedModel | LoadedEncoder
    backend: Any
    source: ModelSource
    recipe: Recipe
    complete: bool = field(default=False, init=False)
    leases: int = field(default=0, init=False)
    uses: int = field(default=0, init=False)
    used_at: float = field(default=0.0, init=False)

    @property
    def sampling(self) -> Mapping[str, float]:
        """What its makers have it drawn by."""
        return self.loaded.sampling if isinstance(self.loaded, LoadedModel) else {}


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
        """The model, which may go at any time; None if it is not here."""
        with self._lock:
            return self._models.get(model_id)

    def lease(self, model_id: str) -> Resident | None:
        """The model, which stays until it is given back; None if it is not here."""
        with self._lock:
            resident = self._models.get(model_id)
            if resident is not None:
                resident.leases += 1
                self._touch(resident)
            return resident

    @contextmanager
    def awaited(self, model_id: str) -> Iterator[None]:
        """Somebody waits for the model to be loaded, and leases it before leaving the context."""
        with self._lock:
            self._awaited[model_id] += 1
        try:
            yield
        finally:
            with self._lock:
                # Names that nobody waits for any more go.
                self._awaited -= Counter([model_id])

    def in_use(self, resident: Resident) -> bool:
        """Whether somebody has a lease, or is about to take the first."""
        return bool(resident.leases) or resident.id in self._awaited

    def give_back(self, resident: Resident) -> None:
        with self._lock:
            resident.leases -= 1
            self._touch(resident)

    def remove_idle(self, fits: Callable[[Resident], bool]) -> Resident | None:
        """Take out the least recently used model that fits and is not in use; None if none."""
        with self._lock:
            idle = [r for r in self._models.values() if not self.in_use(r) and fits(r)]
            if not idle:
                return None
            return self._models.pop(min(idle, key=lambda resident: resident.uses).id)

    def idle_for(self, resident: Resident) -> float:
        """Seconds since the last lease ended; 0 while there is one."""
        return 0.0 if resident.leases else self._clock() - resident.used_at

    def remove_any(self) -> Resident | None:
        """Take out a model, in use or not; None if there is none."""
        with self._lock:
            return self._models.popitem()[1] if self._models else None

    def all(self) -> tuple[Resident, ...]:
        with self._lock:
            return tuple(self._models.values())

    def _touch(self, resident: Resident) -> None:
        self._uses += 1
        resident.uses = self._uses
        resident.used_at = self._clock()

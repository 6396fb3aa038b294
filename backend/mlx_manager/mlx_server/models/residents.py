"""The models in memory, and who uses them.

The one table that two threads share: asyncio takes and gives back leases, the MLX thread adds
models and removes idle ones. A lock, held for a few lines at a time, makes "nobody uses it, so it
goes" one step: no model in use is ever evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_manager.mlx_server.core import (
    Backend,
    Conversation,
    GenerationRequest,
    Prompt,
    TokenizerInfo,
)
from mlx_manager.mlx_server.models.loading import LoadedModel


class ModelBackend(Backend, Protocol):
    """A backend whose model this process holds."""

    def count_tokens(self, request: GenerationRequest) -> int:
        """Tokens that the request's prompt takes."""
        ...

    def tokenize(self, prompt: Prompt, special: bool = True) -> Any:
        """A prompt's tokens. `special`: a text's begin with the model's BOS."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        ...

    def render(self, conversation: Conversation) -> str:
        """A conversation as text."""
        ...

    def tokenizer_info(self) -> TokenizerInfo:
        """What clients need to know of the tokenizer."""
        ...

    def stats(self) -> Any:
        """Figures of its engine, a dataclass."""
        ...

    def close(self) -> None:
        """Fail what is running and free everything. On the MLX thread."""
        ...


@dataclass(eq=False, slots=True)
class Resident:
    """A loaded model. `leases` and `last_used` belong to `Residents`."""

    id: str
    loaded: LoadedModel
    backend: ModelBackend
    leases: int = field(default=0, init=False)
    last_used: int = field(default=0, init=False)


class Residents:
    """Loaded models by id. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._models: dict[str, Resident] = {}
        self._uses = 0
        self._lock = threading.Lock()

    def add(self, resident: Resident) -> None:
        with self._lock:
            self._touch(resident)
            self._models[resident.id] = resident

    def lease(self, model_id: str) -> Resident | None:
        """The model, which stays until it is given back; None if it is not here."""
        with self._lock:
            resident = self._models.get(model_id)
            if resident is not None:
                resident.leases += 1
                self._touch(resident)
            return resident

    def give_back(self, resident: Resident) -> None:
        with self._lock:
            resident.leases -= 1
            self._touch(resident)

    def remove_idle(self, model_id: str | None = None) -> Resident | None:
        """Take out the least recently used model without a lease (or that one); None if none."""
        with self._lock:
            idle = [
                resident
                for resident in self._models.values()
                if not resident.leases and model_id in (None, resident.id)
            ]
            if not idle:
                return None
            return self._models.pop(min(idle, key=lambda resident: resident.last_used).id)

    def remove_any(self) -> Resident | None:
        """Take out a model, in use or not; None if there is none."""
        with self._lock:
            return self._models.popitem()[1] if self._models else None

    def all(self) -> tuple[Resident, ...]:
        with self._lock:
            return tuple(self._models.values())

    def _touch(self, resident: Resident) -> None:
        self._uses += 1
        resident.last_used = self._uses

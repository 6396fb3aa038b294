"""Status reports of the pool about its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mlx_manager.mlx_server.core import Kind
from mlx_manager.mlx_server.models.facts import WeightsForm
from mlx_manager.mlx_server.models.settings import AS_IT_IS, NEVER, Recipe
from mlx_manager.mlx_server.remotes.remote import ServerStatus

State = Literal["loaded", "loading", "loadable", "down"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Status of one model. nbytes: its weights', measured once loaded, of its files before.

    ttl: seconds without use after which it is unloaded. idle: seconds without use so far; None
    while it answers or is not loaded. memory: the ledger's lines of this model, in bytes. outdated:
    its settings have changed since it was loaded; it is loaded anew once it is idle. sampling:
    values of a loaded model for requests that give none, beyond the protocols' defaults. thinks:
    True if its answers may begin with thinking; None while it is not loaded. input_modalities:
    "text", and "image" if it sees; while it is not loaded, as its folder tells. doing: the current
    stage of its load. failure: the reason why it is down. servers: those on other machines that
    have it; none if it is loaded here. draft_model: the id of the model that drafts for it.
    mtp: the id of the model or folder whose MTP head does.
    devices: the number that it is spread over; None while it is not loaded.
    """

    id: str
    state: State
    origin: str
    family: str
    model_type: str
    context_length: int
    nbytes: int
    weights: WeightsForm | None = None
    leases: int = 0
    aliases: tuple[str, ...] = ()
    recipe: Recipe = AS_IT_IS
    pinned: bool = False
    preload: bool = False
    ttl: float = NEVER
    idle: float | None = None
    outdated: bool = False
    memory: Mapping[str, int] = field(default_factory=dict)
    kind: Kind | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    thinks: bool | None = None
    input_modalities: tuple[str, ...] = ("text",)
    doing: str | None = None
    failure: str | None = None
    servers: tuple[ServerStatus, ...] = ()
    draft_model: str | None = None
    mtp: str | None = None
    devices: int | None = None


@dataclass(frozen=True, slots=True)
class Unloaded:
    """A model that has been unloaded. nbytes: its weights'. before, after: MLX's active bytes."""

    id: str
    nbytes: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Changes from reading the models' settings again, as ids.

    unloaded: idle models that are to be loaded anew. outdated: the same, while they answer.
    unknown: names in the file that nothing on offer has.
    """

    file: Path | None
    changed: tuple[str, ...]
    unloaded: tuple[str, ...]
    outdated: tuple[str, ...]
    unknown: tuple[str, ...]

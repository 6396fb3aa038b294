"""The messages between rank 0 of a model on several devices and the other ranks' processes.

Besides these, rank 0 sends the orders of `execution.group.plan`, which have no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.devices.group import Membership
from mlx_manager.mlx_server.execution.group.plan import Order
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.loading.shards import ReadShare
from mlx_manager.mlx_server.models.settings import Recipe


@dataclass(frozen=True, slots=True)
class Enlist:
    """Make the modules of this model, and say `Ready`."""

    source: ModelSource
    recipe: Recipe
    limits: PoolLimits


@dataclass(frozen=True, slots=True)
class Join:
    """Enter the group."""

    member: Membership


@dataclass(frozen=True, slots=True)
class Asked:
    """Do this, and answer with `Done` and the same number."""

    order: Order | ReadShare
    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank can enter a group."""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to `Asked`."""

    result: Any
    number: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life."""


@dataclass(frozen=True, slots=True)
class Cannot:
    """The last message of a rank that can't go on, with the reason in a person's words."""

    why: str

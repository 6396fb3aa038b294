"""A rank's share of a model: its modules, the group, and the passes that rank 0 has run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_manager.mlx_server.devices.group import join
from mlx_manager.mlx_server.engine.thread import ready_device
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.execution.compiled import WRONG
from mlx_manager.mlx_server.execution.group.follower import Follower
from mlx_manager.mlx_server.models.loading.load import read_share, take_share
from mlx_manager.mlx_server.models.loading.shards import ReadShare
from mlx_manager.mlx_server.workers.rank_messages import Asked, Done, Enlist, Join, Ready

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn


class ModelShare:
    """Share of a model that this rank has. All methods are called on one thread.

    Attributes:
        errors: those of messages that can't be followed.
    """

    errors = (MLXManagerError, OSError, *WRONG)

    def __init__(self) -> None:
        ready_device()
        self._enlisted: Enlist | None = None
        self._model: nn.Module | None = None
        self._group: mx.distributed.Group | None = None
        self._follower: Follower | None = None

    def take(self, message: Any) -> Ready | Done | None:
        """Follow a message; return the answer, if the message has one.

        Raises:
            MLXManagerError, RuntimeError, ...: it can't be done, one of `errors`.
        """
        match message:
            case Enlist(source, recipe, limits):
                self._enlisted = message
                self._model = read_share(source, limits, recipe)
                return Ready()
            case Join(member):
                self._group = join(member)
                return None
            case Asked(asked, number):
                if isinstance(asked, ReadShare):
                    self._load(asked)
                    return Done(None, number)
                return Done(self._following.do(asked), number)
        self._following.do(message)
        return None

    def _load(self, share: ReadShare) -> None:
        group, enlisted = self._group, self._enlisted
        assert group is not None
        assert enlisted is not None
        # There is none where a load is tried again: the last one's were made shares.
        model, self._model, self._follower = self._model, None, None
        if model is None:
            model = read_share(enlisted.source, enlisted.limits, enlisted.recipe)
        take_share(model, enlisted.source.id, share, group)
        self._follower = Follower(model, group)

    @property
    def _following(self) -> Follower:
        assert self._follower is not None, "rank 0 has the weights read before"
        return self._follower

"""The other ranks, as rank 0's device thread speaks to them."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mlx_manager.mlx_server.execution.group.plan import Order


class Crew(Protocol):
    """Ranks other than 0, which do what they are told in the order in which they are told.

    Attributes:
        group: all ranks, this one included.
        copies: ranks whose arrays are in one memory with this one's, this one included.
    """

    @property
    def group(self) -> mx.distributed.Group: ...

    @property
    def copies(self) -> int: ...

    def tell(self, order: Order) -> None:
        """Have all others do something; does not wait."""
        ...

    def lose(self, why: str) -> None:
        """Give the ranks up: they no longer agree. Whoever has started them ends them."""
        ...

    def ask(self, order: Order) -> list[str | None]:
        """Have all others do something, and return why each could not; None if it could."""
        ...

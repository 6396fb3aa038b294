"""Going out of service: what runs may finish, for a while, and nothing new is taken."""

from __future__ import annotations

import asyncio
import math

from mlx_manager.mlx_server.errors import ServerNotReady
from mlx_manager.mlx_server.services.calls import Calls

LAST_WORDS = 4
"""Seconds that clients get to take what they are told last: of calls that were cut, or failed, or
ended just before the server did."""


class Drain:
    """Drain of a server, begun by the first signal to stop or through the admin API.

    Belongs to the event loop. Code that takes calls asks `refusal` first.
    """

    def __init__(self, calls: Calls, seconds: float) -> None:
        self.seconds = seconds
        self._calls = calls
        self._until = 0.0
        self._draining: asyncio.Task[None] | None = None
        self._beginning = asyncio.Event()
        self._final = False

    @property
    def begun(self) -> bool:
        return self._draining is not None

    @property
    def final(self) -> bool:
        """Return whether the program is about to end."""
        return self._final

    def begin(self, *, final: bool = False) -> None:
        """Take no more calls, and cut those that have not ended by the deadline.

        final: the program ends then, which can't be revoked.
        """
        self._final = self._final or final
        if self._draining is None:
            self._until = asyncio.get_running_loop().time() + self.seconds
            self._draining = asyncio.create_task(self._drain(), name="drain")
            self._beginning.set()

    def revoke(self) -> None:
        """Take calls again.

        Raises:
            ServerNotReady: it is final.
        """
        if self._final:
            raise ServerNotReady("A signal has told the server to end, which can't be revoked.")
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
            self._beginning.clear()

    async def beginning(self) -> None:
        """Wait until a drain begins, if none is under way."""
        await self._beginning.wait()

    async def done(self) -> None:
        """Wait until every call has ended, or was cut."""
        if self._draining is not None:
            await asyncio.wait([self._draining])

    def refusal(self) -> ServerNotReady | None:
        """Return the error for calls that come during a drain; None if there is no drain."""
        if self._draining is None:
            return None
        left = math.ceil(self._until - asyncio.get_running_loop().time())
        return ServerNotReady(
            "The server is going out of service and takes no new requests.",
            retry_after=max(1, left),
        )

    def _cut(self) -> ServerNotReady:
        return ServerNotReady(
            "The server is going out of service, and the answer was not complete within "
            f"{self.seconds:g} s (MLX_SERVER_DRAIN_SECONDS)."
        )

    async def _drain(self) -> None:
        if not await self._calls.ended(self.seconds):
            self._calls.interrupt(self._cut)

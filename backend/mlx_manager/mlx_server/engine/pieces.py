"""A pass in pieces, so that a GPU's memory need not hold all that it works on at once."""

from __future__ import annotations

from collections import deque

import mlx.core as mx


class Pieces:
    """Queues what a pass is made from, one after another, and only so many ahead of the device.

    What is queued keeps all that it works on until it has run.

    Args:
        ahead: pieces that may be queued when the next pass begins.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._queued: deque[mx.array] = deque()
        self._left: deque[mx.array] = deque()

    @property
    def unfinished(self) -> bool:
        """Whether some of it must have run before the next pass begins."""
        return len(self._queued) + len(self._left) > self._ahead

    def add(self, piece: mx.array) -> None:
        """The next piece. One more than may be ahead are queued at once: the device begins while
        the host is still at the others."""
        if len(self._queued) <= self._ahead:
            self._queue(piece)
        else:
            self._left.append(piece)

    def finish(self) -> None:
        """Queue those that are left, each when an earlier one has run."""
        while self.unfinished:
            mx.eval(self._queued.popleft())
            if self._left:
                self._queue(self._left.popleft())

    def _queue(self, piece: mx.array) -> None:
        mx.async_eval(piece)  # type: ignore[no-untyped-call]
        self._queued.append(piece)

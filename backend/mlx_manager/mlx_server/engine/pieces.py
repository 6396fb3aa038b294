"""A pass in pieces, so that a GPU's memory need not hold all that it works on at once."""

from __future__ import annotations

from collections import deque

import mlx.core as mx


class Pieces:
    """Queues what a pass is made from, one after another, and only so many at once.

    What is queued keeps all that it works on until it has run, and a moment longer. Half of what
    may be there may still be under way when the next pass begins, so that the device has something
    to do while the host puts that one's first together.

    Args:
        most: pieces that may be there at once, of the last pass and this one together, 3 or more;
            None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._queued: deque[mx.array] = deque()
        self._left: deque[mx.array] = deque()

    @property
    def unfinished(self) -> bool:
        """Whether some of it must have run before the next pass begins."""
        return self._most is not None and len(self._queued) + len(self._left) > self._most // 2

    def add(self, piece: mx.array) -> None:
        """The next piece. The first are queued at once: the device begins while the host is still
        at the others."""
        if self._most is None or len(self._queued) < self._most - self._most // 2:
            self._queue(piece)
        else:
            self._left.append(piece)

    def finish(self) -> None:
        """Queue those that are left, each as soon as it may be, when the last pass has run."""
        while self.unfinished:
            # Another one has just run.
            while self._left and len(self._queued) < (self._most or 0) - 1:
                self._queue(self._left.popleft())
            mx.eval(self._queued.popleft())

    def _queue(self, piece: mx.array) -> None:
        mx.async_eval(piece)  # type: ignore[no-untyped-call]
        self._queued.append(piece)

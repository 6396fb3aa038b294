"""A pass in pieces, so that a GPU's memory need not hold all that it works on at once."""

from __future__ import annotations

from collections import deque

import mlx.core as mx


class Pieces:
    """Queues what a pass is made from, one after another, and only so many at once.

    What is queued keeps all that it works on until it has run, and a moment longer. A pass is
    finished with all but one of those still under way, so that the device has something to do while
    the host puts the next one's first together.

    Args:
        most: pieces that may be there at once, of the last pass and this one together, 3 or more;
            None: all.
        before: the last pass, if it may be under way.
    """

    def __init__(self, most: int | None = None, before: Pieces | None = None) -> None:
        self._most = most
        self._before: deque[mx.array] = deque() if before is None else before._queued
        self._queued: deque[mx.array] = deque()
        self._left: deque[mx.array] = deque()

    @property
    def unfinished(self) -> bool:
        """Whether some of it has not been queued."""
        return bool(self._left)

    def add(self, piece: mx.array) -> None:
        """The next piece. The first are queued at once, as the last pass makes room for them: the
        device begins while the host is still at the others. The end of that one is not waited for:
        there is somebody to be told of it first.
        """
        if self._most is None:
            mx.async_eval(piece)  # type: ignore[no-untyped-call]
            return
        while len(self._before) > 1 and self._under_way >= self._most:
            mx.eval(self._before.popleft())
        if self._left or self._under_way >= self._most:
            self._left.append(piece)
        else:
            self._queue(piece)

    def finish(self) -> None:
        """Queue those that are left, each as soon as it may be, when the last pass has run."""
        self._before.clear()
        while self._left:
            while self._under_way >= (self._most or 0) - 1:
                # Another one has just run.
                mx.eval(self._queued.popleft())
            self._queue(self._left.popleft())

    @property
    def _under_way(self) -> int:
        return len(self._before) + len(self._queued)

    def _queue(self, piece: mx.array) -> None:
        mx.async_eval(piece)  # type: ignore[no-untyped-call]
        self._queued.append(piece)

"""Division of a pass into pieces, so that a GPU's memory need not hold all its arrays at once."""

from __future__ import annotations

from collections import deque

import mlx.core as mx


class Pieces:
    """Queue of a pass's pieces, of which only so many are under way at once.

    A queued piece keeps all the arrays that it works on until it has run, and a moment longer.
    `finish` returns with all but one of the allowed pieces still under way, so that the device is
    busy while the host puts the next pass's first piece together.

    Args:
        most: pieces that may be under way at once, of the last pass and this one together, 3 or
            more; None: all.
        before: the last pass, if it may be under way.
    """

    def __init__(self, most: int | None = None, before: Pieces | None = None) -> None:
        self._most = most
        self._before: deque[mx.array] = deque() if before is None else before._queued
        self._queued: deque[mx.array] = deque()
        self._left: deque[mx.array] = deque()

    @property
    def unfinished(self) -> bool:
        """Return whether some pieces have not been queued."""
        return bool(self._left)

    def add(self, piece: mx.array) -> None:
        """Add the next piece.

        The first pieces are queued at once, as the last pass makes room for them: the device begins
        while the host is still putting the others together. The last piece of the last pass is not
        waited for, since its result is to be delivered first.
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
        """Queue the pieces that are left, each as soon as there is room, after the last pass has
        run."""
        self._before.clear()
        while self._left:
            while self._under_way >= (self._most or 0) - 1:
                # Wait for the oldest piece: that makes room for one more.
                mx.eval(self._queued.popleft())
            self._queue(self._left.popleft())

    @property
    def _under_way(self) -> int:
        return len(self._before) + len(self._queued)

    def _queue(self, piece: mx.array) -> None:
        mx.async_eval(piece)  # type: ignore[no-untyped-call]
        self._queued.append(piece)

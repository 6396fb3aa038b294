"""Rows whose events go to the server: from the MLX thread, one message a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlx_manager.mlx_server.core import Event, Finished, Started, Taker, TextDelta, the_long_way
from mlx_manager.mlx_server.engine.stream import Delivery
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.workers.messages import Failed, News, Row


class WireRow:
    """One row of a request.

    Attributes:
        cancel: ends the row; None until it has been submitted.
    """

    def __init__(self, number: int, home: Wire) -> None:
        self.number = number
        self.home = home
        self.cancel: Callable[[], None] | None = None
        self._drawn: Callable[[], int] = int

    def shorten(self, take: Taker) -> None:
        """Do nothing: a row of a worker has no shortcut."""

    def told(self, events: list[Event]) -> Row:
        """Return what the server is told of the row."""
        if type(begun := events[0]) is Started:
            self._drawn = begun.drawn
            events = [replace(begun, drawn=int, shortcut=the_long_way), *events[1:]]
        elif len(events) == 1 and type(begun) is TextDelta and not begun.logprobs:
            return self.number, self._drawn(), begun.text
        return self.number, self._drawn(), events


class Wire:
    """The rows under way by their questions' numbers.

    send: sends a message. broken: says why nothing can be computed any more; rows that fail
    of that are told by the connection's end. sent: called after each message.
    """

    def __init__(
        self,
        send: Callable[[object], None],
        broken: Callable[[], Any],
        sent: Callable[[], object],
    ) -> None:
        self.rows: dict[int, WireRow] = {}
        self._send = send
        self._broken = broken
        self._sent = sent

    def row(self, number: int) -> WireRow:
        """Return a new row."""
        self.rows[number] = row = WireRow(number, self)
        return row

    def deliver(self, batch: list[Delivery]) -> None:
        """Send a step's events, and then its failures."""
        rows: list[Row] = []
        failed: list[Failed] = []
        for row, outcome in batch:
            if isinstance(outcome, MLXManagerError):
                failed.append(failure(row.number, outcome))
            else:
                rows.append(row.told(outcome))
            if isinstance(outcome, MLXManagerError) or type(outcome[-1]) is Finished:
                self.rows.pop(row.number, None)
        if rows:
            self._send(News(rows))
        if failed and not self._broken():
            for message in failed:
                self._send(message)
        self._sent()


def failure(number: int, error: MLXManagerError) -> Failed:
    """Return the message for an error, without tracebacks: these would not be understood there,
    and hold arrays here."""
    error.__cause__ = error.__context__ = None
    return Failed(number, error.with_traceback(None))

"""Rows whose events go to the server: from the MLX thread, one message a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_manager.mlx_server.core import Event, Finished, TextDelta
from mlx_manager.mlx_server.engine.stream import Delivery
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.workers.messages import Failed, News, RowNews


class ServedRow:
    """One row of a request.

    Attributes:
        drawn: as in `engine.stream.Sink`.
        cancel: ends the row; None until it has been submitted.
    """

    def __init__(self, number: int, home: ServedRows) -> None:
        self.number = number
        self.home = home
        self.drawn: Callable[[], int] = int
        self.cancel: Callable[[], None] | None = None


class ServedRows:
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
        self.rows: dict[int, ServedRow] = {}
        self._send = send
        self._broken = broken
        self._sent = sent

    def row(self, number: int) -> ServedRow:
        """Return a new row."""
        self.rows[number] = row = ServedRow(number, self)
        return row

    def deliver(self, batch: list[Delivery]) -> None:
        """Send a step's events, and then its failures."""
        rows: list[RowNews] = []
        failed: list[Failed] = []
        for row, outcome, tokens in batch:
            if isinstance(outcome, MLXManagerError):
                failed.append(failure(row.number, outcome))
            else:
                rows.append((row.number, tokens, told(outcome)))
            if isinstance(outcome, MLXManagerError) or type(outcome[-1]) is Finished:
                self.rows.pop(row.number, None)
        if rows:
            self._send(News(rows))
        if failed and not self._broken():
            for message in failed:
                self._send(message)
        self._sent()


def told(events: list[Event]) -> str | list[Event]:
    """Return the events as `News` has them."""
    if len(events) == 1 and type(only := events[0]) is TextDelta and not only.logprobs:
        return only.text
    return events


def failure(number: int, error: MLXManagerError) -> Failed:
    """Return the message for an error, without tracebacks: these would not be understood there,
    and hold arrays here."""
    error.__cause__ = error.__context__ = None
    return Failed(number, error.with_traceback(None))

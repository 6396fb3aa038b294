"""Time limits that a caller sets: fields of the body, or headers for any protocol."""

from __future__ import annotations

import math

from fastapi import Request

from mlx_manager.mlx_server.config import TimeLimits
from mlx_manager.mlx_server.errors import InvalidParameter, OutOfRange
from mlx_manager.mlx_server.schemas.wire import Timed

NONE = Timed()


def limits_of(request: Request, body: Timed | None) -> TimeLimits:
    """Return the shorter limit of each field and its header, in seconds.

    Raises:
        InvalidParameter: a header is no number.
        OutOfRange: a header is no length of time.
    """
    asked = body or NONE
    fields = TimeLimits(asked.queue_timeout, asked.first_token_timeout, asked.timeout)
    headers = TimeLimits(
        _seconds(request, "x-queue-timeout"),
        _seconds(request, "x-first-token-timeout"),
        _seconds(request, "x-request-timeout"),
    )
    return fields.and_also(headers)


def _seconds(request: Request, header: str) -> float | None:
    text = request.headers.get(header)
    if text is None:
        return None
    rule = f"`{header}` must be a number of seconds above 0, not {text!r}."
    try:
        seconds = float(text)
    except ValueError:
        raise InvalidParameter(rule, param=header) from None
    if not 0 < seconds < math.inf:
        raise OutOfRange(rule, param=header)
    return seconds

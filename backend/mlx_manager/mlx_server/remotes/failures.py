"""Errors of a server elsewhere as errors of this one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from mlx_manager.mlx_server.core import Conversation, GenerationRequest
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    InvalidParameter,
    InvalidRequest,
    MLXManagerError,
    OutOfMemory,
    OutOfRange,
    Overloaded,
    RateLimited,
    RemoteFailed,
    RequestCancelled,
    RequestTimedOut,
    RequestTooLarge,
    ServerNotReady,
    UnsupportedParameter,
    WrongModelKind,
)

PASSED_ON: Mapping[str, type[MLXManagerError]] = {
    error.code: error
    for error in (
        *(InvalidRequest, InvalidParameter, UnsupportedParameter, ContextLengthExceeded),
        *(WrongModelKind, RequestTooLarge, RequestCancelled, RequestTimedOut),
        *(Overloaded, RateLimited, OutOfMemory, ServerNotReady),
    )
}
"""Errors of a server of this program's that mean here what they mean there."""
ELSEWHERE = frozenset({429, 502, 503, 504})
"""Statuses of a server after which another one may answer."""
SICK = ELSEWHERE - {429}
"""Statuses that count as failures of the server."""
TOO_LONG = re.compile(
    r"maximum context length (?:is|of) (\d+)(?:.*? (\d+) (?:input )?tokens)?", re.S
)
LONGEST = 1000


class TryElsewhere(Exception):  # It is caught where another server is asked.
    """A failure after which another server may answer. error: for the caller, if none does.

    sick: whether it counts as a failure of the server.
    """

    def __init__(self, error: MLXManagerError, *, sick: bool = True) -> None:
        super().__init__(error.message)
        self.error = error
        self.sick = sick


def unreachable(place: str, error: Exception) -> TryElsewhere:
    """Return the failure of a connection that is not made, or breaks."""
    said = str(error) or type(error).__name__
    return TryElsewhere(RemoteFailed(f"{place} can't be reached, or broke off: {said[:LONGEST]}."))


def silent(place: str, seconds: float) -> TryElsewhere:
    return TryElsewhere(
        RemoteFailed(f"{place} has sent nothing for {seconds:g} s (`timeout` in the models' file).")
    )


def refused(
    status: int,
    content: bytes,
    headers: Mapping[str, str],
    place: str,
    request: GenerationRequest | None = None,
) -> MLXManagerError:
    """Return the error for an answer with a status that is not 200."""
    if 300 <= status < 400:
        return RemoteFailed(
            f"{place} redirects to another address (status {status}), which is not followed: its "
            "owner writes the right one in the models' file."
        )
    try:
        body = from_json(content)
    except ValueError:
        body = None
    return error_of(body, status, place, request, retry_after=headers.get("retry-after"))


def error_of(
    body: object,
    status: int,
    place: str,
    request: GenerationRequest | None = None,
    *,
    retry_after: str | None = None,
) -> MLXManagerError:
    """Return the error that a body tells, of a whole answer or in a stream.

    request: the request that failed, by whose fields the error is told.
    """
    message, code, param = _told(body)
    if status in (401, 403) and code != RequestCancelled.code:
        return RemoteFailed(
            f"{place} refuses the key that it is sent, or the lack of one (`key_env` in the "
            f"models' file): {message or status}"
        )
    own = _field(param, request)
    if found := TOO_LONG.search(message):
        long = ContextLengthExceeded(message, param=own or _prompt(request))
        long.context = int(found[1])
        long.tokens = int(found[2]) if found[2] else None
        return long
    wait = int(retry_after) if retry_after is not None and retry_after.isdecimal() else 1
    kind = PASSED_ON.get(code) or _by_status(status)
    if kind is InvalidParameter and status == OutOfRange.status:
        kind = OutOfRange
    if kind is None:
        return RemoteFailed(f"{place} has failed (status {status}): {message or 'it says no more'}")
    if issubclass(kind, Overloaded | ServerNotReady):
        return kind(message or f"{place} is too busy.", param=own, retry_after=wait)
    return kind(message or f"{place} refuses the request (status {status}).", param=own)


def _by_status(status: int) -> type[MLXManagerError] | None:
    return {
        400: InvalidRequest,
        413: RequestTooLarge,
        422: OutOfRange,
        429: Overloaded,
        503: ServerNotReady,
    }.get(status)


def _told(body: object) -> tuple[str, str, str | None]:
    """Return message, code and field of an error in OpenAI's shape, vLLM's or FastAPI's."""
    error: Any = body
    if isinstance(body, dict):
        error = body.get("error") or body
    if not isinstance(error, dict):
        return (error if isinstance(error, str) else "")[:LONGEST], "", None
    said = next((m for n in ("message", "detail") if isinstance(m := error.get(n), str)), "")
    code, param = error.get("code"), error.get("param")
    return said, code if isinstance(code, str) else "", param if isinstance(param, str) else None


def _field(param: str | None, request: GenerationRequest | None) -> str | None:
    """Return the field of the caller's request that a field of ours to the server stems from."""
    if param is None or request is None:
        return param
    constraint, prompt = request.constraint, request.prompt
    if constraint is not None and param.startswith(("response_format", "structured_outputs")):
        return constraint.param
    if isinstance(prompt, Conversation):
        number = re.match(r"tools\[(\d+)\]", param)
        if number and int(number[1]) < len(prompt.tools):
            tool = prompt.tools[int(number[1])]
            return tool.schema_param if ".parameters" in param else tool.param
        if param.startswith("messages"):
            return param if prompt.param == "messages" else prompt.param
    return param


def _prompt(request: GenerationRequest | None) -> str | None:
    return None if request is None else request.prompt.param

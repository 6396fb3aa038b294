"""Every failure as an answer, with the status of its class, in the shape that the caller knows.

Anthropic's under `/v1/messages`, Ollama's under `/api/`, OpenAI's everywhere else. What nobody
expected is caught in `Boundary`, one of the three places that catch every exception (the others are
the MLX thread and a worker's `workers/host.py`).
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_manager.mlx_server.api.http.paths import routed
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.errors import (
    AuthenticationFailed,
    DownloadFailed,
    InvalidParameter,
    InvalidRequest,
    MLXManagerError,
    ModelLoadFailed,
    OutOfRange,
    RequestNotReceived,
    RequestTimedOut,
    ServerNotReady,
)
from mlx_manager.mlx_server.observability.logs import current_request
from mlx_manager.mlx_server.protocols import messages, ollama
from mlx_manager.mlx_server.protocols.answer import error_body

log = logging.getLogger(__name__)

MOST_NAMED = 5
MOST_REPEATED = 40
"""Characters of a number that is out of its range; JSON's may have thousands of digits."""
ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATHS = "/api/"
RANGE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths where a value out of its range has a status of its own."""
RANGES = frozenset(
    {
        *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
        *("too_short", "too_long", "string_too_short", "string_too_long"),
        *("finite_number", "int_parsing_size"),
    }
)
"""Pydantic's kinds of errors in values that have the right type."""
ID_HEADERS = (b"x-request-id", b"request-id")
"""OpenAI's SDKs read the first, Anthropic's the second."""

RULE = re.compile("(?:Input|String|List|Dictionary|Value) (should .*)", re.DOTALL)
"""Pydantic's sentences begin with what kind of value it is; ours with the field."""

REQUEST_ID = re.compile(rb"[\w.:@/+=-]{1,128}")


def install(app: FastAPI) -> None:
    """Answer every failure of `app` in our shape, and give every request an id."""
    app.add_exception_handler(MLXManagerError, answer)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Boundary)


async def answer(request: Request, error: Exception) -> JSONResponse:
    """The answer that says what went wrong."""
    assert isinstance(error, MLXManagerError)
    # Whoever polls a server that starts is no news.
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, ServerNotReady):
        log.warning("%s %s: %s", request.method, request.url.path, error.message)
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if isinstance(error, AuthenticationFailed):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, RequestNotReceived | ServerNotReady):
        # Nothing good comes of this connection: the next may meet another server, or a ready one.
        headers["connection"] = "close"
    if isinstance(error, RequestTimedOut) or _is_for_good(error):
        # Or else OpenAI's and Anthropic's SDKs ask twice more, for three times the limit in all.
        headers["x-should-retry"] = "false"
    limits = server_of(request).settings.api
    status = status_of(type(error), routed(request.scope), limits.validation_status)
    return JSONResponse(_body(request.scope, error), status, headers)


def status_of(kind: type[MLXManagerError], path: str, out_of_range: int) -> int:
    """Return the status of a failure, which for a value out of its range depends on the path.

    OpenAI's and Anthropic's clients expect 400: some repeat a request that was answered by 422.

    out_of_range: the owner's choice for chat and completions.
    """
    if not issubclass(kind, OutOfRange):
        return kind.status
    return out_of_range if path in RANGE_PATHS else InvalidParameter.status


def _is_for_good(error: MLXManagerError) -> bool:
    return isinstance(error, ModelLoadFailed) and not isinstance(error, DownloadFailed)


async def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Where a parameter stands (query, path) is the first part of its place; it is not its name.
    errors = [found | {"loc": found["loc"][1:]} for found in error.errors()]
    return await answer(request, invalid(errors))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    match status:
        case HTTPStatus.NOT_FOUND:
            message = f"There is nothing at {request.url.path}. /docs lists what there is."
        case HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{request.url.path} does not take {request.method}."
        case _:
            message = error.detail
    code = status.phrase.lower().replace(" ", "_")
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else InvalidRequest.type
    body: dict[str, Any] = {
        "error": {"message": message, "type": kind, "param": None, "code": code}
    }
    if _is_anthropic(request.scope):
        body = messages.error_shape(status, message, request.state.request_id)
    elif _is_ollama(request.scope):
        body = {"error": message}
    return JSONResponse(body, status, error.headers)


def _is_anthropic(scope: Scope) -> bool:
    return routed(scope).startswith(ANTHROPIC_PATH)


def _is_ollama(scope: Scope) -> bool:
    return routed(scope).startswith(OLLAMA_PATHS)


def refused_head(
    error: MLXManagerError, path: str, headers: Iterable[tuple[bytes, bytes]]
) -> tuple[dict[str, Any], bytes]:
    """The body for a head that becomes no request, and its id."""
    scope: Scope = {"path": path, "headers": headers}
    request_id = _request_id(scope)
    scope["state"] = {"request_id": request_id.decode()}
    return _body(scope, error), request_id


def _body(scope: Scope, error: MLXManagerError) -> dict[str, Any]:
    if _is_anthropic(scope):
        return messages.error_body(error, scope["state"]["request_id"])
    if _is_ollama(scope):
        return ollama.error_body(error)
    return error_body(error)


def invalid(errors: Sequence[ErrorDetails | Mapping[str, Any]]) -> InvalidRequest:
    """Pydantic's findings as one error that names the fields and what they allow."""
    first = errors[0]
    if first["type"] == "model_type" and not first["loc"]:
        return InvalidRequest("The body must be a JSON object.")
    more = len(errors) - MOST_NAMED
    message = "; ".join(_sentence(error) for error in errors[:MOST_NAMED])
    if more > 0:
        message += f"; and {more} more"
    kind = OutOfRange if first["type"] in RANGES else InvalidParameter
    return kind(message + ".", param=_path(first["loc"]))


def _sentence(error: ErrorDetails | Mapping[str, Any]) -> str:
    path = _path(error["loc"])
    if error["type"] == "missing":
        return f"`{path}` is required"
    found = error.get("input")
    got = f", not {found!r}" if isinstance(found, int | float) else ""
    if len(got) > MOST_REPEATED:
        got = ""
    rule = error["msg"].rstrip(".").replace(" after validation", "")
    match = RULE.match(rule)
    return f"`{path}`: {rule}{got}" if match is None else f"`{path}` {match[1]}{got}"


def _path(location: Iterable[int | str]) -> str:
    """`messages[0].content` for ("messages", 0, "content", "<text>")."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith(("<", "[")):
            path += f".{step}"
    return path.removeprefix(".")


class Boundary:
    """The layer around `auth.Gate`: an id for every request, and an answer to what nobody expected.

    The id is the caller's `x-request-id` or a new one; it is returned, and in the log beside the
    traceback. A caller who has hung up gets no answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        current_request.set(request_id.decode())
        started: Message | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                named = [(name, request_id) for name in ID_HEADERS]
                message["headers"] = [*message.get("headers", ()), *named]
                started = message
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            log.debug("the caller hung up")
        except Exception as error:
            log.exception("%s %s failed (%s)", scope["method"], scope["path"], request_id.decode())
            failure = _unexpected(error, request_id.decode())
            if started is None:
                said = JSONResponse(_body(scope, failure), failure.status)
                await said(scope, receive, send_with_id)
            elif "stream" in scope["state"]:
                last = scope["state"]["stream"].fail(failure)
                await send({"type": "http.response.body", "body": last})


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return bytes(value)
    return b"req-" + secrets.token_hex(12).encode()


def _unexpected(error: Exception, request_id: str) -> MLXManagerError:
    return MLXManagerError(
        f"The server failed to answer ({type(error).__name__}). "
        f"Its log has the details under {request_id}."
    )

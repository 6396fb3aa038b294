"""The layer around `errors.Boundary`: every answer is counted and leaves a line in the log."""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_manager.mlx_server.observability.metrics import Metrics
from mlx_manager.mlx_server.timeline import Timeline

log = logging.getLogger(__name__)

HUNG_UP = 499
"""nginx's status for a caller who left before there was one."""

QUIET = frozenset({"/health", "/livez", "/readyz", "/metrics"})
"""Paths that supervisors and Prometheus request every few seconds; logged at level DEBUG."""


def install(app: FastAPI, metrics: Metrics) -> None:
    """Watch every answer of `app`. To be called after `errors.install`, to be outside of it."""
    app.add_middleware(AccessLog, metrics=metrics)


class AccessLog:
    """Layer that counts and logs answers.

    In the request's state, `calls` is the list of the timelines of its calls, and `send` goes past
    all layers within.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = HUNG_UP

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        calls: list[Timeline] = []
        scope.setdefault("state", {}).update(calls=calls, send=send)
        start = time.perf_counter()
        try:
            await self.app(scope, receive, send_and_see)
        finally:
            seconds = time.perf_counter() - start
            handler = template(scope)
            self._metrics.count_response(handler, scope["method"], status, seconds)
            level = logging.DEBUG if handler in QUIET and status < HUNG_UP else logging.INFO
            if log.isEnabledFor(level):
                said = facts(scope, status, seconds, calls)
                log.log(level, line(said), extra={"facts": said})


def template(scope: Scope) -> str:
    """Return the path of the route found, `/v1/responses/{response_id}` say; "" if none was."""
    return scope["route"].path_format if "route" in scope else ""


def facts(scope: Scope, status: int, seconds: float, calls: list[Timeline]) -> dict[str, Any]:
    """Return the facts that the log has of an answer: no content of the request or answer."""
    said: dict[str, Any] = {
        "request_id": scope["state"]["request_id"],
        "method": scope["method"],
        # As it came, without the query: decoded it might hold a line break.
        "path": scope["raw_path"].decode("ascii", "backslashreplace"),
        "status": status,
        "ms": round(seconds * 1e3, 1),
    }
    for call in calls:
        usage = call.usage
        said |= {
            "model": call.model,
            "protocol": call.caller.protocol,
            "key": call.caller.key,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "outcome": call.outcome,
        }
        if first := [row.first for row in call.rows if row.started is not None]:
            said["first_token_ms"] = round(min(first) * 1e3, 1)
    return said


def line(said: dict[str, Any]) -> str:
    """Return the facts as a line for a reader."""
    text = f"{said['method']} {said['path']} {said['status']} {said['ms']:g} ms"
    if "model" in said:
        text += (
            f", {said['model']}: {said['prompt_tokens']} + {said['completion_tokens']} tokens"
            f" ({said['cached_tokens']} cached), {said['outcome']}"
        )
    if said.get("key"):
        text += f", key {said['key']}"
    return text

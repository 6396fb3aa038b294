"""Which of our paths a request is for, behind whatever prefix."""

from __future__ import annotations

from starlette._utils import get_route_path
from starlette.types import Scope

WEBSOCKET_PATH = "/v1/responses"
"""Served as a WebSocket, too, where the owner wishes."""


def routed(scope: Scope) -> str:
    """The path by which the route is found: less the prefix that uvicorn's `--root-path` puts
    before each.

    By Starlette's own function: who may come in must be asked of the very path that is answered.
    """
    return get_route_path(scope)

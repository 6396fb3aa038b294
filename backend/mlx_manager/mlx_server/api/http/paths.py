"""Path of the server that a request is for, behind whatever prefix."""

from __future__ import annotations

from starlette._utils import get_route_path
from starlette.types import Scope


def routed(scope: Scope) -> str:
    """Return the path by which the route is found: without uvicorn's `--root-path` prefix.

    Uses Starlette's own function: access must be checked for the very path that is answered.
    """
    return get_route_path(scope)

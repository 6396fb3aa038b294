"""The server's owner, who may use `/v1/admin`, and pull and delete models by Ollama's API.

With MLX_SERVER_ADMIN_TOKEN set, who brings it may come from anywhere. Without, only programs on
this machine may, and only while the server listens on loopback; a page in somebody's browser is
refused, whatever name it reached us by.
"""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

from fastapi import Request

from mlx_manager.mlx_server.address import is_loopback
from mlx_manager.mlx_server.config import AccessRules
from mlx_manager.mlx_server.errors import PermissionDenied, WrongAdminToken

ADMIN_PATHS = "/v1/admin/"
"""Prefix of the owner's paths, unknown ones included: only the owner learns which exist."""

OLLAMA_OWNER_PATHS = frozenset({"/api/pull", "/api/delete"})
"""Paths of Ollama's API that change which models there are."""

FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
"""Headers of proxies: a proxy on this machine speaks for others."""


def is_owners(path: str) -> bool:
    """Return whether only the owner may ask for the path."""
    return path.startswith(ADMIN_PATHS) or path in OLLAMA_OWNER_PATHS


def check_owner(request: Request, rules: AccessRules) -> None:
    """
    Raises:
        WrongAdminToken: not the token that is set, or none.
        PermissionDenied: there is no token, and this is not a program on this machine.
    """
    if rules.admin_token is None:
        check_local(request, rules.host)
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    right = secrets.compare_digest(token.strip().encode(), rules.admin_token.encode())
    if scheme.lower() != "bearer" or not right:
        raise WrongAdminToken(
            "The admin token is needed: send it as `Authorization: Bearer TOKEN` "
            "(MLX_SERVER_ADMIN_TOKEN; API keys do not count)."
        )


def check_local(request: Request, bound: str) -> None:
    """
    Raises:
        PermissionDenied: says what to set.
    """
    headers = request.headers
    peer = request.client
    here = is_loopback(bound) and peer is not None and is_loopback(peer.host)
    if not here or any(name in headers for name in FORWARDED):
        raise PermissionDenied(
            "Without a token the admin API answers this machine alone, on a loopback address. "
            "Set MLX_SERVER_ADMIN_TOKEN."
        )
    host = headers.get("host", "")
    origin = headers.get("origin", f"http://{host}")
    site = headers.get("sec-fetch-site", "none")
    if (
        not is_loopback(name_in(host))
        or origin != f"http://{host}"
        or site not in ("none", "same-origin")
    ):
        raise PermissionDenied(
            "Without a token the admin API takes nothing from other sites' pages. "
            "Set MLX_SERVER_ADMIN_TOKEN."
        )


def name_in(host: str) -> str:
    """Return the host in a Host header, without the port; empty if it can't be parsed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""

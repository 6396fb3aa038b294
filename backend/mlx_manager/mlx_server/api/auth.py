"""Access control: the key of a request, and the key's limits for this minute.

Where there are keys, every path needs one, unknown paths included, except for the paths listed
here as open and the page's files: a path added later is closed until somebody opens it. The admin
API's paths are closed to all but the owner, who needs no key.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_manager.mlx_server.address import is_loopback
from mlx_manager.mlx_server.api.errors import ANTHROPIC_PATH, answer
from mlx_manager.mlx_server.api.http.paths import routed
from mlx_manager.mlx_server.api.owner import check_owner, is_owners
from mlx_manager.mlx_server.api.page import is_page
from mlx_manager.mlx_server.api.state import Server
from mlx_manager.mlx_server.config import AccessRules
from mlx_manager.mlx_server.errors import InvalidSettings, MLXManagerError, PermissionDenied
from mlx_manager.mlx_server.services.accounts import UNLIMITED, Account, Rate

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
"""Paths for supervisors and load balancers; they tell only whether the server is well."""

METRICS_PATH = "/metrics"


def install(app: FastAPI, server: Server) -> None:
    """Ask every request of `app` for a key. To be called before `errors.install`."""
    app.add_middleware(Gate, server=server)


def install_cors(app: FastAPI, rules: AccessRules) -> None:
    """Let pages of the listed origins read answers. To be called after `access.install`, to be
    around it."""
    if rules.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=rules.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["*"],
            max_age=3600,
        )


def check_bind(rules: AccessRules) -> None:
    """Refuse to listen where others can reach a server that asks nobody for a key.

    Raises:
        InvalidSettings: says what to set.
    """
    if rules.need_key or rules.open_access or is_loopback(rules.host):
        return
    raise InvalidSettings(
        f"Others could use this server on {rules.host} without a key. Set MLX_SERVER_API_KEY, or "
        "make named keys (mlx-manager key add NAME) and set MLX_SERVER_API_KEYS_FILE; or set "
        "MLX_SERVER_OPEN_ACCESS=true if everybody who can reach it may use it."
    )


class Gate:
    """Layer that finds the account of each request, and counts the request against it.

    The cost is some microseconds a request, and nothing for the messages of the answer.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app = app
        self._accounts = server.accounts
        self._rules = server.settings.access
        self._has_page = server.settings.ui

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        account, path = UNLIMITED, routed(scope)
        try:
            account = self._account(scope, path)
            if scope["method"] == "POST":
                account.count_request()
        except MLXManagerError as error:
            client = scope["client"] or ("a socket",)
            log.info("%s %a refused: %s", client[0], scope["path"], error.code)
            response = await answer(Request(scope), error)
            await response(scope, receive, with_rates(send, account, path))
            return
        scope["state"]["account"] = account
        await self.app(scope, receive, with_rates(send, account, path))

    def _account(self, scope: Scope, path: str) -> Account:
        if path in OPEN_PATHS:
            return UNLIMITED
        if is_owners(path):
            check_owner(Request(scope), self._rules)
            return UNLIMITED
        if path == METRICS_PATH and self._rules.open_metrics:
            return UNLIMITED
        headers = Headers(scope=scope)
        if not self._rules.need_key and not self._rules.open_access:
            check_host(headers.get("host", ""), self._rules.allowed_hosts)
        if self._has_page and is_page(scope, path):
            return UNLIMITED
        return self._accounts.find(presented(headers))


def presented(headers: Headers) -> str | None:
    """Return the key of a request: OpenAI's clients send the first header, Anthropic's both."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    return headers.get("x-api-key")


def check_host(host: str, allowed: tuple[str, ...]) -> None:
    """Refuse a request for a host name that is not the server's, against DNS rebinding.

    Without keys, a page on any site could use this server once the site's name resolves to our
    address. The browser then still sends the site's name. Addresses and names without a dot are
    nobody's site.

    Raises:
        PermissionDenied: the request is for another name.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.strip("[]").rstrip(".").lower()
    if "." not in name or name.endswith(".localhost") or name in allowed:
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise PermissionDenied(
            f"This server has no keys, and answers to its address only, not to {name!r}. Its owner "
            "allows names with MLX_SERVER_ALLOWED_HOSTS, or sets a key."
        ) from None


def check_origin(request: Request, allowed: Sequence[str]) -> None:
    """Refuse a WebSocket that another site's page opens.

    Browsers let any page open a WebSocket, and send the page's origin. Other clients send none.

    allowed: the origins whose pages may open one.

    Raises:
        PermissionDenied: the page is of another site.
    """
    origin = request.headers.get("origin")
    own = [f"{scheme}://{request.headers.get('host', '')}" for scheme in ("http", "https")]
    if origin is not None and origin not in (*own, *allowed) and "*" not in allowed:
        raise PermissionDenied(
            f"Pages of {ascii(origin)[1:-1][:128]} may not open WebSockets here. Its owner "
            "allows origins with MLX_SERVER_CORS_ORIGINS."
        )


def with_rates(send: Send, account: Account, path: str) -> Send:
    """Return `send` with the headers of the key's rate limits, if it has any."""
    if not account.rates():
        return send
    headers = anthropic_headers if path.startswith(ANTHROPIC_PATH) else openai_headers

    async def send_with_rates(message: Message) -> None:
        if message["type"] == "http.response.start":
            found = [(k.encode(), v.encode()) for rate in account.rates() for k, v in headers(rate)]
            message["headers"] = [*message.get("headers", ()), *found]
        await send(message)

    return send_with_rates


def openai_headers(rate: Rate) -> Iterator[tuple[str, str]]:
    yield f"x-ratelimit-limit-{rate.unit}", str(rate.limit)
    yield f"x-ratelimit-remaining-{rate.unit}", str(rate.left)
    yield f"x-ratelimit-reset-{rate.unit}", duration(rate.reset)


def anthropic_headers(rate: Rate) -> Iterator[tuple[str, str]]:
    full = datetime.now(UTC) + timedelta(seconds=math.ceil(rate.reset))
    yield f"anthropic-ratelimit-{rate.unit}-limit", str(rate.limit)
    yield f"anthropic-ratelimit-{rate.unit}-remaining", str(rate.left)
    yield f"anthropic-ratelimit-{rate.unit}-reset", full.strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 250ms, 12s, 6m0s."""
    if 0 < seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"

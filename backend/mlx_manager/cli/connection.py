"""Connection of a command to its server, and exit codes where the server does not do as asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_manager.cli.terminal import ExitCode, fail
from mlx_manager.mlx_server.address import is_host, url_of

if TYPE_CHECKING:
    from mlx_manager.client import ServerClient

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MLX_MANAGER_URL",
        show_envvar=False,
        metavar="URL",
        help="The server (MLX_MANAGER_URL) [http://MLX_SERVER_HOST:MLX_SERVER_PORT]",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="MLX_MANAGER_API_KEY",
        show_envvar=False,
        metavar="KEY",
        help="Key that the server asks for; better in MLX_MANAGER_API_KEY",
    ),
]
AdminToken = Annotated[
    str | None,
    typer.Option(
        "--admin-token",
        envvar="MLX_SERVER_ADMIN_TOKEN",
        show_envvar=False,
        metavar="TOKEN",
        help="The server's admin token; better in MLX_SERVER_ADMIN_TOKEN",
    ),
]


def default_url() -> str:
    """Return the URL at which `serve` listens on this machine, by the same environment."""
    host = os.environ.get("MLX_SERVER_HOST") or "127.0.0.1"
    return url_of(host, os.environ.get("MLX_SERVER_PORT") or "8000")


def address(url: str | None) -> str:
    """Return the server's URL: `url`, or `default_url`.

    End the program with exit code 2 where that is no URL; the message names its source.
    """
    from urllib.parse import urlsplit

    import httpx

    found = url or default_url()
    said = "--url (MLX_MANAGER_URL)" if url else "MLX_SERVER_HOST with MLX_SERVER_PORT"
    try:
        place = httpx.URL(found)
        _ = urlsplit(found).port
    except (ValueError, httpx.InvalidURL):
        place = httpx.URL()
    if place.scheme not in ("http", "https") or not is_host(place.raw_host.decode("ascii")):
        fail(f"{said}: {found} is no address such as http://127.0.0.1:8000.", ExitCode.USAGE)
    return found


def answers(url: str) -> bool:
    """Return whether a connection to the host and port of `url` succeeds within 2 s."""
    import socket
    from urllib.parse import urlsplit

    place = urlsplit(url)
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        with socket.create_connection((place.hostname or "", port), timeout=2):
            return True
    except (OSError, UnicodeError):
        return False


KEY_ADVICE = "Give its key with MLX_MANAGER_API_KEY or --api-key."
TOKEN_ADVICE = "Give its token with MLX_SERVER_ADMIN_TOKEN or --admin-token."


def administering(url: str | None, token: str | None) -> AbstractContextManager[ServerClient]:
    """Return a client of the server's admin API, as `connected` makes it."""
    return connected(url, token, TOKEN_ADVICE)


def client_of(url: str, key: str | None) -> ServerClient:
    """Return a client for `url`; end the program with exit code 2 if `url` or `key` is invalid."""
    from mlx_manager.client import ServerClient

    if key is not None and not (key.isascii() and key.isprintable()):
        fail(
            "The key or token has a character that none can have: a line break, say, or an accent.",
            ExitCode.USAGE,
        )
    try:
        return ServerClient(url, key)
    except (ImportError, ValueError, OSError) as error:
        fail(f"The environment's proxy or certificates can't be used: {error}", ExitCode.USAGE)


@contextmanager
def connected(
    url: str | None, key: str | None, key_advice: str = KEY_ADVICE
) -> Iterator[ServerClient]:
    """Yield a client of the server, whose errors end the program with exit code and message."""
    from mlx_manager.client import ServerLost, ServerRefused, ServerUnreachable

    client = client_of(address(url), key)
    try:
        yield client
    except ServerLost as error:
        fail(f"{error}.", ExitCode.NO_SERVER)
    except ServerUnreachable as error:
        fail(
            f"{error}. Start one with `mlx-manager serve`, or say where it is with --url.",
            ExitCode.NO_SERVER,
        )
    except ServerRefused as error:
        if error.status == HTTPStatus.UNAUTHORIZED:
            fail(f"{error.message.removesuffix('.')}. {key_advice}", exit_code(error.status))
        fail(error.message, exit_code(error.status))
    finally:
        client.close()


def exit_code(status: int) -> ExitCode:
    """Return the exit code for the HTTP status of an error."""
    match status:
        case HTTPStatus.NOT_FOUND:
            return ExitCode.NOT_FOUND
        case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN | HTTPStatus.CONFLICT:
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILED

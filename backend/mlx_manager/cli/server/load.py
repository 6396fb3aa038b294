"""`mlx-manager load`, `unload`, `unpin` and `cancel`: what a running server is told to do."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated
from urllib.parse import quote

import typer

from mlx_manager.cli.connection import AdminToken, Url, administering
from mlx_manager.cli.terminal import AsJson
from mlx_manager.mlx_server.utils.text import sized

Name = Annotated[str, typer.Argument(metavar="MODEL", help="An id that the server offers")]
Pin = Annotated[
    bool, typer.Option("--pin", help="Keep it loaded even if another model needs the memory")
]
RequestId = Annotated[str, typer.Argument(metavar="REQUEST", help="An id that `ps` shows")]


def load(
    name: Name,
    *,
    pin: Pin = False,
    url: Url = None,
    admin_token: AdminToken = None,
    as_json: AsJson = False,
) -> None:
    """Have a running server load a model.

    The model's first request then does not wait for the load.

    \b
    Example:
      mlx-manager load mlx-community/Llama-3.2-3B-Instruct-4bit --pin
    """
    with administering(url, admin_token) as client, waiting(f"loading {name}"):
        model = client.post("/v1/admin/models/load", {"model": name}, "memory")
        if pin:
            model = client.post("/v1/admin/models/pin", {"model": name, "pinned": True}, "memory")
    if as_json:
        typer.echo(json.dumps(model, indent=2))
        return
    weights = model["weights"]
    form = f", {weights['name']} ({weights['reason']})" if weights else ""
    pinned = ", pinned" if model["pinned"] else ""
    typer.echo(f"{model['id']} is loaded: {sized(sum(model['memory'].values()))}{form}{pinned}")


def unload(
    name: Name, *, url: Url = None, admin_token: AdminToken = None, as_json: AsJson = False
) -> None:
    """Have a running server free an idle model's memory.

    \b
    Example:
      mlx-manager unload mlx-community/Llama-3.2-3B-Instruct-4bit
    """
    with administering(url, admin_token) as client:
        gone = client.post("/v1/admin/models/unload", {"model": name}, "unloaded")
    if as_json:
        typer.echo(json.dumps(gone, indent=2))
    elif gone["unloaded"]:
        freed = gone["memory_before"] - gone["memory_after"]
        typer.echo(f"{gone['id']} is unloaded: {sized(freed)} are free again.")
    else:
        typer.echo(f"{gone['id']} was not loaded.")


def unpin(
    name: Name, *, url: Url = None, admin_token: AdminToken = None, as_json: AsJson = False
) -> None:
    """Let a running server unload a pinned model when it needs the memory.

    The model stays loaded until then. Until the server ends, this counts for more than the
    models' file.

    \b
    Example:
      mlx-manager unpin mlx-community/Llama-3.2-3B-Instruct-4bit
    """
    with administering(url, admin_token) as client:
        model = client.post("/v1/admin/models/pin", {"model": name, "pinned": False}, "memory")
    if as_json:
        typer.echo(json.dumps(model, indent=2))
        return
    loaded = "It stays loaded until room is needed" if model["state"] == "loaded" else "Not loaded"
    typer.echo(f"{model['id']} is no longer pinned. {loaded}.")


def cancel(
    request: RequestId,
    *,
    url: Url = None,
    admin_token: AdminToken = None,
    as_json: AsJson = False,
) -> None:
    """End a request of a running server.

    Its client gets an error that says so.

    \b
    Example:
      mlx-manager cancel chatcmpl-1f0c
    """
    name = quote(request, safe="", errors="surrogateescape")
    with administering(url, admin_token) as client:
        done = client.post(f"/v1/admin/requests/{name}/cancel", {}, "cancelled")
    if as_json:
        typer.echo(json.dumps(done, indent=2))
    else:
        typer.echo(f"{request} is cancelled.")


def waiting(text: str) -> AbstractContextManager[object]:
    """Return a context that shows `text` with a spinner, if stderr is a terminal."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)

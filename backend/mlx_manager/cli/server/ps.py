"""`mlx-manager ps`: what a running server has loaded, and what it is doing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer

from mlx_manager.cli.connection import AdminToken, Url, administering
from mlx_manager.cli.terminal import AsJson, duration, show, table
from mlx_manager.mlx_server.utils.text import sized


def ps(*, url: Url = None, admin_token: AdminToken = None, as_json: AsJson = False) -> None:
    """Show a running server's loaded models and the requests under way.

    It asks the server's admin API, which answers only programs on the same machine unless the
    server has an MLX_SERVER_ADMIN_TOKEN.

    \b
    Examples:
      mlx-manager ps
      mlx-manager ps --json | jq '.requests[] | select(.state == "waiting")'
    """
    with administering(url, admin_token) as client:
        models = client.get("/v1/admin/models", "memory")
        requests = client.get("/v1/admin/requests", "data")
    loaded = [model for model in models["data"] if model["state"] != "loadable"]
    if as_json:
        found = {
            "url": client.url,
            "memory": models["memory"],
            "models": loaded,
            "requests": requests["data"],
        }
        typer.echo(json.dumps(found, indent=2))
        return
    memory = models["memory"]
    used = memory["limit"] - memory["available"]
    typer.secho(client.url, bold=True, nl=False)
    typer.echo(f"  {sized(used)} of {sized(memory['limit'])} memory promised")
    typer.echo()
    print_models(loaded, requests["data"])
    if requests["data"]:
        typer.echo()
        print_requests(requests["data"])


def print_models(models: Sequence[dict[str, Any]], requests: Sequence[dict[str, Any]]) -> None:
    if not models:
        typer.echo("No model is loaded.")
        return
    numbers = ("memory", "running", "waiting")
    shown = table("model", "state", *numbers, "weights", "stays", right=numbers)
    for model in models:
        states = [r["state"] for r in requests if r["model"] in (model["id"], *model["aliases"])]
        shown.add_row(
            model["id"],
            model["state"],
            sized(sum(model["memory"].values())),
            str(states.count("running")),
            str(states.count("waiting")),
            model["weights"]["name"] if model["weights"] else "",
            stay(model),
        )
    show(shown)


def stay(model: dict[str, Any]) -> str:
    """Return in words how long a model without requests stays loaded."""
    if model["outdated"]:
        return "until it is idle: its settings changed"
    if model["pinned"]:
        return "pinned"
    if model["ttl_seconds"] is None:
        return "until room is needed"
    if model["idle_seconds"] is None:
        return f"{duration(model['ttl_seconds'])} after its last answer"
    return f"{duration(max(0, model['ttl_seconds'] - model['idle_seconds']))} more"


def print_requests(requests: Sequence[dict[str, Any]]) -> None:
    numbers = ("age", "prompt", "tokens")
    shown = table("request", "model", "by", "key", "state", *numbers, right=numbers)
    for request in requests:
        shown.add_row(
            request["id"],
            request["model"],
            request["protocol"],
            request["key"],
            f"{request['state']} ({request['phase']})",
            duration(request["age_seconds"]),
            f"{request['prompt_tokens']:,}",
            f"{request['tokens']:,}",
        )
    show(shown)

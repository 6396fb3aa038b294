"""`mlx-manager ps`: what a running server has loaded, and what it is doing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from mlx_manager.cli.connection import AdminToken, Url, administering
from mlx_manager.cli.terminal import (
    AsJson,
    ExitCode,
    duration,
    escapes_are_known,
    show,
    table,
)
from mlx_manager.mlx_server.utils.text import sized

Watch = Annotated[
    bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C")
]
Why = Annotated[
    bool, typer.Option("--why", help="Show recent calls, and why their prefixes missed")
]
CLEAR = "\x1b[H\x1b[2J"


def ps(
    *,
    watch: Watch = False,
    why: Why = False,
    url: Url = None,
    admin_token: AdminToken = None,
    as_json: AsJson = False,
) -> None:
    """Show a running server's loaded models and the requests under way.

    It asks the server's admin API, which answers only programs on the same machine unless the
    server has an MLX_SERVER_ADMIN_TOKEN.

    \b
    Examples:
      mlx-manager ps
      mlx-manager ps --watch
      mlx-manager ps --why
      mlx-manager ps --json | jq '.requests[] | select(.state == "waiting")'
    """
    with administering(url, admin_token) as client:
        if not watch:
            print_state(client.url, client.get("/v1/admin/state", "calls"), why, as_json)
            return
        calls: list[dict[str, Any]] = []
        try:
            for state in client.states(1.0):
                calls = state["calls"] = [*calls, *state["calls"]][-MOST_CALLS:]
                if not as_json:
                    # In a file or a pipe each state follows the one before.
                    typer.echo(CLEAR if escapes_are_known() else "", nl=False)
                print_state(client.url, state, why, as_json)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None


MOST_CALLS = 200
SHOWN_CALLS = 20


def print_state(url: str, state: dict[str, Any], why: bool, as_json: bool) -> None:
    loaded = [model for model in state["models"] if model["state"] != "loadable"]
    memory, requests = state["memory"], state["requests"]
    if as_json:
        found = {"url": url, "memory": memory, "models": loaded, "requests": requests}
        typer.echo(json.dumps(found | ({"calls": state["calls"]} if why else {}), indent=2))
        return
    used = memory["limit"] - memory["available"]
    typer.secho(url, bold=True, nl=False)
    typer.echo(f"  {sized(used)} of {sized(memory['limit'])} memory promised")
    typer.echo()
    print_models(loaded, requests)
    if requests:
        typer.echo()
        print_requests(requests)
    if why:
        typer.echo()
        print_calls(state["calls"])


def print_models(models: Sequence[dict[str, Any]], requests: Sequence[dict[str, Any]]) -> None:
    """Print the loaded models. accepted: of the tokens that were tried ahead, those drawn. There is
    a column of draft models, and MTP heads, if there are any."""
    if not models:
        typer.echo("No model is loaded.")
        return
    numbers = ("memory", "devices", "running", "waiting", "accepted", "KV a token")
    drafting = ("draft model",) if any(map(drafts, models)) else ()
    shown = table("model", "state", *numbers, *drafting, "weights", "stays", right=numbers)
    for model in models:
        states = [r["state"] for r in requests if r["model"] in (model["id"], *model["aliases"])]
        shown.add_row(
            model["id"],
            model["state"],
            sized(sum(model["memory"].values())),
            "" if model["devices"] is None else str(model["devices"]),
            str(states.count("running")),
            str(states.count("waiting")),
            "" if model["acceptance"] is None else f"{model['acceptance']:.0%}",
            kept(model),
            *(drafts(model) for _ in drafting),
            model["weights"]["name"] if model["weights"] else "",
            stay(model),
        )
    show(shown)


def drafts(model: dict[str, Any]) -> str:
    """Return the name of what drafts for a model: another model, or an MTP head."""
    own, head = model["draft_model"], model["mtp"]
    if head is not None:
        return "its MTP head" if head == model["id"] else f"{head} (MTP)"
    return own or ""


def kept(model: dict[str, Any]) -> str:
    """Return the bytes of one token's keys and values, and the format of their numbers."""
    size, form = model["kv_token_bytes"], model["kv_format"]
    return "" if size is None else f"{sized(size)} {form}"


def stay(model: dict[str, Any]) -> str:
    """Return in words how long a model without requests stays loaded."""
    if model.get("servers"):
        return "on another machine"
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


def print_calls(calls: Sequence[dict[str, Any]]) -> None:
    if not calls:
        typer.echo("No call has ended since the server started.")
        return
    numbers = ("prompt", "kept", "tokens", "first", "whole")
    shown = table("ended", "model", "key", *numbers, "outcome", "why", right=numbers)
    for call in reversed(calls[-SHOWN_CALLS:]):
        missed = f"at token {call['cached_tokens']:,}: {call['missed']}" if call["missed"] else ""
        shown.add_row(
            f"{datetime.fromtimestamp(call['ended']):%H:%M:%S}",
            call["model"],
            call["key"],
            f"{call['prompt_tokens']:,}",
            f"{call['cached_tokens']:,}",
            f"{call['tokens']:,}",
            "" if call["first"] is None else f"{call['first']:.2f} s",
            f"{call['seconds']:.2f} s",
            call["outcome"],
            missed,
        )
    show(shown)

"""`mlx-manager list`: the models that can be served."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.connection import ApiKey, connected
from mlx_manager.cli.settings import parse_settings, takes_settings
from mlx_manager.cli.terminal import AsJson, ExitCode, complain, fail, show, table
from mlx_manager.mlx_server.utils.text import sized

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.catalog import ModelSource


Running = Annotated[
    str | None,
    typer.Option(
        "--url", show_envvar=False, metavar="URL", help="List those of the server at this address"
    ),
]


@takes_settings("model", "available_models", "models_file", "models_dir", "hf_cache")
def list_models(
    *,
    given: dict[str, Any],
    url: Running = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List the models that serve would offer, or those of a running server and where they are.

    \b
    Examples:
      mlx-manager list --models-dir ~/models --json
      mlx-manager list --url http://127.0.0.1:8000
    """
    if url is not None:
        with connected(url, api_key) as client:
            cards = client.models()
        print_cards(cards, as_json)
        return
    settings = parse_settings(given)
    from mlx_manager.mlx_server.config import doubts
    from mlx_manager.mlx_server.errors import InvalidSettings
    from mlx_manager.mlx_server.models.catalog import Catalog, check_models_dir
    from mlx_manager.mlx_server.models.settings import read_models_file

    try:
        check_models_dir(settings.models_dir)
        owners = read_models_file(settings.models_file)
    except InvalidSettings as error:
        fail(error.message, ExitCode.USAGE)
    for doubt in doubts(settings, os.environ):
        complain(doubt)
    models = Catalog(settings.catalog, owners).models()
    if as_json:
        found = [asdict(model) | {"path": model.path and str(model.path)} for model in models]
        typer.echo(json.dumps(found, indent=2))
    else:
        print_models(models)


def print_cards(cards: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print the models of a running server, as its `/v1/models` has them."""
    if as_json:
        typer.echo(json.dumps(cards, indent=2))
        return
    shown = table("model", "state", "family", "context", "size", "where", right=("context", "size"))
    for card in cards:
        context, nbytes = card.get("context_length") or 0, card.get("bytes") or 0
        servers = card.get("servers") or ()
        places = ", ".join(f"{server['url']} ({server['health']})" for server in servers)
        shown.add_row(
            card["id"],
            card.get("state") or "",
            card.get("family") or "",
            f"{context:,}" if context else "",
            sized(nbytes) if nbytes else "",
            places or card.get("origin") or "",
        )
    show(shown)


def print_models(models: Sequence[ModelSource]) -> None:
    shown = table("model", "family", "context", "size", "from", right=("context", "size"))
    for model in models:
        context = f"{model.context_length:,}" if model.context_length else ""
        here = model.origin if model.path else f"{model.origin}, not downloaded"
        origin = ", ".join(model.urls) or here
        nbytes = sized(model.nbytes) if model.nbytes else ""
        shown.add_row(model.id, model.family if model.path else "", context, nbytes, origin)
    show(shown)

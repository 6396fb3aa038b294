"""`mlx-manager list`: the models that can be served."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from mlx_manager.cli.settings import parse_settings, takes_settings
from mlx_manager.cli.terminal import AsJson, ExitCode, complain, fail, show, table
from mlx_manager.mlx_server.utils.text import sized

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.catalog import ModelSource


@takes_settings("model", "available_models", "models_file", "models_dir", "hf_cache")
def list_models(*, given: dict[str, Any], as_json: AsJson = False) -> None:
    """List the models that serve would offer.

    \b
    Example:
      mlx-manager list --models-dir ~/models --json
    """
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


def print_models(models: Sequence[ModelSource]) -> None:
    shown = table("model", "family", "context", "size", "from", right=("context", "size"))
    for model in models:
        context = f"{model.context_length:,}" if model.context_length else ""
        origin = model.origin if model.path else f"{model.origin}, not downloaded"
        nbytes = sized(model.nbytes) if model.nbytes else ""
        shown.add_row(model.id, model.family if model.path else "", context, nbytes, origin)
    show(shown)

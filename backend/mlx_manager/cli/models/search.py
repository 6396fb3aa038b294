"""`mlx-manager search`: models on the Hugging Face hub, by words of their names."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from mlx_manager.cli.settings import check_hub_address
from mlx_manager.cli.terminal import AsJson, ExitCode, fail, note, show, table

Words = Annotated[list[str], typer.Argument(metavar="WORDS...", help="Words of the model's name")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100, help="Most models to list")]


def search(words: Words, *, limit: Limit = 20, as_json: AsJson = False) -> None:
    """Search the Hugging Face hub for models, the most downloaded first.

    "pull --dry-run" tells of one of them whether it fits this machine.

    \b
    Examples:
      mlx-manager search llama 3b 4bit
      mlx-manager search mlx-community qwen3 --json
    """
    check_hub_address()
    from mlx_manager.mlx_server.errors import MLXManagerError
    from mlx_manager.mlx_server.models import hub

    try:
        found = hub.search(" ".join(words), limit)
    except MLXManagerError as error:
        fail(error.message)
    if as_json:
        typer.echo(json.dumps([asdict(model) for model in found], indent=2))
        return
    if not found:
        fail("The hub has no model with these words in its name.", ExitCode.NOT_FOUND)
    shown = table("model", "downloads", "licence", "gated", "updated", right=("downloads",))
    for model in found:
        gated = "gated" if model.gated else ""
        shown.add_row(model.id, f"{model.downloads:,}", model.licence, gated, model.updated)
    show(shown)
    note(f"Does it fit? mlx-manager pull --dry-run {found[0].id}")

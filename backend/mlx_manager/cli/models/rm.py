"""`mlx-manager rm`: delete a model's files."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.connection import KEY_ADVICE, ApiKey, Url, address, answers, client_of
from mlx_manager.cli.settings import parse_settings, takes_settings
from mlx_manager.cli.terminal import AsJson, ExitCode, fail
from mlx_manager.mlx_server.utils.text import sized

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.removal import Removal

Name = Annotated[str, typer.Argument(metavar="MODEL", help="As `mlx-manager list` shows it")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]


@takes_settings("models_dir")
def rm(
    name: Name,
    *,
    yes: Yes = False,
    given: dict[str, Any],
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Delete a model from the Hugging Face cache or from --models-dir.

    It deletes nothing elsewhere, and no model that a running server has loaded.

    \b
    Examples:
      mlx-manager rm mlx-community/Llama-3.2-3B-Instruct-4bit
      mlx-manager rm --models-dir ~/models mine --yes
    """
    found = plan(name, given)
    refuse_if_loaded(found, address(url), api_key)
    if not yes:
        confirm(found)
    try:
        found.carry_out()
    except OSError as error:
        fail(f"{error.filename} can't be deleted: {error.strerror}.")
    if as_json:
        folders = [str(folder) for folder in found.folders]
        typer.echo(
            json.dumps({"id": found.id, "folders": folders, "bytes": found.nbytes}, indent=2)
        )
    else:
        typer.echo(f"{found.id} is deleted: {sized(found.nbytes)} are free again.")


def plan(name: str, given: dict[str, Any]) -> Removal:
    from mlx_manager.mlx_server.errors import InvalidRequest, ModelNotFound
    from mlx_manager.mlx_server.models.hub import cache_folder
    from mlx_manager.mlx_server.models.removal import plan_removal

    settings = parse_settings(given)
    try:
        return plan_removal(name, settings.models_dir, cache_folder())
    except ModelNotFound as error:
        fail(error.message, ExitCode.NOT_FOUND)
    except InvalidRequest as error:
        fail(error.message, ExitCode.REFUSED)


def refuse_if_loaded(found: Removal, url: str, key: str | None) -> None:
    """End the program if the server at `url` has the model loaded.

    A server elsewhere has other files. A server of another kind does not tell what is loaded.
    """
    if not answers(url):
        return
    from mlx_manager.client import ServerRefused, ServerUnreachable

    client = client_of(url, key)
    try:
        models = client.models()
    except (ServerRefused, ServerUnreachable) as error:
        fail(
            f"A server runs at {url} and does not say what it has loaded: "
            f"{str(error).removesuffix('.')}. {KEY_ADVICE} Or stop it.",
            ExitCode.REFUSED,
        )
    finally:
        client.close()
    for model in models:
        name = model["id"]
        there = model.get("state") in {"loaded", "loading"}
        if there and any(is_of(found, of) for of in (name, str(model.get("root")))):
            files = "" if name == found.id else f", from the files of {found.id}"
            unload = f"mlx-manager unload {shlex.quote(name)}"
            fail(
                f"The server at {url} has {name} loaded{files}: `{unload}` first.",
                ExitCode.REFUSED,
            )


def is_of(found: Removal, name: str) -> bool:
    """Return whether `name`, a model's id or folder, is among the files to be deleted."""
    if name == found.id:
        return True
    real = Path(name).resolve()
    return Path(name).is_absolute() and any(real.is_relative_to(f.resolve()) for f in found.folders)


def confirm(found: Removal) -> None:
    typer.echo(f"{found.id}, {sized(found.nbytes)}, in {found.folders[0]}", err=True)
    if not sys.stdin.isatty():
        fail("Nobody can be asked here; say --yes to delete it.", ExitCode.USAGE)
    try:
        sure = typer.confirm("Delete it?", err=True)
    except typer.Abort as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        typer.echo(err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if not sure:
        raise typer.Exit(ExitCode.FAILED)

"""`mlx-manager cache`: list and remove the prompts that are kept on disk for reuse."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.settings import parse_settings, takes_settings
from mlx_manager.cli.terminal import AsJson, ExitCode, duration, fail, note, show, table
from mlx_manager.mlx_server.utils.text import sized

if TYPE_CHECKING:
    from mlx_manager.mlx_server.engine.disk.folder import Folder, KeptPrefixes

cache = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List and remove the prompts that are kept on disk for reuse.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@cache.command("list")
@takes_settings("prefix_disk_dir", "prefix_disk_gb")
def list_kept(*, given: dict[str, Any], as_json: AsJson = False) -> None:
    """List what is kept of each model, and what the next write would remove.

    A model has a line for each form in which it was served: its revision, adapter, page size.

    \b
    Example:
      mlx-manager cache list --prefix-disk-gb 20
    """
    folder, limited = folder_of(given)
    kept = folder.kept()
    files, nbytes = folder.excess() if limited else (0, 0)
    if as_json:
        found = {
            "folder": str(folder.root),
            "bytes": folder.nbytes,
            "limit": folder.limits.budget if limited else None,
            "kept": [described(of) for of in kept],
            "excess": {"files": files, "bytes": nbytes},
        }
        typer.echo(json.dumps(found, indent=2))
        return
    print_kept(kept)
    limit = f" of {sized(folder.limits.budget)}" if limited else ""
    note(f"{sized(folder.nbytes)}{limit} in {folder.root}")
    if files:
        note(f"The next write removes the {files} files used least recently, {sized(nbytes)}.")


@cache.command("purge")
@takes_settings("prefix_disk_dir")
def purge(
    *,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Only what is kept of this model")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed")] = False,
    given: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Remove what is kept, of one model or of all. A server that runs computes it again.

    \b
    Examples:
      mlx-manager cache purge --dry-run
      mlx-manager cache purge --model mlx-community/Llama-3.2-3B-Instruct-4bit
    """
    folder, _ = folder_of(given)
    kept = [of for of in folder.kept() if model in {None, of.model}]
    if model is not None and not kept:
        fail(f"Nothing is kept of {model!r} in {folder.root}.", ExitCode.NOT_FOUND)
    if not dry_run and kept:
        try:
            folder.purge(model)
        except OSError as error:
            fail(f"{error.filename} can't be removed: {error.strerror}.")
    if as_json:
        found = {"dry_run": dry_run, "removed": [described(of) for of in kept]}
        typer.echo(json.dumps(found, indent=2))
        return
    if dry_run:
        print_kept(kept)
    nbytes = sized(sum(of.nbytes for of in kept))
    typer.echo(f"{nbytes} would be removed." if dry_run else f"{nbytes} are free again.")


def folder_of(given: dict[str, Any]) -> tuple[Folder, bool]:
    """Return the folder, looked at, and whether the settings give it a limit."""
    settings = parse_settings(given)
    from mlx_manager.mlx_server.config import PrefixDisk
    from mlx_manager.mlx_server.engine.disk.folder import Folder

    limits = settings.prefix_disk or PrefixDisk(settings.prefix_folder, sys.maxsize)
    folder = Folder(limits)
    if folder.root.exists():
        try:
            folder.look()
        except OSError as error:
            fail(f"{error.filename} can't be read: {error.strerror}.")
    return folder, settings.prefix_disk is not None


def described(kept: KeptPrefixes) -> dict[str, Any]:
    return {
        "model": kept.model,
        "folder": kept.folder,
        "files": kept.files,
        "bytes": kept.nbytes,
        "used": kept.used,
    }


def print_kept(kept: list[KeptPrefixes]) -> None:
    shown = table("model", "files", "size", "used", "folder", right=("files", "size"))
    for of in kept:
        ago = f"{duration(max(0.0, time.time() - of.used))} ago" if of.files else ""
        shown.add_row(of.model, f"{of.files:,}", sized(of.nbytes), ago, of.folder)
    show(shown)

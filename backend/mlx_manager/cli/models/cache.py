"""`mlx-manager cache`: list, move and remove the prompts that are kept on disk for reuse."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.settings import parse_settings, takes_settings
from mlx_manager.cli.terminal import (
    AsJson,
    ExitCode,
    complain,
    duration,
    fail,
    note,
    require_place,
    show,
    table,
)
from mlx_manager.mlx_server.utils.text import sized
from mlx_manager.printable import on_one_line

if TYPE_CHECKING:
    from mlx_manager.mlx_server.config import MLXServerSettings
    from mlx_manager.mlx_server.engine.disk.archive import Archive, Moved
    from mlx_manager.mlx_server.engine.disk.folder import Folder, KeptPrefixes
    from mlx_manager.mlx_server.engine.disk.names import Space

cache = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, move and remove the prompts that are kept on disk for reuse.",
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


@cache.command("export")
@takes_settings("prefix_disk_dir")
def export_kept(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, a tar")],
    *,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="What is kept of this model, in all its forms")
    ],
    given: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Write what is kept of a model as one file, for another machine that serves the same model.

    That machine must have a device of the same name and the same versions of mlx, mlx-lm and this
    program. What prompts say can be worked out from the file: keep it as you would keep them.

    \b
    Example:
      mlx-manager cache export --model mlx-community/Llama-3.2-3B-Instruct-4bit kept.tar
    """
    require_place(file)
    folder, _ = folder_of(given)
    if not any(of.model == model for of in folder.kept()):
        fail(f"Nothing is kept of {model!r} in {folder.root}.", ExitCode.NOT_FOUND)
    from mlx_manager.mlx_server.engine.disk.archive import export
    from mlx_manager.mlx_server.utils.revisions import writing_whole

    try:
        with writing_whole(file) as writing:
            moved = export(folder, model, writing)
            if not moved.blocks:
                fail(f"Nothing that is whole is kept of {model!r} in {folder.root}.")
    except OSError as error:
        fail(f"{file} can't be written: {error}.")
    report(moved, f"{sum_of(moved)} of {model}: {file}", model, as_json)


@cache.command("import")
@takes_settings(
    *("prefix_disk_dir", "prefix_disk_gb", "prefix_write_gb_per_day", "models_dir", "models_file")
)
def import_kept(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="As `cache export` wrote it")],
    *,
    given: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Take in a file that `cache export` wrote on another machine, within the limits here.

    Each block is checked; what is here already stays. The file is refused if it was made on another
    device, by other versions of mlx, mlx-lm or this program, or of other files of the model than
    are here. Take files only from those whom you would let answer for the model.

    \b
    Example:
      mlx-manager cache import kept.tar --prefix-disk-gb 20
    """
    settings = parse_settings(given)
    folder, _ = folder_of(given)
    from mlx_manager.mlx_server.engine.disk.archive import Archive, ArchiveRefused

    if not file.is_file():
        fail(f"{file} is no file.", ExitCode.NOT_FOUND)
    try:
        with file.open("rb") as reading:
            archive = Archive.read(reading)
            used = usable(file, archive, settings)
            folder.look()
            moved = archive.move_into(folder, lambda space: space in used)
    except ArchiveRefused as error:
        fail(f"{file} is refused: {error}.", ExitCode.REFUSED)
    except OSError as error:
        fail(f"{file} can't be taken in: {error}.")
    done = f"{sum_of(moved)} of {archive.model} came into {folder.root}"
    report(moved, done, archive.model, as_json)


def usable(file: Path, archive: Archive, settings: MLXServerSettings) -> list[Space]:
    """Return the forms in an archive that a server on this machine could use, and end the program
    if there are none."""
    from mlx_manager.cli.server.serve import require_mlx

    require_mlx()
    from mlx_manager.mlx_server.engine.disk.machine import difference

    revision = revision_here(archive.model, settings)
    found, reasons = [], []
    for space in archive.spaces:
        why = difference(space.facts)
        if why is None and revision is not None and space.facts.get("revision") != revision:
            why = "they were computed by other files than this machine has of the model"
        if why is None:
            found.append(space)
        elif why not in reasons:
            reasons.append(why)
    named = f"the blocks in {file} of {archive.model}"
    if not found:
        said = "; ".join(reasons) or "there are none"
        fail(f"Of no use here are {named}: {said}.", ExitCode.REFUSED)
    for why in reasons:
        note(f"Some of {named} are left out: {why}.")
    if revision is None:
        note(f"{archive.model} is not among the models here. It must be served by this name, and ")
        note("from the same files, for the blocks to be found.")
    return found


def revision_here(model: str, settings: MLXServerSettings) -> str | None:
    """Return the revision of the files that this machine has of a model; None if it has none."""
    from mlx_manager.mlx_server.engine.disk.threads import MEMORY
    from mlx_manager.mlx_server.errors import MLXManagerError, ModelNotFound
    from mlx_manager.mlx_server.models.catalog import Catalog
    from mlx_manager.mlx_server.models.settings import read_models_file
    from mlx_manager.mlx_server.utils.revisions import revision_of, stamps_of

    try:
        owners = read_models_file(settings.models_file)
        path = Catalog(settings.catalog, owners).find(model).path
    except ModelNotFound:
        return None
    except MLXManagerError as error:
        fail(error.message, ExitCode.USAGE)
    if path is None:
        return None
    stamps = stamps_of(filter(None, (path, owners.of(model).recipe.adapter)))
    return revision_of(stamps, settings.prefix_folder / MEMORY)


def blocks_in(count: int) -> str:
    return f"{count:,} block{'' if count == 1 else 's'}"


def sum_of(moved: Moved) -> str:
    return f"{blocks_in(moved.blocks)} ({sized(moved.nbytes)})"


def report(moved: Moved, done: str, model: str, as_json: bool) -> None:
    """Print the account of an export or import; the program fails where blocks were damaged or
    writing was stopped."""
    if as_json:
        typer.echo(json.dumps({"model": model, **asdict(moved)}, indent=2))
    else:
        typer.echo(on_one_line(done))
    if moved.there:
        note(f"Here already: {blocks_in(moved.there)}.")
    if moved.gone:
        note(f"Removed meanwhile: {blocks_in(moved.gone)}.")
    if moved.unfit:
        why = moved.stopped or "the limit, the disk or the day's writes leave no room"
        complain(f"Left out: {blocks_in(moved.unfit)}, as {why}.")
    if moved.damaged:
        complain(f"Damaged, and left out: {blocks_in(moved.damaged)}.")
    if moved.damaged or moved.stopped:
        raise typer.Exit(ExitCode.FAILED)


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

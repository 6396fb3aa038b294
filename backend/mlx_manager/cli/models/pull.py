"""`mlx-manager pull`: a model from the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import typer

from mlx_manager.cli.models.plan import memory_limit, sentence
from mlx_manager.cli.settings import check_hub_address
from mlx_manager.cli.terminal import AsJson, ExitCode, fail, note
from mlx_manager.mlx_server.utils.text import sized
from mlx_manager.printable import is_dumb

if TYPE_CHECKING:
    from rich.console import Console

    from mlx_manager.mlx_server.config import MLXServerSettings
    from mlx_manager.mlx_server.errors import MLXManagerError
    from mlx_manager.mlx_server.models.hub import Report, Repository
    from mlx_manager.mlx_server.models.plan import MemoryPlan

Name = Annotated[
    str,
    typer.Argument(metavar="OWNER/NAME", help="A repository of huggingface.co, or its address"),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Show the model's size and licence, and whether it fits; download nothing"
    ),
]
Anyway = Annotated[
    bool, typer.Option("--anyway", help="Download also a model that can't be served")
]


def pull(
    name: Name, *, dry_run: DryRun = False, anyway: Anyway = False, as_json: AsJson = False
) -> None:
    """Download a model from the Hugging Face hub.

    The model is stored in the hub's cache (HF_HOME), where `serve` and other programs find it.
    Files that are there already are not downloaded again, and a download that was interrupted
    continues. HF_ENDPOINT names another hub; HF_TOKEN is your token for gated models.

    \b
    Examples:
      mlx-manager pull mlx-community/Llama-3.2-3B-Instruct-4bit
      mlx-manager pull --dry-run mlx-community/Qwen3-8B-4bit
      mlx-manager pull https://huggingface.co/mlx-community/Qwen3-8B-4bit/tree/main
    """
    check_hub_address()
    name = repository_named(name)
    from mlx_manager.mlx_server.errors import MLXManagerError
    from mlx_manager.mlx_server.models import hub

    try:
        found = hub.look_up(name)
        missing = found.missing(hub.cache_folder())
        if not as_json:
            describe(found, missing, hub.free_bytes(hub.cache_folder()))
        check_architecture(found, anyway)
        plan = plan_for(found) if dry_run else None
        if plan is not None and not as_json:
            note(sentence(plan))
        folder = None if dry_run else download(found)
    except MLXManagerError as error:
        fail(error.message, exit_code(error))
    if as_json:
        typer.echo(json.dumps(document(found, missing, folder) | planned(plan), indent=2))
    elif folder is not None:
        typer.echo(folder)
        note(advice(found, folder))


def advice(found: Repository, folder: Path) -> str:
    """Return what to do with a model that has been downloaded, its MTP head considered."""
    from mlx_manager.mlx_server.errors import ModelLoadFailed
    from mlx_manager.mlx_server.models.architectures import architecture
    from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
    from mlx_manager.mlx_server.models.checkpoint.mtp import head_of, is_head
    from mlx_manager.mlx_server.models.families import mtp_facts

    if is_head(found.model_type):
        return f'It is an MTP head: name it in its model\'s table, mtp = "{found.id}".'
    said = f"Try it: mlx-manager chat --model {found.id}"
    kind = architecture(found.model_type) or ""
    if mtp_facts(kind) is None:
        return said
    try:
        has = head_of(ModelFolder.read(folder), kind) is not None
    except ModelLoadFailed:
        has = False
    if has:
        return f"{said}\nIts MTP head is there, and can guess tokens ahead."
    words = found.id.rpartition("/")[2].rsplit("-", 1)[0]
    return (
        f"{said}\nIts MTP head was left out. A repository may have it: "
        f'mlx-manager search "{words} MTP", and mtp = "OWNER/NAME" in the model\'s table.'
    )


HUBS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
NO_MODELS = frozenset({"datasets", "spaces", "collections", "papers", "docs", "blog", "buckets"})
"""First segments of the hub's paths that are no model's."""
OF_A_REVISION = frozenset({"tree", "blob", "raw", "resolve", "commit", "commits", "blame"})
"""Segments between a repository and a revision in the addresses of the repository's pages."""


def repository_named(text: str) -> str:
    """Return OWNER/NAME of what was given: that itself, or the address of one of its pages.

    Ends the program with exit code 2 where the address is another host's, or no model's.
    """
    given = text.strip().strip("<>\"'")
    scheme, colon, rest = given.partition("://")
    if not colon:
        scheme, rest = "https", given
    host, _, path = rest.partition("/")
    own = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.lower()
    if not colon and host.lower() not in HUBS | {own}:
        return given
    if scheme.lower() not in ("http", "https") or host.lower() not in HUBS | {own}:
        hubs = f"huggingface.co, hf.co{f', {own} (HF_ENDPOINT)' if own else ''}"
        fail(
            f"{given}: models are pulled from {hubs}, and not from {host or scheme}.",
            ExitCode.USAGE,
        )
    parts = [unquote(part) for part in re.split(r"[?#]", path)[0].split("/") if part]
    if parts and parts[0] in NO_MODELS:
        fail(f"{given} is no model: its path begins with {parts[0]}/.", ExitCode.USAGE)
    if len(parts) < 2:
        fail(f"{given} names no model; a model's address has OWNER/NAME.", ExitCode.USAGE)
    owner, name, *page = parts
    if len(page) >= 2 and page[0] in OF_A_REVISION and page[1] != "main":
        fail(
            f"{given} is of revision {page[1]}; pull takes a model's main revision alone: "
            f"mlx-manager pull {owner}/{name}",
            ExitCode.USAGE,
        )
    return f"{owner}/{name.removesuffix('.git')}"


def fetch_default(settings: MLXServerSettings) -> None:
    """Download the default model if it is not here yet, as a person may want to see it done.

    Raises:
        MLXManagerError: it can't be had, or the owner's file of models can't be read.
    """
    from mlx_manager.mlx_server.models import hub
    from mlx_manager.mlx_server.models.catalog import Catalog
    from mlx_manager.mlx_server.models.settings import read_models_file

    source = Catalog(settings.catalog, read_models_file(settings.models_file)).find(settings.model)
    if source.path is None and not source.urls:
        found = hub.look_up(source.id)
        cache = hub.cache_folder()
        describe(found, found.missing(cache), hub.free_bytes(cache))
        check_architecture(found, anyway=False)
        download(found)


def describe(found: Repository, missing: int, free: int) -> None:
    terms = f", licence {found.licence}" if found.licence else ", no licence named"
    gate = ", gated: its terms must be accepted on its page" if found.gated else ""
    note(f"{found.id}: {len(found.files)} files, {sized(found.nbytes)}{terms}{gate}")
    if missing == 0:
        note("All of it is here already.")
    elif missing < found.nbytes:
        note(f"{sized(found.nbytes - missing)} are here already, {sized(missing)} are to come.")
    if missing:
        note(f"{sized(free)} are free.")


def check_architecture(found: Repository, anyway: bool) -> None:
    from mlx_manager.mlx_server.models.architectures import ENCODERS, has_architecture
    from mlx_manager.mlx_server.models.checkpoint.mtp import is_head

    kind = found.model_type
    known = kind in ENCODERS or has_architecture(kind) or is_head(kind)
    if found.model_type and not known and not anyway:
        fail(
            f"mlx-lm has no architecture {found.model_type!r}, so {found.id} can't be served. "
            "Download it all the same with --anyway.",
            ExitCode.REFUSED,
        )


def download(found: Repository) -> Path:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from mlx_manager.mlx_server.models.hub import fetch_files

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with client_notes(console), bar as progress:
            task = progress.add_task("", total=found.nbytes)

            def report(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            with interruptible(report) as watched:
                return fetch_files(found, watched)
    except Interrupted:
        fail(INTERRUPTED, ExitCode.INTERRUPTED)


SHOW_CURSOR = "\x1b[?25h"
INTERRUPTED = "Interrupted; pull again to go on. Whole files stay."


class Interrupted(Exception):
    """Ctrl-C, as the threads that download are told of it."""


def escapes_are_known() -> bool:
    return sys.stderr.isatty() and not is_dumb()


@contextmanager
def interruptible(report: Report) -> Iterator[Report]:
    """A report that ends the download after Ctrl-C. The client itself would first finish all
    files that have begun. It reports when something comes; who does not wait for that presses
    again.
    """
    pressed = False

    def press(signum: int, frame: object) -> None:
        nonlocal pressed
        # Past Python's buffer, which another line may be on its way through.
        cursor, begin = (SHOW_CURSOR, "\r\n") if escapes_are_known() else ("", "")
        if pressed:
            os.write(2, f"{cursor}{begin}mlx-manager: {INTERRUPTED}\n".encode())
            os._exit(ExitCode.INTERRUPTED)
        pressed = True
        os.write(2, f"{begin}Stopping ... (Ctrl-C once more: at once)\n".encode())

    def watched(done: int, total: int) -> None:
        if pressed:
            raise Interrupted
        report(done, total)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield watched
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def client_notes(console: Console) -> Iterator[None]:
    """Print the log messages of the hub's client above the progress bar, within the context."""
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage().partition("\n")[0]
            if text.startswith("Error while downloading"):
                text = "The connection broke; going on where it did."
            console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    log = logging.getLogger("huggingface_hub")
    before, log.handlers = log.handlers, [Notes()]
    try:
        yield
    finally:
        log.handlers = before


def plan_for(found: Repository) -> MemoryPlan | None:
    """Return what a model would take on this machine; None where MLX can't be imported, or a
    setting of the environment is wrong."""
    from pydantic import ValidationError

    from mlx_manager.mlx_server.config import MLXServerSettings
    from mlx_manager.mlx_server.models import hub
    from mlx_manager.mlx_server.models.plan import plan_of

    try:
        limit = memory_limit(MLXServerSettings())
    except (ImportError, ValidationError):
        return None
    return plan_of(found, hub.config_of(found), limit)


def planned(plan: MemoryPlan | None) -> dict[str, object]:
    if plan is None:
        return {}
    own = {"fits": plan.fits, "tokens": plan.tokens, "rows_at_context": plan.rows_at_context}
    return asdict(plan) | own


def document(found: Repository, missing: int, folder: Path | None) -> dict[str, object]:
    return {
        "id": found.id,
        "commit": found.commit,
        "licence": found.licence or None,
        "gated": found.gated,
        "model_type": found.model_type or None,
        "bytes": found.nbytes,
        "bytes_to_download": missing,
        "files": {name: file.nbytes for name, file in found.files.items()},
        "path": folder and str(folder),
    }


def exit_code(error: MLXManagerError) -> ExitCode:
    match error.status:
        case 404:
            return ExitCode.NOT_FOUND
        case 400 | 403 | 422:
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILED

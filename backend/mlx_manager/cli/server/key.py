"""`mlx-manager key`: make, list and remove API keys. Only their hashes are kept."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.terminal import AsJson, ExitCode, fail, note, show, table

if TYPE_CHECKING:
    from mlx_manager.mlx_server.services.keys import KeyEntry

FILE_VARIABLE = "MLX_SERVER_API_KEYS_FILE"

key = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make, list and remove API keys.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def limit(text: str) -> Any:
    return typer.Option(min=1, metavar="N", help=f"{text}; default: the server's own limit")


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Whose key it is; the log and the metrics name it so")
]
File = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=f"The keys' file; default: ${FILE_VARIABLE}, or one in your home folder",
    ),
]


@key.command("add")
def add(
    name: Name,
    *,
    file: File = None,
    requests_per_minute: Annotated[int | None, limit("Requests it may make a minute")] = None,
    tokens_per_minute: Annotated[int | None, limit("Tokens of prompts and answers")] = None,
    max_concurrent: Annotated[int | None, limit("Requests under way at once")] = None,
    max_queued: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Requests that may wait beyond these; default 64"),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(metavar="N", help="Most urgent `priority` of its requests; default: any"),
    ] = None,
    own_prefixes: Annotated[
        bool,
        typer.Option("--own-prefixes", help="Its prompts' prefixes are found by itself alone"),
    ] = False,
) -> None:
    """Make a key and print it, once: only its hash is kept.

    A running server accepts the key after SIGHUP.

    \b
    Examples:
      mlx-manager key add alice
      mlx-manager key add ci --requests-per-minute 60 --max-concurrent 4
    """
    from mlx_manager.mlx_server.errors import InvalidSettings, MLXManagerError
    from mlx_manager.mlx_server.services.keys import ENVIRONMENT_KEY, add_key

    target = keys_file(file)
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "max_queued": max_queued,
        "priority": priority,
        "own_prefixes": own_prefixes or None,
    }
    try:
        secret = add_key(target, name, {k: v for k, v in limits.items() if v is not None})
    except InvalidSettings as error:
        fail(error.message, ExitCode.USAGE)
    except MLXManagerError as error:
        fail(error.message)
    note(f"The key of {name}, which is shown only now; its hash is in {target}:")
    typer.echo(secret)
    if os.path.expanduser(os.environ.get(FILE_VARIABLE, "")) != str(target):
        note(f"Serve with it: {FILE_VARIABLE}={shlex.quote(str(target))} mlx-manager serve")
    if name == ENVIRONMENT_KEY and "MLX_SERVER_API_KEY" in os.environ:
        note(f"MLX_SERVER_API_KEY is named {name!r}, too: no server starts with both.")


@key.command("list")
def list_keys(*, file: File = None, as_json: AsJson = False) -> None:
    """List the keys of a file and their limits."""
    entries = read(keys_file(file))
    if as_json:
        found = [
            {"name": name} | entry.model_dump(mode="json", exclude={"sha256"})
            for name, entry in entries.items()
        ]
        typer.echo(json.dumps(found, indent=2))
        return
    limits = ("requests/min", "tokens/min", "concurrent", "queued", "priority")
    shown = table("key", "made", *limits, "prefixes", right=limits)
    for name, entry in entries.items():
        made = "" if entry.created is None else f"{entry.created:%Y-%m-%d}"
        given = (
            entry.requests_per_minute,
            entry.tokens_per_minute,
            entry.max_concurrent,
            entry.max_queued,
            entry.priority,
        )
        numbers = ("" if value is None else f"{value:,}" for value in given)
        own = {None: "", True: "own", False: "shared"}[entry.own_prefixes]
        shown.add_row(name, made, *numbers, own)
    show(shown)


@key.command("rm")
def remove(name: Name, *, file: File = None) -> None:
    """Remove a key. A server that runs refuses it from the next SIGHUP on."""
    from mlx_manager.mlx_server.errors import MLXManagerError
    from mlx_manager.mlx_server.services.keys import remove_key

    target = keys_file(file)
    if name not in read(target):
        fail(f"{target} has no key named {name!r}.", ExitCode.NOT_FOUND)
    try:
        remove_key(target, name)
    except MLXManagerError as error:
        fail(error.message)
    note(f"The key of {name} is removed from {target}.")


def read(file: Path) -> dict[str, KeyEntry]:
    from mlx_manager.mlx_server.errors import MLXManagerError
    from mlx_manager.mlx_server.services.keys import read_entries

    try:
        return read_entries(file)
    except MLXManagerError as error:
        fail(error.message)


def keys_file(file: Path | None) -> Path:
    """The `file` that was named, or the environment's, or one in the home folder."""
    from mlx_manager.mlx_server.config import expanded

    named = file or os.environ.get(FILE_VARIABLE)
    try:
        if named:
            return expanded(Path(named))
        return expanded(Path(typer.get_app_dir("mlx-manager"))) / "keys.toml"
    except ValueError as error:
        fail(f"--file ({FILE_VARIABLE}): {error}.", ExitCode.USAGE)

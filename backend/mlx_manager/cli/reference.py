"""docs/cli.md, written from the commands: `python -m mlx_manager.cli.reference > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from mlx_manager.cli import app
from mlx_manager.cli.terminal import MEANINGS

PROGRAM = "mlx-manager"
INTRODUCTION = """# The command line

<!-- Written by `python -m mlx_manager.cli.reference`; a test compares. -->

`mlx-manager COMMAND --help` says the same. Results go to stdout and everything else to stderr.
`--json` prints for programs what a table shows to people.

Commands that talk to a server use the one on this machine, at `MLX_SERVER_HOST` and
`MLX_SERVER_PORT`. `--url` or `MLX_MANAGER_URL` names another server. If the server has keys, set
one in `MLX_MANAGER_API_KEY`; for the admin API set the token in `MLX_SERVER_ADMIN_TOKEN`.
"""
SETTINGS = "Its options are the settings: [configuration.md](configuration.md) has their table."


def reference() -> str:
    """The whole page, as Markdown."""
    group = typer.main.get_command(app)
    lines = [INTRODUCTION, "| Exit code | Meaning |", "|--:|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]
    for path, command in commands(group, PROGRAM):
        lines += ["", f"## {path}", "", *described(path, command)]
    return "\n".join(lines) + "\n"


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, those of groups too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def described(path: str, command: Any) -> Iterator[str]:
    text, _, examples = command.help.partition("\n\n\b\n")
    yield text.strip()
    if examples:
        _, _, shown = examples.partition("\n")
        yield from ("", "```sh", *(line.strip() for line in shown.strip().splitlines()), "```")
    if path == f"{PROGRAM} serve":
        yield from ("", SETTINGS)
        return
    context = command.make_context(path, [], resilient_parsing=True)
    rows = [record for parameter in command.params if (record := row(parameter, context))]
    if rows:
        yield from ("", "| | |", "|---|---|", *rows)


def row(parameter: Any, context: Any) -> str | None:
    if parameter.param_type_name == "argument":
        return f"| `{parameter.metavar or parameter.name.upper()}` | {cell(parameter.help)} |"
    shown = parameter.get_help_record(context)
    if shown is None or parameter.name == "help":
        return None
    names, text = shown
    return f"| `{cell(names)}` | {cell(text)} |"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    typer.echo(reference(), nl=False)

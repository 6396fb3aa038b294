"""Output that all commands share: failures on stderr with an exit code, tables, sizes, times."""

from __future__ import annotations

import logging
import os
import sys
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mlx_manager.printable import in_lines, is_dumb, on_one_line

if TYPE_CHECKING:
    from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]


WIDE = 250
"""Columns of a table that is not printed on a terminal."""


class ExitCode(IntEnum):
    """Exit codes of the program when it did not do what was asked."""

    FAILED = 1
    USAGE = 2
    NO_SERVER = 3
    NOT_FOUND = 4
    REFUSED = 5
    INTERRUPTED = 130


MEANINGS = {
    0: "done",
    ExitCode.FAILED: "failed; the message says why",
    ExitCode.USAGE: "an option, argument or setting is wrong",
    ExitCode.NO_SERVER: "no server answers, or not to the end",
    ExitCode.NOT_FOUND: "no such model, request or service",
    ExitCode.REFUSED: "not allowed: a key, a licence, or a model in use",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
}


def colour(name: str) -> str | None:
    """Return the colour for printing; None if NO_COLOR is set, or TERM names a dumb terminal."""
    return None if os.environ.get("NO_COLOR") or is_dumb() else name


def escapes_are_known() -> bool:
    """Return whether stdout is a terminal that knows escape sequences."""
    return sys.stdout.isatty() and not is_dumb()


def complain(message: str) -> None:
    said = f"mlx-manager: {in_lines(message)}"
    logs = sys.modules.get("mlx_manager.mlx_server.observability.logs")
    if logs is not None and logs.speaks_json():
        logs.tell(said, level=logging.ERROR)
    else:
        typer.secho(said, err=True, fg=colour("red"))


def note(message: str) -> None:
    """Print a note on stderr, so that piped output stays clean."""
    typer.secho(in_lines(message), err=True, dim=True)


def fail(message: str, code: ExitCode = ExitCode.FAILED) -> NoReturn:
    """End the program with `code`; `message` says what to do."""
    complain(message)
    raise typer.Exit(code)


STDOUT = Path("-")


def require_place(file: Path) -> None:
    """End the program with exit code 2 where no file can be written, before there is work to
    lose."""
    if file == STDOUT:
        return
    if file.is_dir():
        fail(f"{file} is a folder; a file is wanted.", ExitCode.USAGE)
    if not file.absolute().parent.is_dir():
        fail(f"{file.parent} is no folder.", ExitCode.USAGE)


def put(file: Path, text: str) -> None:
    """Write `text` as `file`, `-` being stdout, and say on stderr where it is."""
    if file == STDOUT:
        typer.echo(text, nl=False)
        return
    file.write_text(text)
    note(f"written: {file}")


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table whose first column names the row; those named in `right` hold numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    class Plain(Table):
        """Shows what cells say as it is: names are others', and may look like markup."""

        def add_row(self, *cells: Any, **more: Any) -> None:
            super().add_row(*(Text(on_one_line(cell)) for cell in cells), **more)

    made = Plain(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        whole = index == 0 or column in right
        made.add_column(column, justify="right" if column in right else "left", no_wrap=whole)
    return made


def show(made: Table) -> None:
    """Print a table within the terminal's width.

    Where not even names and numbers fit, print whole lines, which the terminal breaks. In a pipe
    the table is as wide as needed, for grep and awk.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    for column in made.columns:
        if column.no_wrap:
            column.min_width = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    needed = Measurement.get(console, console.options.update(max_width=WIDE), made)
    if needed.minimum > console.width:
        console = Console(width=needed.maximum)
    console.print(made)


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `5 h`, `2 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

"""The command line, one command a file. What a command needs is imported when it runs, so that
`--help` is instant.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mlx_manager import __version__
from mlx_manager.cli.bench import bench
from mlx_manager.cli.chat import chat
from mlx_manager.cli.doctor import doctor
from mlx_manager.cli.launch import launch
from mlx_manager.cli.models.cache import cache
from mlx_manager.cli.models.list import list_models
from mlx_manager.cli.models.pull import pull
from mlx_manager.cli.models.rm import rm
from mlx_manager.cli.models.search import search
from mlx_manager.cli.server.key import key
from mlx_manager.cli.server.load import cancel, load, unload, unpin
from mlx_manager.cli.server.ps import ps
from mlx_manager.cli.server.serve import serve
from mlx_manager.cli.server.service import service
from mlx_manager.cli.terminal import MEANINGS, ExitCode, complain
from mlx_manager.printable import is_dumb

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlx-manager {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version")
]


EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {text}" for code, text in MEANINGS.items())


@app.callback(epilog=EPILOG)
def mlx_manager(context: typer.Context, version: Version = False) -> None:
    """An inference server on MLX for any OpenAI or Anthropic client.

    "mlx-manager serve" starts it with a small embedded model. "mlx-manager doctor" finds what is in
    the way. docs/install.md tells how to upgrade and uninstall; if the server runs as a service,
    begin with "mlx-manager service uninstall".
    """
    if is_dumb():
        # Every echo of every command is then without escape sequences.
        context.color = False


app.command(short_help="Serve models over the OpenAI and Anthropic APIs.")(serve)
app.command()(chat)
app.command(context_settings={"ignore_unknown_options": False})(launch)
app.command()(search)
app.command()(pull)
app.command("list")(list_models)
app.command()(rm)
app.command()(ps)
app.command()(load)
app.command()(unload)
app.command()(unpin)
app.command()(cancel)
app.command()(bench)
app.command()(doctor)
app.add_typer(service, name="service")
app.add_typer(key, name="key")
app.add_typer(cache, name="cache")


UNWRITTEN = "The output can't be written"
OUTSIDE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
)
"""Errors that no program can prevent: a full disk, a file without permission, a name that no file
can have."""


def open_what_is_closed() -> None:
    """Open the null device in place of each standard stream that the caller has closed.

    In the order of the descriptors: each takes the lowest free descriptor, which is its own.
    Otherwise another file would get that descriptor.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # it stays open
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments` name; None: those that the program was called with."""
    # LogFire, where it is installed, has itself imported by the first model that is declared.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Letters that the terminal's encoding lacks: a `?` for each, as stderr has its way, too.
        sys.stdout.reconfigure(errors="replace")
    try:
        app(arguments, prog_name="mlx-manager")
    except OSError as error:
        if error.errno not in OUTSIDE:
            raise
        where = f"{error.filename} can't be used" if error.filename else UNWRITTEN
        complain(f"{where}: {error.strerror}.")
        # Python would try it once more as it ends, and complain in its own way.
        os._exit(ExitCode.FAILED)
    except SystemExit as end:
        if os.environ.get("MLX_MANAGER_KEPT_BY"):
            from mlx_manager.service import no_retry

            if no_retry(end.code):
                complain(
                    "launchd does not start it again: mend it by `mlx-manager service install`."
                )
                sys.exit(0)
        raise

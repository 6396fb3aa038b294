"""`mlx-manager service`: the server as a service that starts with the machine."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.settings import parse_settings, takes_settings
from mlx_manager.cli.terminal import AsJson, ExitCode, complain, fail, note

if TYPE_CHECKING:
    from mlx_manager.mlx_server.config import MLXServerSettings
    from mlx_manager.service import Service

service = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run the server as a service of the system.",
)

System = Annotated[
    bool,
    typer.Option(
        "--system/--user",
        show_default=False,
        help="Of the whole machine, which takes root, or of this user [user]",
    ),
]
RunAs = Annotated[
    str | None,
    typer.Option(metavar="USER", help="Whose rights a --system service has [who called sudo]"),
]
Print = Annotated[bool, typer.Option("--print", help="Show the files; write nothing")]
Start = Annotated[
    bool, typer.Option("--start/--no-start", show_default=False, help="Start it now [start]")
]
KindName = Annotated[
    str | None, typer.Option(metavar="systemd|launchd", help="Default: this system's")
]


@service.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] [OPTIONS OF serve]",
)
def install(
    context: typer.Context,
    *,
    system: System = False,
    run_as: RunAs = None,
    kind: KindName = None,
    print_only: Print = False,
    start: Start = True,
) -> None:
    """Write the service's files and start it.

    Every option of `mlx-manager serve` may follow. These options, and the variables of your shell
    that configure a server (MLX_SERVER_, HF_, OTEL_, proxies), are written to an environment file
    that only its owner may read. Relative paths become absolute. Installing again replaces the
    files. A server whose settings are wrong is not started again.

    \b
    Examples:
      mlx-manager service install --model ~/models/mine --port 9000
      mlx-manager service install --print
      sudo mlx-manager service install --system --run-as alice --host 0.0.0.0
    """
    from mlx_manager.service import InvalidValue, carried, environment_text, masked

    given = serve_options(context.args)
    grace = startable(parse_settings(given)).drain_seconds
    wanted = described(system, run_as, kind, grace)
    try:
        variables = carried(os.environ, given)
        settings = environment_text(masked(variables) if print_only else variables)
    except InvalidValue as error:
        fail(str(error), ExitCode.USAGE)
    if print_only:
        typer.echo(f"# {wanted.definition_file}\n{wanted.definition()}")
        typer.echo(f"# {wanted.environment_file}\n{settings}", nl=False)
        return
    write_files(wanted, settings)
    run_or_show(wanted, wanted.start_commands() if start else [])
    note(f"Its log: {wanted.log_command()}")
    if wanted.kind == "systemd" and wanted.user is None:
        note("It runs while you are logged in; always, after: loginctl enable-linger")


@service.command()
def uninstall(*, system: System = False, kind: KindName = None) -> None:
    """Stop the service and remove its files, settings too."""
    from mlx_manager.service import runs_here

    wanted = described(system, "root" if system else None, kind)
    if not wanted.definition_file.exists():
        fail(f"No service is installed: there is no {wanted.definition_file}.", ExitCode.NOT_FOUND)
    if runs_here(wanted.kind):
        for command in wanted.stop_commands():
            carry_out(command)
    for file in (wanted.definition_file, wanted.environment_file):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            fail(f"{file} can't be removed: {error.strerror}.{root_hint(wanted)}")
        note(f"removed {file}")


@service.command()
def status(*, system: System = False, kind: KindName = None, as_json: AsJson = False) -> None:
    """Show if the service is installed and runs.

    The exit code is 0 if it runs, 3 if it does not, 4 if it is not installed.
    """
    from mlx_manager.service import runs_here

    wanted = described(system, "root" if system else None, kind)
    installed = wanted.definition_file.exists()
    state = "unknown"
    if runs_here(wanted.kind):
        told = printed(wanted.state_command())
        state = told if wanted.kind == "systemd" else launchd_state(told)
    found = {
        "kind": wanted.kind,
        "installed": installed,
        "state": state,
        "definition": str(wanted.definition_file),
        "settings": str(wanted.environment_file),
    }
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif installed:
        typer.echo(f"{state}: {wanted.definition_file}")
        note(f"Its log: {wanted.log_command()}")
    else:
        typer.echo("not installed; `mlx-manager service install` does it")
    if not installed:
        raise typer.Exit(ExitCode.NOT_FOUND)
    if state not in {"active", "running"}:
        raise typer.Exit(ExitCode.NO_SERVER)


def serve_options(arguments: list[str]) -> dict[str, Any]:
    """Return the settings given, by a parser that complains as that of `serve` would."""
    reader = typer.Typer(rich_markup_mode=None, add_completion=False)

    @reader.command()
    @takes_settings()
    def serve(*, given: dict[str, Any]) -> None: ...

    command = typer.main.get_command(reader)
    parsed = command.make_context(
        "mlx-manager service install", [a for a in arguments if a != "--"]
    )
    return {name: value for name, value in parsed.params.items() if value is not None}


def startable(settings: MLXServerSettings) -> MLXServerSettings:
    """Return `settings`; end the program where a server with them would refuse to start, unseen."""
    from mlx_manager.mlx_server.api.auth import check_bind
    from mlx_manager.mlx_server.errors import MLXManagerError
    from mlx_manager.mlx_server.models.catalog import check_models_dir
    from mlx_manager.mlx_server.models.settings import read_models_file
    from mlx_manager.mlx_server.services.keys import read_keys

    try:
        check_bind(settings.access)
        read_keys(settings.access)
        read_models_file(settings.models_file)
        check_models_dir(settings.models_dir)
    except MLXManagerError as error:
        fail(error.message, ExitCode.USAGE)
    return settings


def described(system: bool, run_as: str | None, kind: str | None, grace: float = 0) -> Service:
    from mlx_manager.mlx_server.config import expanded
    from mlx_manager.service import STOP_MARGIN, Service, native_kind, program

    if kind not in (None, "systemd", "launchd"):
        fail(f"--kind {kind}: it must be systemd or launchd.", ExitCode.USAGE)
    if run_as is not None and not system:
        fail(
            "--run-as is for --system: a service of one's own has one's own rights.", ExitCode.USAGE
        )
    user = None
    if system:
        import getpass

        try:
            user = run_as or os.environ.get("SUDO_USER") or getpass.getuser()
        except (KeyError, OSError):
            fail("--run-as: name the user; this one has no name.", ExitCode.USAGE)
        if user == "root" and grace:
            note("The service will run as root; --run-as names another user.")
    try:
        home = expanded(Path("~"))
    except ValueError as error:
        fail(f"The service's files have no place: {error}.", ExitCode.USAGE)
    return Service(
        "launchd" if (kind or native_kind()) == "launchd" else "systemd",
        user,
        program(),
        round(grace) + STOP_MARGIN,
        home,
    )


def write_files(wanted: Service, settings: str) -> None:
    from mlx_manager.service import write

    # systemd reads it as root; launchd's shell reads it with the service's rights.
    owner = wanted.user if wanted.kind == "launchd" else None
    files = (
        (wanted.environment_file, settings, 0o600),
        (wanted.definition_file, wanted.definition(), 0o644),
    )
    for file, content, mode in files:
        try:
            write(file, content, mode, owner if file == wanted.environment_file else None)
        except OSError as error:
            why = error.strerror or error
            fail(f"{file} can't be written: {why}.{root_hint(wanted)}", ExitCode.REFUSED)
        except LookupError as error:
            fail(f"--run-as: {error}.", ExitCode.USAGE)
        note(f"wrote {file}")


def root_hint(wanted: Service) -> str:
    return " A --system service takes root: sudo mlx-manager service ..." if wanted.user else ""


def run_or_show(wanted: Service, commands: list[list[str]]) -> None:
    from mlx_manager.service import runs_here, shown

    if not commands or not runs_here(wanted.kind):
        typer.echo(f"Start it with:\n{shown(wanted.start_commands())}")
    elif wanted.kind == "launchd":
        printed(wanted.forget_command())
        if not all(map(carry_out, commands)):
            raise typer.Exit(ExitCode.FAILED)
        typer.echo("The service is started; `mlx-manager service status` says if it runs.")
    else:
        printed(wanted.forget_command())
        note("starting it, which takes as long as its model takes to load")
        if not all(map(carry_out, commands)):
            typer.echo(printed(wanted.last_words_command()), err=True)
            raise typer.Exit(ExitCode.FAILED)
        typer.echo(f"The service runs. {printed(wanted.ready_command())}".strip())


def carry_out(command: list[str]) -> bool:
    import subprocess

    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complain(f"`{shlex.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.returncode == 0


def printed(command: list[str]) -> str:
    """Return the stripped standard output of `command`, even where it fails."""
    import subprocess

    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def launchd_state(told: str) -> str:
    for line in told.splitlines():
        name, _, value = line.strip().partition(" = ")
        if name == "state":
            return value
    return "not loaded"

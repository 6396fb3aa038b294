"""`mlx-manager doctor`: what is in the way of serving, and what would make it faster."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.settings import parse_settings, takes_settings
from mlx_manager.cli.terminal import AsJson, ExitCode, colour, fail, note, put, require_place

if TYPE_CHECKING:
    from mlx_manager.doctor import Finding
    from mlx_manager.mlx_server.config import MLXServerSettings

Report = Annotated[
    bool,
    typer.Option(
        "--report", help="Write one JSON file about this machine and its kernels, to be pasted"
    ),
]
File = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="Of --report; - is stdout [mlx-manager-report.json]",
    ),
]
REPORT_FILE = Path("mlx-manager-report.json")


@takes_settings("host", "port")
def doctor(
    file: File = None,
    *,
    report: Report = False,
    given: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Find what prevents or slows serving on this machine.

    It checks MLX, the device, memory, BLAS, the GPU's kernels, the disk, the files that the server
    writes, settings, keys, the default model and the port.

    The exit code is 0 if `serve` can start, else 1.

    --report tries every kernel against the reference, for each head size and dtype, and times the
    embedded model; it takes minutes on a GPU. Its file has no paths and no names of people or
    machines. The exit code is then 1 when a kernel is wrong, too.

    \b
    Examples:
      mlx-manager doctor --port 9000
      mlx-manager doctor --report mine.json
    """
    settings = parse_settings(given)
    if report:
        if as_json:
            fail("--report is JSON, and --json is of what is printed: give one.", ExitCode.USAGE)
        write_report(settings, file or REPORT_FILE)
        return
    if file is not None:
        fail(f"{file} is of no use without --report.", ExitCode.USAGE)
    from mlx_manager.doctor import examine

    findings = examine(settings)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print_findings(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def write_report(settings: MLXServerSettings, file: Path) -> None:
    from mlx_manager.machine import written
    from mlx_manager.report import is_good, report

    require_place(file)
    found = report(settings, note)
    put(file, written(found))
    if not is_good(found):
        raise typer.Exit(ExitCode.FAILED)


def print_findings(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, name = ("\u2713", "green") if finding.ok else ("\u2717", "red")
        if finding.ok and finding.advice:
            mark, name = "!", "yellow"
        typer.secho(f"{mark} ", nl=False, fg=colour(name))
        typer.secho(f"{finding.name:<{width}}  ", nl=False, bold=True)
        typer.secho(finding.value, fg=None if finding.ok else colour("red"))
        if finding.advice:
            typer.secho(f"  {'':{width}}  {finding.advice}", fg=colour("yellow"))

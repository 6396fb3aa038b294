"""`mlx-manager doctor`: what is in the way of serving, and what would make it faster."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from mlx_manager.cli.serve import Host, Port, parse_settings
from mlx_manager.cli.terminal import AsJson, ExitCode, colour

if TYPE_CHECKING:
    from mlx_manager.doctor import Finding


def doctor(
    context: typer.Context, *, host: Host = None, port: Port = None, as_json: AsJson = False
) -> None:
    """Find what prevents or slows serving on this machine.

    It checks MLX, the device, memory, BLAS, the GPU's kernels, the disk, the files that the server
    writes, settings, keys, the default model and the port.

    The exit code is 0 if `serve` can start, else 1.

    \b
    Example:
      mlx-manager doctor --port 9000
    """
    settings = parse_settings({k: v for k, v in context.params.items() if k != "as_json"})
    from mlx_manager.doctor import examine

    findings = examine(settings)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print_findings(findings)
    if not all(finding.ok for finding in findings):
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

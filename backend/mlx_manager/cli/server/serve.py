"""`mlx-manager serve`, and every setting of the server as an option."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from mlx_manager.cli.settings import parse_settings, takes_settings
from mlx_manager.cli.terminal import fail

Plan = Annotated[
    bool, typer.Option("--plan", help="Show what the models would take of memory; serve nothing")
]


@takes_settings()
def serve(*, plan: Plan = False, given: dict[str, Any]) -> None:
    """Serve models over the OpenAI and Anthropic APIs until interrupted.

    Every option is also an environment variable: --max-rows is MLX_SERVER_MAX_ROWS. The option
    wins.

    \b
    Examples:
      mlx-manager serve
      mlx-manager serve --model mlx-community/Llama-3.2-3B-Instruct-4bit --port 9000
      mlx-manager serve --models-dir ~/models --memory-limit-gb 24
      mlx-manager serve --models-dir ~/models --plan
    """
    if (given.get("log_format") or os.environ.get("MLX_SERVER_LOG_FORMAT")) == "json":
        from mlx_manager.mlx_server.observability.logs import capture_output

        capture_output()
    settings = parse_settings(given)
    require_mlx()
    if plan:
        from mlx_manager.cli.models.plan import print_plan

        print_plan(settings)
        return
    from mlx_manager.mlx_server.main import run

    run(settings)


def require_mlx() -> None:
    """End the program with exit code 1, saying what to install, where MLX can't be imported.

    Tried in another process: the one that serves has no MLX.
    """
    tried = subprocess.run(
        [sys.executable, "-P", "-c", "import mlx.core"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if tried.returncode:
        from mlx_manager.doctor import INSTALL_MLX

        said = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
        fail(f"MLX can't be imported: {said[-1]}. {INSTALL_MLX}")

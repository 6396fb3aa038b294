"""docs/cli.md and `--help` say what the commands are."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mlx_manager.cli import app
from mlx_manager.cli.reference import PROGRAM, commands, reference
from mlx_manager.cli.terminal import MEANINGS, ExitCode

ALL = dict(commands(typer.main.get_command(app), PROGRAM))


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "cli.md"
    assert page.read_text() == reference(), "python -m mlx_manager.cli.reference > docs/cli.md"


def test_every_exit_code_has_a_meaning() -> None:
    assert MEANINGS.keys() == {0, *ExitCode}


@pytest.mark.parametrize("path", ALL)
def test_every_command_and_option_is_explained(path: str) -> None:
    command = ALL[path]
    assert command.help
    assert [p.name for p in command.params if not p.help] == []
    shown = CliRunner().invoke(app, [*path.split()[1:], "--help"])
    assert shown.exit_code == 0
    assert max(len(line) for line in shown.output.splitlines()) <= 100

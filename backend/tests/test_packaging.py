"""The formula and the container file: what can be said of them without running them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_manager import __version__
from mlx_manager.cli.settings import parse_settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging"
FORMULA = FOLDER / "homebrew" / "mlx-manager-server.rb"
CONTAINER = FOLDER / "container" / "Dockerfile"


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "hadolint"
    command = [program, "--no-color", file]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_linter_finds_nothing_in_the_container_file() -> None:
    done = hadolint(CONTAINER)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_looks_at_the_container_file(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(CONTAINER.read_text().replace("WORKDIR /build", "WORKDIR build"))
    assert hadolint(wrong).returncode == 1


def test_what_a_container_copies_is_not_ignored() -> None:
    ignored = (CONTAINER.with_name("Dockerfile.dockerignore")).read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert ignored[0] == "*"
    assert all((ROOT / path).exists() for path in kept)
    wanted = {"pyproject.toml", "README.md", "LICENSE", "mlx_manager"}
    assert {f"backend/{name}" for name in wanted} | {"constraints.txt"} == set(kept)


def test_a_container_is_not_root_s() -> None:
    users = re.findall(r"^USER (\S+)$", CONTAINER.read_text(), re.M)
    assert users == ["10001"]


def test_a_container_serves_by_options_that_there_are() -> None:
    (command,) = re.findall(r"^CMD (\[.*\])$", CONTAINER.read_text(), re.M)
    words = re.findall(r'"([^"]*)"', command)
    assert words[0] == "serve"
    names = [word.removeprefix("--") for word in words[1::2]]
    settings = parse_settings(dict(zip(names, words[2::2], strict=True)))
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)


def test_the_formula_is_of_this_version_and_has_a_service() -> None:
    text = FORMULA.read_text()
    assert f"/v{__version__}/mlx_manager_server-{__version__}.tar.gz" in text
    (service,) = re.findall(r"^  service do\n(.*?)^  end$", text, re.M | re.S)
    assert '[opt_bin/"mlx-manager", "serve"]' in service
    assert "keep_alive" in service


@pytest.mark.skipif(shutil.which("ruby") is None, reason="there is no ruby here")
def test_the_formula_is_ruby() -> None:
    done = subprocess.run(["ruby", "-c", FORMULA], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_blocks_of_the_formula_end() -> None:
    lines = [line.strip() for line in FORMULA.read_text().splitlines()]
    opened = sum(
        line.startswith(("class ", "def ")) or line.endswith(" do") or line == "begin"
        for line in lines
    )
    assert opened == lines.count("end")


@pytest.mark.parametrize("file", [FORMULA, CONTAINER, FOLDER / "README.md"], ids=lambda f: f.name)
def test_every_file_says_that_it_was_not_run(file: Path) -> None:
    text = file.read_text()
    assert "not yet run by us" in text or "has not\nbeen run by us" in text

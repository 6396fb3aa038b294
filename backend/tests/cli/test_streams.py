"""Where the program reads and writes: closed, full, or not what it should be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

PROGRAM = [sys.executable, "-m", "mlx_manager.cli"]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_output_that_can_not_be_written_is_told(environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROGRAM, "list", "--json"],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "mlx-manager: The output can't be written: No space left on device.\n"


def test_letters_that_a_terminal_lacks_are_question_marks(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*PROGRAM, "doctor", "--port", "0"],
        env=environment | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"? port" in done.stdout


def test_a_question_is_asked_with_nothing_to_read_from(environment, server: str) -> None:
    command = f'"{sys.executable}" -m mlx_manager.cli chat --url {server} --once hi <&-'
    done = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_what_is_piped_in_must_be_text(environment: dict[str, str], server: str) -> None:
    done = subprocess.run(
        [*PROGRAM, "chat", "--url", server],
        env=environment,
        input=b"\xff\xfe\x00",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"mlx-manager: What is piped in is no UTF-8 text")


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="root may read everything")
@pytest.mark.parametrize(
    ("command", "use"), [("list", "used"), ("key add alice --file {}/keys.toml", "written")]
)
def test_a_folder_that_is_somebody_elses_is_named(
    environment: dict[str, str], tmp_path: Path, command: str, use: str
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    rights = "-dac_override,-dac_read_search"
    done = subprocess.run(
        ["setpriv", "--bounding-set", rights, *PROGRAM, *command.format(closed).split()],
        env=environment | {"HF_HOME": str(closed / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"mlx-manager: {closed}/")
    assert done.stderr.endswith(f"can't be {use}: Permission denied.\n")


def test_a_narrow_terminal_cuts_no_name_and_no_number(
    environment: dict[str, str], models_dir: Path
) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "mlx_manager.cli", "list", "--models-dir", str(models_dir)],
        env=environment,
        encoding="utf-8",
        dimensions=(20, 30),
        timeout=60,
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    for whole in ("mlx-manager/demo", "8,192", "embedded"):
        assert whole in child.before

"""Workflows of GitHub: what a linter finds, least permissions, and what has to run where."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
TRUSTED = ("actions/", "pypa/")
RUNNERS = {"macos-15", "macos-26"}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return found


def jobs() -> Iterator[Any]:
    for file in FILES:
        for name, job in read(file.name)["jobs"].items():
            yield pytest.param(job, id=f"{file.stem}-{name}")


def steps_of(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_the_linter_finds_nothing() -> None:
    program = Path(sys.executable).parent / "actionlint"
    done = subprocess.run(
        [program, "-no-color", *FILES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_the_linter_looks_at_them(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(FILES[0].read_text().replace("runs-on:", "runs-upon:"))
    program = Path(sys.executable).parent / "actionlint"
    done = subprocess.run([program, wrong], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "runs-upon" in done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workflow_may_only_read(file: Path) -> None:
    assert read(file.name)["permissions"] == {"contents": "read"}


def test_one_job_publishes_and_runs_no_code_of_ours() -> None:
    found = read("release.yml")["jobs"]
    publishers = [name for name, job in found.items() if "id-token" in job.get("permissions", {})]
    assert publishers == ["publish"]
    assert found["publish"]["permissions"] == {"id-token": "write"}
    assert steps_of(found["publish"]).strip() == ""
    assert found["publish"]["environment"] == "pypi"


@pytest.mark.parametrize("job", list(jobs()))
def test_a_job_ends_and_keeps_no_credentials(job: dict[str, Any]) -> None:
    assert job["timeout-minutes"] <= 120
    for step in job["steps"]:
        if "uses" not in step:
            continue
        action, _, release = step["uses"].partition("@")
        assert action.startswith(TRUSTED)
        assert release.startswith(("v", "release/v"))
        if action == "actions/checkout":
            assert step["with"]["persist-credentials"] is False


def test_pushes_are_tested_on_both_kinds_of_linux() -> None:
    found = read("test.yml")
    assert "push" in found[True]  # YAML's 1.1 reads the key `on` so.
    job = found["jobs"]["test"]
    assert job["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert ".ci/run" in steps_of(job)


def test_macs_are_tried_every_night_and_by_hand() -> None:
    found = read("metal.yml")
    assert found[True].keys() == {"schedule", "workflow_dispatch"}
    assert set(found["jobs"]["metal"]["strategy"]["matrix"]["runner"]) == RUNNERS


def test_a_mac_answers_checks_its_kernels_and_tests() -> None:
    found = steps_of(read("metal.yml")["jobs"]["metal"])
    for done in (
        "first_answer.sh make serve",
        "doctor --port 0 --report",
        "bench --share",
        "make test",
    ):
        assert done in found
    assert "export PATH=/usr/bin:/bin:/usr/sbin:/sbin\n" in found
    assert """grep '"device": "metal"'""" in found


def test_a_mac_runs_validated_too_and_with_one_operation_a_buffer() -> None:
    runs = read("metal.yml")["jobs"]["metal"]["strategy"]["matrix"]["run"]
    assert [run["variables"] for run in runs] == [
        "",
        "MTL_DEBUG_LAYER=1 MTL_SHADER_VALIDATION=1",
        "MLX_MAX_OPS_PER_BUFFER=1",
    ]


FIRST_ANSWER = ROOT / ".github" / "first_answer.sh"


def first_answer(*command: str, port: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FIRST_ANSWER), *command],
        env={**os.environ, "MLX_SERVER_PORT": str(port)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_server_that_answers_passes_and_is_ended(unused_port: int) -> None:
    done = first_answer(sys.executable, "-m", "mlx_manager.cli", "serve", port=unused_port)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MLX_SERVER_PORT" in done.stdout
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", unused_port)) != 0


def test_a_server_that_does_not_start_fails_at_once(unused_port: int) -> None:
    done = first_answer("false", port=unused_port)
    assert done.returncode == 1
    assert "no server answered" in done.stderr


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

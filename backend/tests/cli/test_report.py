"""`doctor --report`: one file that holds what a report about a machine needs, and no more."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_manager.cli.doctor import REPORT_FILE
from mlx_manager.doctor import Finding
from mlx_manager.report import NO_GPU, PROMPT_TOKENS, in_the_way, is_good


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a report was asked for, without a name for it."""
    folder = tmp_path_factory.mktemp("zaphods-folder")
    variables = {"MLX_SERVER_MODELS_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mlx_manager.cli", "doctor", "--port", "0", "--report"],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert f"written: {REPORT_FILE}" in done.stderr
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / REPORT_FILE).read_text())
    return found


def test_a_report_is_one_file(folder: Path, report: dict[str, Any]) -> None:
    assert os.listdir(folder) == [str(REPORT_FILE)]
    assert report["report"] == "mlx-manager doctor"
    assert report["machine"]["packages"].keys() >= {"mlx", "mlx-lm"}
    assert report["in_the_way"] == []


def test_a_report_has_no_paths_and_names(folder: Path) -> None:
    text = (folder / REPORT_FILE).read_text()
    for personal in (str(folder), str(Path.home()), "zaphod", socket.gethostname()):
        assert personal not in text


def test_a_report_has_the_seconds_of_a_prompt_step(report: dict[str, Any]) -> None:
    assert report["prompt_step"]["tokens"] == PROMPT_TOKENS
    assert report["prompt_step"]["median_seconds"] > 0


def test_a_report_says_where_kernels_were_checked(report: dict[str, Any]) -> None:
    if mx.default_device().type == mx.gpu:
        checked = {check["kernel"] for check in report["kernels"]["checks"]}
        assert checked >= {"attention", "sampling"}
    else:
        assert report["kernels"] == {"device": NO_GPU, "checks": []}


def test_a_port_that_is_taken_is_named_and_fails(run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("doctor", "--port", port, "--report", "-")
    assert done.returncode == 1
    assert json.loads(done.stdout)["in_the_way"] == ["port"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mine.json",), "mine.json is of no use without --report"),
        (("--report", "--json"), "give one"),
        (("--report", "/"), "/ is a folder"),
        (("--report", "/nowhere/mine.json"), "/nowhere is no folder"),
    ],
)
def test_what_can_not_be_meant_is_a_usage_error(run, arguments, words: str) -> None:
    done = run("doctor", "--port", "0", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("part", "good"),
    [
        ({}, True),
        ({"kernels": {"checks": [{"result": "right"}, {"result": "no kernel"}]}}, True),
        ({"kernels": {"checks": [{"result": "right"}, {"result": "wrong"}]}}, False),
        ({"prompt_step": {"problem": "it does not load"}}, False),
        ({"machine": {"problem": "MLX can't be imported"}}, False),
        ({"in_the_way": ["port"]}, False),
    ],
)
def test_a_report_is_good_where_nothing_in_it_is_wrong(part, good: bool) -> None:
    assert is_good({"machine": {}, "in_the_way": [], **part}) is good


def test_findings_are_told_by_name_alone() -> None:
    findings = [Finding("disk", "/home/alice is full", ok=False), Finding("port", "free")]
    assert in_the_way(findings) == ["disk"]

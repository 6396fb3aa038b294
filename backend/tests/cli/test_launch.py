"""`mlx-manager launch`: what an agent is told, and that the user's own files are left alone."""

from __future__ import annotations

import json
import stat
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_manager.agents import AGENTS, Target
from mlx_manager.cli.launch import NAMES

Run = Callable[..., subprocess.CompletedProcess[str]]
TARGET = Target("http://h:1", "secret", "own/model", 65_536, Path("/profile"))
ECHO = """#!/bin/sh
echo "arguments: $*"
env
exit 7
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with a program of each agent's name that says what it was told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        file = folder / agent.program
        file.write_text(ECHO if agent.program != "cline" else ECHO.replace("exit 7", "exit 0"))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return folder


def test_the_help_names_every_agent():
    assert set(NAMES) == AGENTS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_is_told_server_model_and_key(name: str):
    launch = AGENTS[name].launch(TARGET)
    commands = " ".join(" ".join(command) for command in (launch.command, *launch.before))
    told = f"{commands} {dict(launch.environment)} {dict(launch.files)}"
    assert "http://h:1" in told
    assert "own/model" in told
    assert "secret" in told
    assert all(TARGET.profile in file.parents for file in launch.files)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"qwen", "cline"}))
def test_an_agent_is_told_how_long_the_context_is(name: str):
    launch = AGENTS[name].launch(TARGET)
    assert "65536" in f"{dict(launch.environment)} {dict(launch.files)}"


def test_agents_that_ask_are_told_whether_the_model_sees():
    def told(name: str, sees: bool) -> dict[str, Any]:
        [text] = AGENTS[name].launch(replace(TARGET, sees=sees)).files.values()
        return json.loads(text)

    for sees in (True, False):
        opencode = told("opencode", sees)["provider"]["mlx-manager"]["models"]["own/model"]
        assert ("image" in opencode.get("modalities", {}).get("input", ())) == sees
        assert opencode.get("attachment", False) == sees
        [crush] = told("crush", sees)["providers"]["mlx-manager"]["models"]
        assert crush["supports_attachments"] == sees
        assert told("aider", sees)["openai/own/model"]["supports_vision"] == sees


def test_files_are_what_their_agents_read():
    [codex] = AGENTS["codex"].launch(TARGET).files.values()
    assert tomllib.loads(codex)["model_providers"]["mlx-manager"]["wire_api"] == "responses"
    for name in ("opencode", "crush", "aider"):
        [text] = AGENTS[name].launch(TARGET).files.values()
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_runs_with_its_own_profile(
    name: str, program: Run, server: str, fake: Path, tmp_path: Path
):
    done = program(
        "launch", name, "--url", server, "--", "one", "--two",
        PATH=f"{fake}:/usr/bin:/bin", XDG_STATE_HOME=str(tmp_path / "state"),
    )  # fmt: skip
    assert done.returncode == (0 if name == "cline" else 7), done.stderr
    assert "one --two" in done.stdout
    assert "tokens" in done.stderr  # The embedded model's context is a short one.
    profile = tmp_path / "state" / "mlx-manager" / "agents" / name
    assert profile.is_dir()
    assert all(file.stat().st_mode & 0o077 == 0 for file in profile.rglob("*") if file.is_file())


def test_what_would_be_run_is_printed_without_the_key(run: Run, server: str, tmp_path: Path):
    done = run(
        "launch", "codex", "--url", server, "--api-key", "hush-hush", "--print",
        XDG_STATE_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wire_api" in done.stdout
    assert "CODEX_HOME=" in done.stdout
    assert "hush-hush" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nothing"], 2, "known are claude"),
        (["claude"], 4, "npm install -g @anthropic-ai/claude-code"),
    ],
)
def test_what_can_not_be_launched_is_said(
    arguments: list[str], code: int, said: str, run: Run, tmp_path: Path
):
    done = run("launch", *arguments, PATH=str(tmp_path))
    assert done.returncode == code
    assert said in done.stderr


def test_a_model_that_is_not_there_is_named(run: Run, server: str, fake: Path, tmp_path: Path):
    done = run(
        "launch", "aider", "--url", server, "--model", "own/none",
        PATH=str(fake), XDG_STATE_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 4
    assert "own/none" in done.stderr

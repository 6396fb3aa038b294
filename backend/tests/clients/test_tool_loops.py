"""Coding agents run their tool loops: they write a file, run a command and say what came of it.

Each is launched as a user would launch it. The model is a real checkpoint that calls the agent's
tools by a script: its context takes what agents say before their users do. Claude Code and Codex
take one turn in every run; `MLX_TEST_ALL=1` has all agents take three.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from live import LiveServer, live_server, server_before
from scripted_model import call, make_scripted_model
from talks import WAYS
from thorough import slow

HERE = Path(__file__).parent
CLIENTS = HERE.parents[2] / ".venv-clients"
TURNS = 3
SAID = "File {} is written and read."
ANSWERED = re.compile(r" (?:GET|POST|HEAD) (\S+) (\d{3}) ")


@dataclass(frozen=True, slots=True)
class Loop:
    """An agent's instructions, and the calls of a model that drives it.

    programs: where `make clients` installs it. write: the call that writes a text to a path. run:
    the call of a command. ask, go_on: arguments before the question, in the first turn and in the
    others. Without `go_on` a session takes one question, after which the calls of all turns come.
    after: arguments that end what the agent leaves running.
    """

    programs: Path
    write: Callable[[str, str], str]
    run: Callable[[str], str]
    ask: tuple[str, ...]
    go_on: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
CLAUDE = ("--permission-mode", "acceptEdits", "--allowedTools", "Bash", "Write", "--print")
FIRST = HERE / "agents" / "node_modules" / ".bin"
OTHERS = HERE / "more_agents" / "node_modules" / ".bin"
LOOPS = {
    "claude": Loop(
        FIRST,
        lambda path, text: call("Write", file_path=path, content=text),
        lambda command: call("Bash", command=command, description="Show the file"),
        CLAUDE,
        ("--continue", *CLAUDE),
    ),
    "codex": Loop(
        FIRST,
        lambda path, text: call("exec_command", cmd=f"printf '{text}' > {path}"),
        lambda command: call("exec_command", cmd=command),
        ("exec", *CODEX),
        ("exec", "resume", "--last", *CODEX),
    ),
    "opencode": Loop(
        OTHERS,
        lambda path, text: call("write", filePath=path, content=text),
        lambda command: call("bash", command=command, description="Show the file"),
        ("run",),
        ("run", "--continue"),
    ),
    "qwen": Loop(
        OTHERS,
        lambda path, text: call("write_file", file_path=path, content=text),
        lambda command: call("run_shell_command", command=command, is_background=False),
        ("--yolo", "--prompt"),
        ("--continue", "--yolo", "--prompt"),
    ),
    "cline": Loop(
        OTHERS,
        lambda path, text: call("editor", path=path, new_text=text),
        lambda command: call("run_commands", commands=[command]),
        (),
        after=("hub", "stop"),
    ),
}
AIDER = ("--yes-always", "--no-git", "--restore-chat-history", "--message")


@dataclass(frozen=True, slots=True)
class Scripted:
    """A server with a model for each agent, its log, and a folder with their homes."""

    server: LiveServer
    log: Path
    homes: Path

    def answers(self) -> list[tuple[str, str]]:
        """Return path and status of each answer so far."""
        return ANSWERED.findall(self.log.read_text())


@pytest.fixture(scope="module", params=[WAYS[0], pytest.param(WAYS[1], marks=slow)])
def scripted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scripted]:
    folder = tmp_path_factory.mktemp("loops").resolve()
    homes, models, log = folder / "homes", folder / "models", folder / "log.txt"
    for name, loop in LOOPS.items():
        work = homes / name / "work"
        work.mkdir(parents=True)
        script: list[str] = []
        for turn in range(1, TURNS + 1):
            path = f"{work}/notes-{turn}.txt"
            script += [
                loop.write(path, f"Line {turn} of the model."),
                loop.run(f"cat {path} > {work}/copy-{turn}.txt; cat {path}"),
            ]
            if loop.go_on or turn == TURNS:
                script.append(SAID.format(turn))
        make_scripted_model(models / name, script)
    (homes / "aider" / "work").mkdir(parents=True)
    edit = "I write it.\n\nnotes.txt\n```\nA line of the model.\n```\n"
    make_scripted_model(models / "aider", ["It has no tools."], without_tools=edit)
    with live_server(log, models_dir=models, max_models=8) as server:
        if request.param == "own":
            yield Scripted(server, log, homes)
        else:
            tables = "\n".join(f"[models.{name}]" for name in (*LOOPS, "aider"))
            with server_before(server, folder / "before", tables, model="aider") as before:
                yield Scripted(before, folder / "before" / "log.txt", homes)
    assert "Traceback" not in log.read_text(), log.read_text()


def launched(name: str, programs: Path, scripted: Scripted, *arguments: str) -> str:
    """Return what an agent said that was launched and has ended by itself."""
    if not (programs / name).exists():
        pytest.skip(f"{name} is not installed; `MLX_TEST_ALL=1 make clients` installs all agents")
    home = scripted.homes / name
    own = {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "TERM": "dumb"}
    kept = {key: os.environ[key] for key in ("LANG", "PYTHONPATH") if key in os.environ}
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlx_manager.cli", "launch", name, "--model", name),
            *("--url", scripted.server.url, "--", *arguments),
        ],
        env=kept | own,
        cwd=home / "work",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=120)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    return said


def take_turns(name: str, scripted: Scripted, turns: int) -> None:
    """Have an agent write and read a file in each of its turns, and be refused nothing."""
    loop, work = LOOPS[name], scripted.homes / name / "work"
    before = len(scripted.answers())
    try:
        for turn in range(1, turns + 1) if loop.go_on else [turns]:
            told = loop.go_on if turn > 1 and loop.go_on else loop.ask
            said = launched(name, loop.programs, scripted, *told, f"Write file {turn} and show it.")
            assert SAID.format(turn) in said
            assert "unrecognized configuration" not in said, said
    finally:
        if loop.after and (loop.programs / name).exists():
            launched(name, loop.programs, scripted, *loop.after)
    for turn in range(1, turns + 1):
        copy = work / f"copy-{turn}.txt"
        assert copy.read_text().strip() == f"Line {turn} of the model."
    answers = scripted.answers()[before:]
    assert len([path for path, _ in answers if path != "/v1/models"]) > 2 * turns
    assert [each for each in answers if each[1] != "200"] == []


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_an_agent_uses_its_tools(name: str, scripted: Scripted):
    take_turns(name, scripted, 1)


@slow
@pytest.mark.parametrize("name", list(LOOPS))
def test_an_agent_uses_its_tools_in_each_turn_of_a_session(name: str, scripted: Scripted):
    take_turns(name, scripted, TURNS)


@slow
def test_aider_edits_a_file_in_each_turn_of_a_session(scripted: Scripted):
    before = len(scripted.answers())
    notes = scripted.homes / "aider" / "work" / "notes.txt"
    for turn in range(TURNS):
        notes.unlink(missing_ok=True)
        launched("aider", CLIENTS / "aider" / "bin", scripted, *AIDER, f"Write it, {turn}.")
        assert notes.read_text() == "A line of the model.\n"
    assert [each for each in scripted.answers()[before:] if each[1] != "200"] == []

"""Grammars that no process survives, and what is left of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from linux import needs_linux

from mlx_manager.mlx_server.text.grammar.sandbox import Sandbox, SandboxVocabulary, Verdict
from mlx_manager.mlx_server.utils.daemon_threads import AbandonedError, Waiting
from mlx_manager.sandbox import read_frame, write_frame

MODEL = SandboxVocabulary(5000, {"<|end|>": 4999, "<tool_call>": 4321}, 4999)
RULES = "start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(9000)) + 'r9000: "x"\n'
# That names which fit one fit no other is found out for each two.
ENDLESS = {"patternProperties": {f"^a{i}[a-z]*$": {"type": "string"} for i in range(900)}}
OPTIONAL = "start: /" + "a?" * 30_000 + "a" * 30_000 + "/"


def grammar(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox(seconds=0.5)
    yield found
    found.close()


def verdict(sandbox: Sandbox, text: str, most: int | None = None) -> Verdict:
    return sandbox.verdict(MODEL, text, most, Waiting())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (RULES, "nested too deeply.*SIGSEGV"),
        (grammar(ENDLESS), r"more than (0\.5|10) s"),
        (grammar({"type": "thing"}), "Invalid type"),
        ('start: a\na: a "x"\n', "nothing fits it"),
    ],
)
def test_what_is_of_no_use_costs_a_process_at_most(sandbox: Sandbox, text: str, reason: str):
    error = verdict(sandbox, text).error
    assert error is not None
    assert re.search(reason, error)
    assert verdict(sandbox, grammar({"type": "object"})).error is None


@needs_linux("RLIMIT_DATA, which refuses memory")
def test_what_takes_too_much_memory_is_refused():
    own = Sandbox(memory=2**24)
    assert "more than 16 MiB" in str(verdict(own, OPTIONAL).error)
    own.close()


@pytest.mark.parametrize("text", ['start: <[4321]> "a" <|end|>', "start: <tool_call> /[a-z]+/"])
def test_special_tokens_are_the_models(sandbox: Sandbox, text: str):
    assert verdict(sandbox, text).error is None


def test_a_grammar_is_tried_once():
    own = Sandbox()
    text = grammar({"const": "once"})
    first = verdict(own, text)
    [process] = own._idle
    process.kill()
    # Nothing is asked of the process, which could not answer.
    assert verdict(own, text) is first
    assert "SIGKILL" not in str(verdict(own, text, 500).error)
    own.close()


def test_nobody_waits_for_what_nobody_wants_any_more(sandbox: Sandbox):
    waiting = Waiting()
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            sandbox.verdict(MODEL, OPTIONAL + "\n", None, waiting)
        except AbandonedError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    waiting.end()
    thread.join()
    assert len(failures) == 1
    with pytest.raises(AbandonedError):
        sandbox.verdict(MODEL, grammar({"const": "late"}), None, waiting)


def test_all_processes_end_with_the_sandbox():
    own = Sandbox()
    own.make_ahead()
    [process] = own._idle
    assert verdict(own, grammar({})).error is None
    own.close()
    assert process._process.returncode is not None


PARENT = """
import sys, time
from mlx_manager.mlx_server.text.grammar.sandbox import SandboxProcess
process = SandboxProcess()
print(process._process.pid, flush=True)
time.sleep(60)
"""


@needs_linux("/proc, to see that a process has ended")
def test_a_process_ends_with_a_program_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 30
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    # Nobody may be there to take note of its end.
    return not (status.exists() and ") Z " in status.read_text())


def test_frames_are_read_as_they_were_written(tmp_path: Path):
    values: list[Any] = [{"a": "é\ud83d" * 3}, [], "x" * 100_000]
    with (tmp_path / "frames").open("wb") as pipe:
        for value in values:
            write_frame(pipe, value)
        pipe.write(b"\0\0\0\x09abc")
    with (tmp_path / "frames").open("rb") as pipe:
        assert [read_frame(pipe) for _ in range(4)] == [*values, None]

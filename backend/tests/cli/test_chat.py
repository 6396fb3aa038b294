"""The chat, by its own terminal: what a person sees, and what a script gets."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import httpx
import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import PROGRAM, live_server
from other_server import OtherServer
from rich.console import Console
from thorough import slow

from mlx_manager.chat import session
from mlx_manager.chat.commands import Command, parse
from mlx_manager.chat.display import MarkdownDisplay, split_blocks
from mlx_manager.client import ServerClient
from mlx_manager.completion_stream import Chunk, Usage, read_line

QUESTION = "How do I change the port?"
PROMPT = "> "
Chat = Callable[..., pexpect.spawn]


@pytest.fixture
def chat(environment: dict[str, str]) -> Iterator[Chat]:
    """Starts the chat on a terminal of its own."""
    open_chats: list[pexpect.spawn] = []

    def start(*arguments: str) -> pexpect.spawn:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "mlx_manager.cli", "chat", *arguments],
            env=environment,
            encoding="utf-8",
            dimensions=(40, 120),
            timeout=60,
        )
        open_chats.append(child)
        return child

    yield start
    for child in open_chats:
        child.close(force=True)


def ask(child: pexpect.spawn, line: str) -> None:
    child.expect_exact(PROMPT)
    child.send(line + "\r")


def test_a_question_is_answered_with_counts_and_speed(chat: Chat, server: str) -> None:
    child = chat("--url", server, "--temperature", "0")
    ask(child, QUESTION)
    child.expect_exact("--port 9000")
    child.expect(r"\d+ tokens · [\d.,]+ tok/s · first after [\d.]+ s · prompt \d+")
    child.expect_exact(PROMPT)
    child.sendeof()
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


def test_the_address_is_shown_as_it_is(chat: Chat) -> None:
    child = chat("--url", "http://[fd00::1]:9", "--model", "m")
    child.expect_exact("at http://[fd00::1]:9 ")


def test_ctrl_c_stops_the_answer_and_not_the_program(chat: Chat, other: OtherServer) -> None:
    other.endless = True
    child = chat("--url", other.url)
    ask(child, "tell me everything")
    child.expect_exact("more more")
    child.sendintr()
    child.expect_exact("stopped")
    assert other.left.wait(30)
    other.endless = False
    ask(child, "and now?")
    child.expect_exact("7 tokens")
    said = other.bodies[-1]["messages"]
    assert [message["role"] for message in said] == ["user", "assistant", "user"]
    assert said[1]["content"].startswith("# A title")
    ask(child, "/exit")
    child.expect(pexpect.EOF)


class Impatient(StringIO):
    """Where somebody presses Ctrl-C at the second `more`, and again at the end of the line."""

    presses = 2

    def write(self, text: str) -> int:
        began = self.getvalue().endswith("more ")
        if began and self.presses:
            self.presses -= 1
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_twice_leaves_no_question_without_an_answer(other: OtherServer) -> None:
    other.endless = True
    client = ServerClient(other.url)
    chatting = session.Chat(client, "m", Console(file=Impatient()), {})
    with pytest.raises(KeyboardInterrupt):
        chatting._ask("tell me everything")
    assert chatting.conversation.messages() == []
    client.close()


def test_ctrl_c_at_the_prompt_clears_the_line(chat: Chat, other: OtherServer) -> None:
    child = chat("--url", other.url)
    child.expect_exact(PROMPT)
    child.send("nonsense")
    child.expect_exact("nonsense")
    child.sendintr()
    ask(child, "/exit")
    child.expect(pexpect.EOF)
    assert other.bodies == []


def test_ctrl_c_stops_a_command_and_not_the_program(chat: Chat) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        child = chat("--url", f"http://127.0.0.1:{silent.getsockname()[1]}", "--model", "m")
        ask(child, "/model")
        asked, _ = silent.accept()
        with asked:
            assert asked.recv(100).startswith(b"GET /v1/models")
            child.sendintr()
            child.expect_exact("stopped")
            ask(child, "/exit")
            child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


def test_commands_change_the_conversation(chat: Chat, other: OtherServer, tmp_path: Path) -> None:
    child = chat("--url", other.url, "--system", "Be brief.")
    ask(child, "one")
    child.expect_exact("7 tokens")
    ask(child, "/undo")
    child.expect_exact("taken back")
    ask(child, "/system Be long.")
    child.expect_exact("next question")
    ask(child, "/model other/two")
    child.expect_exact("answers from now on")
    ask(child, "two")
    child.expect_exact("7 tokens")
    ask(child, "/retry")
    child.expect_exact("7 tokens")
    assert other.bodies[-1]["model"] == "other/two"
    assert other.bodies[-1] == other.bodies[-2]
    assert other.bodies[-1]["messages"] == [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "two"},
    ]
    ask(child, f"/save {tmp_path}/said.json")
    child.expect_exact("saved in")
    saved = json.loads((tmp_path / "said.json").read_text())
    assert saved["messages"][-1]["reasoning_content"] == "Let me think."
    ask(child, "/save ~nobody-here/said.json")
    child.expect_exact("the home folder ~nobody-here is unknown")
    ask(child, "/clear all of it")
    child.expect_exact("/clear takes nothing after it")
    ask(child, "/exit codes: what do they mean?")
    child.expect_exact("/exit takes nothing after it")
    ask(child, "/clear")
    child.expect_exact("forgotten")
    ask(child, "/modle other/one")
    child.expect_exact("did you mean /model")


def test_a_refusal_is_shown_and_the_question_forgotten(chat: Chat, other: OtherServer) -> None:
    child = chat("--url", other.url)
    other.status = 500
    ask(child, "one")
    child.expect_exact("no such luck")
    other.status = 200
    ask(child, "two")
    child.expect_exact("7 tokens")
    assert [message["content"] for message in other.bodies[-1]["messages"]] == ["two"]


def test_pasted_lines_are_one_question_and_history_survives(
    chat: Chat, other: OtherServer, tmp_path: Path
) -> None:
    child = chat("--url", other.url)
    ask(child, "\x1b[200~first line\nsecond line\x1b[201~")
    child.expect_exact("7 tokens")
    assert other.bodies[-1]["messages"][0]["content"] == "first line\nsecond line"
    history = tmp_path / "state" / "mlx-manager" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    ask(child, "/exit")
    child.expect(pexpect.EOF)
    again = chat("--url", other.url)
    again.expect_exact(PROMPT)
    again.send("\x1b[A\x1b[A\r")
    again.expect_exact("7 tokens")
    assert other.bodies[-1]["messages"][0]["content"] == "first line\nsecond line"


def test_a_history_that_can_not_be_kept_is_in_nobodys_way(
    chat: Chat, other: OtherServer, tmp_path: Path
) -> None:
    (tmp_path / "state" / "mlx-manager" / "chat_history").mkdir(parents=True)
    child = chat("--url", other.url)
    ask(child, "one")
    child.expect_exact("7 tokens")
    assert "Traceback" not in child.before
    child.expect_exact(PROMPT)
    child.send("\x1b[A\r")
    child.expect_exact("7 tokens")
    assert [message["content"] for message in other.bodies[-1]["messages"]][-1] == "one"


def test_without_a_server_one_runs_for_the_session(run) -> None:
    done = run("chat", "--once", QUESTION, "--temperature", "0")
    assert "--port 9000" in done.stdout
    assert done.stdout.count("\n") == 1
    assert "starting one for this session" in done.stderr
    assert "tok/s" in done.stderr


@pytest.mark.parametrize("during_an_answer", [pytest.param(False, marks=slow), True])
def test_the_sessions_server_ends_where_the_chat_is_killed(
    chat: Chat, during_an_answer: bool
) -> None:
    child = chat("--system", "Count.", "--max-tokens", "8000")
    child.expect_exact(PROMPT)
    (server,) = children_of(child.pid)
    if during_an_answer:
        child.send(QUESTION + "\r")
        child.expect_exact("port")
    child.kill(signal.SIGKILL)
    child.wait()
    until = time.monotonic() + 30
    while runs(server):
        assert time.monotonic() < until, "the server outlives its chat"
        time.sleep(0.1)


@pytest.mark.parametrize("stdin", ["<&-", pytest.param("</dev/null", marks=slow)])
def test_a_server_of_its_own_does_not_mind_where_its_stdin_ends(tmp_path: Path, stdin: str) -> None:
    command = ("/bin/sh", "-c", f'exec "$0" serve {stdin}', str(PROGRAM))
    with live_server(tmp_path / "log", command) as server:
        body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
        assert httpx.get(f"{server.url}/readyz").is_success
        assert server.process.poll() is None


def children_of(pid: int) -> list[int]:
    said = subprocess.run(["ps", "-Ao", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [line.split() for line in said.stdout.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only what is left of it for init to read."""
    said = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return said.stdout.strip() != "" and not said.stdout.startswith("Z")


@pytest.mark.parametrize("colours", [{}, {"FORCE_COLOR": "1"}], ids=["", "FORCE_COLOR"])
def test_once_prints_the_answer_alone(run, other: OtherServer, colours: dict[str, str]) -> None:
    done = run("chat", "--url", other.url, "--once", "why?", input="because\n", **colours)
    assert done.stdout == "# A title\n\nSome *text*, a `word`.\n\n- one\n- two\n"
    assert other.bodies[0]["messages"] == [{"role": "user", "content": "why?\n\nbecause"}]
    assert "7 tokens" in done.stderr


def stream_of(*pieces: str) -> bytes:
    """An answer as servers write it that escape nothing but what JSON has them."""
    said = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
    plain = [re.sub(r"\\u(?!d[89a-f])(....)", lambda m: chr(int(m[1], 16)), line) for line in said]
    lines = [*plain, '{"choices": [{"delta": {}, "finish_reason": "stop"}]}']
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def test_an_answer_has_the_line_separators_that_the_server_sent(run, other: OtherServer) -> None:
    other.strange = stream_of("one\u2028two\u2029", "\x85three")
    done = run("chat", "--url", other.url, "--model", "m", "--once", "why?", "--json")
    assert json.loads(done.stdout)["text"] == "one\u2028two\u2029\x85three"


def test_characters_that_come_in_halves_are_whole_in_what_follows(
    chat: Chat, other: OtherServer, tmp_path: Path
) -> None:
    other.strange = stream_of("well \ud83d", "\ude00 \ud83d")
    child = chat("--url", other.url, "--model", "m")
    ask(child, "one")
    child.expect_exact("first after")
    ask(child, "two")
    child.expect_exact("first after")
    assert other.bodies[1]["messages"][1]["content"] == "well \U0001f600 \ufffd"
    ask(child, f"/save {tmp_path}/said.md")
    child.expect_exact("saved in")


def test_what_is_saved_is_utf_8_whatever_the_terminal_speaks(
    chat: Chat, other: OtherServer, environment: dict[str, str], tmp_path: Path
) -> None:
    environment |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    other.strange = stream_of("brüsk")
    child = chat("--url", other.url, "--model", "m")
    ask(child, "how?")
    child.expect_exact("first after")
    ask(child, f"/save {tmp_path}/said.json")
    child.expect_exact("saved in")
    assert "brüsk" in (tmp_path / "said.json").read_text("utf-8")


def test_an_answer_that_goes_elsewhere_leaves_the_terminal_as_it_is(
    environment: dict[str, str], other: OtherServer, tmp_path: Path
) -> None:
    other.endless = True
    file = tmp_path / "answer"
    python = shlex.quote(sys.executable)
    command = f"exec {python} -m mlx_manager.cli chat --once why? --url {other.url} >{file}"
    child = pexpect.spawn("sh", ["-c", command], env=environment)
    while not (file.exists() and "more" in file.read_text()):
        assert child.isalive()
    # A pager may have changed it, which is left while the answer goes on.
    assert child.getecho()
    child.close(force=True)


def test_a_question_is_answered_in_the_background(
    environment: dict[str, str], other: OtherServer
) -> None:
    python = shlex.quote(sys.executable)
    command = f"{python} -m mlx_manager.cli chat --once why? --url {other.url} --plain"
    script = f"set -m; {command} & wait"
    child = pexpect.spawn("sh", ["-c", script], env=environment, encoding="utf-8", timeout=60)
    child.expect_exact("- two")
    child.expect(pexpect.EOF)
    child.close()


def test_piped_text_is_the_question_and_json_the_answer(run, other: OtherServer) -> None:
    done = run("chat", "--json", "--max-tokens", "9", input="why?\n", MLX_MANAGER_URL=other.url)
    answer = json.loads(done.stdout)
    assert answer["reasoning"] == "Let me think."
    assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 7, "cached_tokens": 0}
    assert other.bodies[0]["max_tokens"] == 9


def test_the_key_is_sent_from_the_environment(run, other: OtherServer) -> None:
    run("chat", "--url", other.url + "/v1", "--once", "why?", MLX_MANAGER_API_KEY="sesame")
    assert other.headers[0]["authorization"] == "Bearer sesame"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--url", "http://127.0.0.1:1", "--once", "x"), 3, "mlx-manager serve"),
        (("--url", "ftp://nowhere", "--once", "x"), 2, "ftp"),
        ((), 2, "no question"),
    ],
)
def test_failures_say_what_to_do(run, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = run("chat", *arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert done.stdout == ""


def test_an_unknown_model_is_refused_with_those_on_offer(run, server: str) -> None:
    done = run("chat", "--url", server, "--model", "no/such", "--once", "x")
    assert done.returncode == 4
    assert "mlx-manager/demo" in done.stderr


def test_a_model_that_cannot_be_had_is_told_without_a_server(run) -> None:
    done = run("chat", "--model", "no/such", "--once", "x")
    assert done.returncode == 1
    assert "no/such" in done.stderr
    assert "Traceback" not in done.stderr


@given(st.text(alphabet="#-`*1.| \n\r\x0b\u2028ab>", max_size=60), st.integers(0, 60))
def test_blocks_come_whole_wherever_the_stream_is_cut(text: str, cut: int) -> None:
    finished, pending = split_blocks(text[:cut])
    assert finished + pending == text[:cut]
    again, rest = split_blocks(pending + text[cut:])
    assert finished + again + rest == text


class SlowTerminal(StringIO):
    """`now`: the time by a clock that its writing alone has go on."""

    now = 0.0

    def write(self, text: str) -> int:
        self.now += 1.0
        return super().write(text)


def test_drawing_takes_no_more_than_half_the_time() -> None:
    out = SlowTerminal()
    console = Console(file=out, force_terminal=True, width=60, height=20)
    display = MarkdownDisplay(console, reasoning=True, clock=lambda: out.now)
    display.show(Chunk(text="```python\n"))
    before = out.now
    for number in range(300):
        out.now += 0.1
        display.show(Chunk(text=f"x = {number}\n"))
    assert out.now - before < 3 * 300 * 0.1
    display.end()
    assert "299" in out.getvalue()


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("/model  a/b ", Command("/model", "a/b")),
        ("/exit", Command("/exit")),
        ("/system\nBe brief.\nBe kind.", Command("/system", "Be brief.\nBe kind.")),
        ("//etc is a folder", "/etc is a folder"),
        ("what is a/b?", "what is a/b?"),
        ("   ", ""),
    ],
)
def test_lines_are_commands_or_questions(line: str, meant: object) -> None:
    assert parse(line) == meant


@pytest.mark.parametrize(
    ("line", "chunk"),
    [
        ("", None),
        (": keep-alive", None),
        ("data: [DONE]", None),
        ('data:{"choices":[]}', Chunk()),
        ('data: {"choices": [{"delta": {"content": null}}], "usage": null}', Chunk()),
        (
            'data: {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f"}}]}}]}',
            Chunk(tool_calls="f"),
        ),
        (
            'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}',
            Chunk(usage=Usage(3, 4)),
        ),
        ('data: {"error": {"message": "over"}}', Chunk(error="over")),
        ('data: {"error": "over"}', Chunk(error="over")),
    ],
)
def test_stream_lines_of_any_server_are_read(line: str, chunk: Chunk | None) -> None:
    assert read_line(line) == chunk


@pytest.mark.parametrize(
    "data",
    [
        "{",
        "[]",
        "3",
        '"text"',
        '{"choices": 3}',
        '{"choices": [3]}',
        '{"choices": [{"delta": {"content": [{"type": "text", "text": "hi"}]}}]}',
        '{"choices": [{"delta": {"reasoning": 3}}]}',
        '{"choices": [], "usage": {"prompt_tokens": "3"}}',
    ],
)
def test_nonsense_in_a_stream_is_an_error(data: str) -> None:
    chunk = read_line(f"data: {data}")
    assert chunk is not None
    assert "no chat completion chunk" in chunk.error

"""What a server's log says of its requests, and what it keeps to itself."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import live_server
from scripted import ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app
from mlx_manager.mlx_server.observability.logs import JsonFormatter, PrettyFormatter, configure

CHAT = "/v1/chat/completions"
SECRET = "the-word-nobody-else-may-read"
NOT_SANE = ["two words", "a\tb", "x" * 129]
HELLO = {"messages": [{"role": "user", "content": f"Hello! {SECRET}"}], "max_tokens": 5}


@contextmanager
def served(folder: Path, **settings: object) -> Iterator[httpx.Client]:
    with (
        live_server(folder / "log.txt", **settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def lines(folder: Path) -> list[dict[str, Any]]:
    found = (folder / "log.txt").read_text().splitlines()
    return [json.loads(line) for line in found if line.startswith("{")]


def access(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "method" in line]


def test_every_answer_leaves_a_line_under_its_id_and_nothing_of_what_was_said(tmp_path: Path):
    with served(tmp_path, log_format="json") as client:
        own = {"x-request-id": "mine-1", "authorization": "Bearer sk-not-for-the-log"}
        answers = [
            client.post(CHAT, json=HELLO, headers=own),
            client.post(CHAT, json=HELLO | {"stream": True}),
            client.post("/v1/messages", json=HELLO),
            client.post(CHAT, json=HELLO | {"temperature": 9}),
            client.get("/nowhere%0Aelse?token=secret"),
            *(client.get("/v1/models", headers={"x-request-id": bad}) for bad in NOT_SANE),
        ]
        client.get("/health")
    said = access(tmp_path)
    assert [line["status"] for line in said] == [200, 200, 200, 422, 404, 200, 200, 200]
    for line, answer in zip(said, answers, strict=True):
        assert line["request_id"] == answer.headers["x-request-id"]
        assert line["request_id"] not in NOT_SANE
        assert line["ms"] > 0
    body = answers[0].json()
    assert said[0]["request_id"] == "mine-1"
    assert said[0]["model"] == "mlx-manager/demo"
    assert said[0]["protocol"] == "chat"
    assert said[0]["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert said[0]["completion_tokens"] == body["usage"]["completion_tokens"]
    assert said[0]["outcome"] == body["choices"][0]["finish_reason"]
    assert said[0]["first_token_ms"] <= said[0]["ms"]
    assert said[2]["protocol"] == "messages"
    assert said[4]["path"] == "/nowhere%0Aelse"
    text = (tmp_path / "log.txt").read_text()
    assert SECRET not in text
    assert "sk-not-for-the-log" not in text
    assert "token=secret" not in text


async def test_prompts_are_logged_for_who_asks_for_it(caplog: pytest.LogCaptureFixture):
    pool = ScriptedPool(ScriptedBackend(lambda _: says("Hello")))
    with caplog.at_level(logging.INFO):
        for wanted in (False, True):
            app = create_app(MLXServerSettings(log_prompts=wanted), pool)
            async with app.router.lifespan_context(app):
                await app.state.server.started.wait()
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                    (await client.post(CHAT, json=HELLO)).raise_for_status()
            assert (SECRET in caplog.text) is wanted


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        ("/v1/embeddings", {"input": "one"}, ["one"]),
        ("/v1/embeddings", {"input": ["one", [5, 6]]}, ["one", [5, 6]]),
        ("/v1/rerank", {"query": "q", "documents": ["one", {"text": "two"}]}, ["q", "one", "two"]),
    ],
)
async def test_what_is_embedded_or_ranked_is_logged_for_who_asks_for_prompts(
    path: str, body: dict[str, Any], shown: list[Any], caplog: pytest.LogCaptureFixture
):
    app = create_app(
        MLXServerSettings(log_prompts=True),
        ScriptedPool(ScriptedBackend(lambda _: says("x"))),
    )
    with caplog.at_level(logging.INFO):
        async with app.router.lifespan_context(app):
            await app.state.server.started.wait()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                (await client.post(path, json=body)).raise_for_status()
    [line] = [record for record in caplog.records if "is asked" in record.getMessage()]
    assert line.getMessage() == f"mlx-manager/demo is asked: {json.dumps(shown)}"
    assert json.loads(json.dumps(line.facts["prompt"])) == shown


@pytest.mark.parametrize(("value", "coloured"), [(None, True), ("", True), ("1", False)])
def test_a_terminal_has_no_colours_where_none_are_wanted(
    value: str | None, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable asks for nothing: https://no-color.org"""
    if value is None:
        monkeypatch.delenv("NO_COLOR", raising=False)
    else:
        monkeypatch.setenv("NO_COLOR", value)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    handler = configure("info", "pretty", terminal)
    try:
        facts = {"msg": "hello", "levelno": logging.ERROR, "levelname": "ERROR", "request_id": ""}
        handler.emit(logging.makeLogRecord(facts))
    finally:
        logging.getLogger().removeHandler(handler)
    assert ("\x1b[" in terminal.getvalue()) == coloured


@given(st.text())
def test_whatever_is_logged_stays_on_its_line(text: str):
    for formatter in (JsonFormatter(), PrettyFormatter(colour=False)):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        record = logging.LogRecord("x", logging.INFO, "", 0, "%s", (text,), None)
        record.request_id = ""
        handler.emit(record)
        assert stream.getvalue().count("\n") == 1
        assert "\x1b" not in stream.getvalue()
        if isinstance(formatter, JsonFormatter):
            assert json.loads(stream.getvalue())["message"] == text


def test_a_warning_of_a_library_is_a_line_of_the_log():
    program = (
        "import warnings; from mlx_manager.mlx_server.observability import logs; "
        "logs.configure('info', 'json'); warnings.warn('overflow')"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    [line] = said.stderr.splitlines()
    assert "UserWarning: overflow" in json.loads(line)["message"]


def test_a_traceback_is_kept():
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "", 0, "oops", (), (type(error), error, error.__traceback__)
        )
    record.request_id = "req-1"
    found = json.loads(JsonFormatter().format(record))
    assert "ValueError: broken" in found["exception"]
    assert found["request_id"] == "req-1"
    assert "ValueError: broken" in PrettyFormatter(colour=True).format(record)


ODD_MODULE = """
import sys, threading, warnings
print("printed by a library")
sys.stderr.write("half a line, ")
sys.stderr.write("and its end\\nand \\x1b[31mpaint\\n")
warnings.warn("of old ways")
def fail(): raise ValueError("in a thread\\nof two lines")
thread = threading.Thread(target=fail); thread.start(); thread.join()
class Bad:
    def __del__(self): raise OSError("while collected")
bad = Bad(); del bad
"""


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def started(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A server that says what it has to say as it starts, and ends; its log is JSON."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_SERVER_")}
    return subprocess.run(
        [sys.executable, "-m", "mlx_manager.cli", "serve", "--port", "0", *arguments],
        env=environment | {"MLX_SERVER_LOG_FORMAT": "json"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--max-rows", "0"], 2, "--max-rows (MLX_SERVER_MAX_ROWS)"),
        (["--host", "0.0.0.0"], 2, "without a key"),
        (["--models-file", "/nowhere.toml"], 2, "/nowhere.toml can't be read"),
        (["--model", "/nowhere"], 1, "the default model can't be served"),
    ],
)
def test_what_is_in_the_way_of_a_start_is_json_too(
    tmp_path: Path, arguments: list[str], code: int, said: str
):
    done = started(tmp_path, *arguments)
    assert done.returncode == code
    assert done.stdout == ""
    errors = [line for line in json_lines(done.stderr) if line["level"] == "error"]
    assert said in errors[-1]["message"]


def test_where_a_server_is_ready_is_one_json_object(tmp_path: Path):
    with served(tmp_path, log_format="json") as client:
        assert client.get("/v1/models").status_code == 200
    for line in (tmp_path / "log.txt").read_text().splitlines():
        json.loads(line)


def test_all_that_libraries_write_is_json_and_an_exception_is_one_line():
    script = f"from mlx_manager.mlx_server.observability import logs; logs.capture_output(); logs.configure('info', 'json')\n{ODD_MODULE}\nlogs.tell('up\\nfurther', sys.stdout, url='here')\nprint('no end', end='')\nlogs.let_go()\nraise KeyError('at the end')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    out, err = json_lines(done.stdout), json_lines(done.stderr)
    assert [line["message"] for line in out] == ["printed by a library", "up", "no end"]
    assert out[1]["url"] == "here"
    messages = [line["message"] for line in err]
    assert messages[:2] == ["half a line, and its end", "and \x1b[31mpaint"]
    assert "of old ways" in messages[2]
    assert [line["level"] for line in err[2:]] == ["warning", "critical", "critical", "critical"]
    assert "ValueError" in messages[3]
    assert "in fail" in err[3]["exception"]
    assert "OSError" in messages[4]
    assert "KeyError" in messages[5]
    assert done.returncode == 1

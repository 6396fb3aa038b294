"""Whoever answers, and whatever stands between: a message and an exit code, never a traceback."""

from __future__ import annotations

import json

import pytest
from other_server import OtherServer

DEMO = "mlx-manager/demo"
COMMANDS = [
    ("ps",),
    ("load", "m"),
    ("unload", "m"),
    ("cancel", "x"),
    ("chat", "--once", "hi"),
    ("chat", "--once", "hi", "--model", "m", "--json"),
    ("bench", "-n", "1"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("answer", [b"<html>", b"[1]", b'{"hello": 1}', b'{"data": [{"name": 1}]}'])
def test_a_server_of_another_kind_is_told_as_such(
    run, other: OtherServer, command: tuple[str, ...], answer: bytes
) -> None:
    other.strange = answer
    done = run(*command, "--url", other.url)
    assert done.returncode == 1
    assert f"{other.url}/v1/" in done.stderr
    assert "did not answer as a model server does" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", [("chat", "--once", "hi"), ("bench",)])
def test_a_server_without_models_is_told_as_such(
    run, other: OtherServer, command: tuple[str, ...]
) -> None:
    other.strange = b'{"data": []}'
    done = run(*command, "--url", other.url)
    assert done.returncode == 4
    assert "offers no model" in done.stderr


def test_an_answer_that_breaks_off_is_no_whole_answer(run, other: OtherServer) -> None:
    other.cut = True
    done = run("chat", "--url", other.url, "--once", "hi")
    assert done.returncode == 3
    assert "A title" in done.stdout
    assert "ended the answer before it was whole" in done.stderr
    assert "mlx-manager serve" not in done.stderr
    assert run("chat", "--url", other.url, "--once", "hi", "--json").stdout == ""


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("ps",), "--admin-token"),
        (("chat", "--once", "hi"), "--api-key"),
        (("bench", "--model", "m"), "--api-key"),
        (("rm", "mine", "--yes"), "--api-key"),
    ],
)
@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_can_not_be_sent_is_not_tried_and_not_shown(
    run, server: str, models_dir, command: tuple[str, ...], option: str, key: str
) -> None:
    done = run(*command, "--url", server, option, key, MLX_SERVER_MODELS_DIR=str(models_dir))
    assert done.returncode == 2
    assert "can have" in done.stderr
    assert key not in done.stderr
    assert (models_dir / "mine").is_dir()


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1", "nonsense"])
def test_no_proxy_stands_before_this_machines_own_server(program, server: str, proxy: str) -> None:
    done = program(
        "ps",
        "--url",
        server,
        "--json",
        ALL_PROXY=proxy,
        HTTP_PROXY=proxy,
        MLX_SERVER_ADMIN_TOKEN="open-sesame",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["models"][0]["id"] == DEMO


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_host_that_can_be_none_is_a_usage_error(run, command: tuple[str, ...], host: str) -> None:
    done = run(*command, "--url", f"http://{host}")
    assert done.returncode == 2
    assert f"--url (MLX_MANAGER_URL): http://{host} is no address" in done.stderr
    done = run(*command, MLX_SERVER_HOST=host)
    assert done.returncode == 2
    assert f"MLX_SERVER_HOST with MLX_SERVER_PORT: http://{host}:1 is no address" in done.stderr


def test_a_proxy_whose_host_can_be_none_is_told(run) -> None:
    done = run("ps", "--url", "http://there.invalid", ALL_PROXY="http://a..b:1")
    assert done.returncode == 3
    assert "No server answers at http://there.invalid" in done.stderr


def test_a_proxy_that_can_not_be_used_is_told(run) -> None:
    done = run("ps", "--url", "http://there.invalid", ALL_PROXY="nonsense://x")
    assert done.returncode == 2
    assert "proxy" in done.stderr


def test_a_request_of_any_name_is_asked_for_by_that_name(run, server: str) -> None:
    done = run("cancel", "a?b#c", "--url", server, MLX_SERVER_ADMIN_TOKEN="open-sesame")
    assert done.returncode == 4
    assert "'a?b#c'" in done.stderr


def test_a_request_whose_name_is_no_text_is_not_found(run, server: str) -> None:
    done = run("cancel", "\udcff", "--url", server, MLX_SERVER_ADMIN_TOKEN="open-sesame")
    assert done.returncode == 4
    assert "under way" in done.stderr


def test_bytes_that_are_no_text_are_refused(run, server: str) -> None:
    done = run("chat", "--url", server, "--once", "\udcff")
    assert done.returncode == 1
    assert "no UTF-8" in done.stderr

"""ps, load, unload and cancel against real servers, with a token and without."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import live_server
from other_server import OtherServer

from mlx_manager.client import ServerClient, ServerRefused
from mlx_manager.completion_stream import Chunk

DEMO = "mlx-manager/demo"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a token."""
    log = tmp_path_factory.mktemp("guarded") / "log"
    with live_server(log, admin_token="open-sesame") as live:
        yield live.url


@pytest.fixture
def endless(server: str) -> Iterator[list[Chunk | Exception]]:
    """A request that runs until it is cancelled; what came of it."""
    client = ServerClient(server)
    got: list[Chunk | Exception] = []
    begun = threading.Event()

    def read() -> None:
        body = {
            "model": DEMO,
            "messages": [{"role": "user", "content": "count"}],
            "ignore_eos": True,
            "max_tokens": 8000,
        }
        try:
            for chunk in client.chat(body):
                got.append(chunk)
                begun.set()
        except ServerRefused as error:
            got.append(error)
        begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    yield got
    reader.join(60)
    client.close()


def test_ps_shows_models_and_requests_and_cancel_ends_one(
    run, server: str, endless: list[Chunk | Exception]
) -> None:
    found = json.loads(run("ps", "--url", server, "--json").stdout)
    (model,) = found["models"]
    (request,) = found["requests"]
    assert (model["id"], model["state"]) == (DEMO, "loaded")
    assert (request["model"], request["protocol"], request["state"]) == (DEMO, "chat", "running")
    shown = run("ps", "--url", server).stdout
    assert request["id"] in shown
    assert "until room is needed" in shown
    refused = run("unload", DEMO, "--url", server)
    assert refused.returncode == 5
    assert "answering" in refused.stderr
    done = run("cancel", request["id"], "--url", server)
    assert done.stdout == f"{request['id']} is cancelled.\n"


def test_cancelled_requests_are_told(run, server: str, endless: list[Chunk | Exception]) -> None:
    (request,) = json.loads(run("ps", "--url", server, "--json").stdout)["requests"]
    run("cancel", request["id"], "--url", server)
    again = run("cancel", "chatcmpl-none", "--url", server)
    assert again.returncode == 4
    assert "chatcmpl-none" in again.stderr


def test_a_model_goes_and_comes_back(run, guarded: str) -> None:
    token = {"MLX_SERVER_ADMIN_TOKEN": "open-sesame"}
    assert "are free again" in run("unload", DEMO, "--url", guarded, **token).stdout
    assert "was not loaded" in run("unload", DEMO, "--url", guarded, **token).stdout
    assert "No model is loaded." in run("ps", "--url", guarded, **token).stdout
    done = run("load", DEMO, "--pin", "--url", guarded, **token)
    assert f"{DEMO} is loaded" in done.stdout
    assert "pinned" in run("ps", "--url", guarded, **token).stdout
    refused = run("load", "no/such", "--url", guarded, **token)
    assert refused.returncode == 4
    assert DEMO in refused.stderr


def test_without_the_token_nothing_is_told(run, guarded: str) -> None:
    for arguments in (("ps",), ("load", DEMO), ("unload", DEMO), ("cancel", "x")):
        done = run(*arguments, "--url", guarded)
        assert done.returncode == 5
        assert "MLX_SERVER_ADMIN_TOKEN" in done.stderr
        assert done.stdout == ""


def test_a_server_that_is_not_ours_has_no_admin_api(run, other: OtherServer) -> None:
    done = run("ps", "--url", other.url)
    assert done.returncode == 4
    assert f"{other.url}/v1/admin/models answered 404" in done.stderr


def test_no_server_no_answer(run, tmp_path: Path) -> None:
    done = run("ps")
    assert done.returncode == 3
    assert "mlx-manager serve" in done.stderr

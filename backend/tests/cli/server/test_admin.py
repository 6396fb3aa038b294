"""ps, load, unload and cancel against real servers, with a token and without."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from other_server import OtherServer

from mlx_manager.client import ServerClient, ServerRefused

DEMO = "mlx-manager/demo"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(run: Run) -> Run:
    """As the server's owner."""
    return partial(run, MLX_SERVER_ADMIN_TOKEN="open-sesame")


@dataclass
class Endless:
    """A request that runs until it is cancelled, and the error that ended it."""

    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    error: str = ""

    def read(self, client: ServerClient) -> None:
        question = [{"role": "user", "content": "count"}]
        body = {"model": DEMO, "messages": question, "ignore_eos": True, "max_tokens": 8000}
        try:
            for _ in client.chat(body):
                self.begun.set()
        except ServerRefused as error:
            self.error = str(error)
        self.begun.set()
        self.ended.set()


@pytest.fixture
def endless(server: str) -> Iterator[Endless]:
    request, client = Endless(), ServerClient(server)
    reader = threading.Thread(target=request.read, args=[client])
    reader.start()
    assert request.begun.wait(60)
    yield request
    reader.join(60)
    client.close()


def test_ps_shows_models_and_requests_and_cancel_ends_one(
    run, server: str, endless: Endless
) -> None:
    found = json.loads(run("ps", "--url", server, "--json").stdout)
    (model,) = found["models"]
    (request,) = found["requests"]
    assert (model["id"], model["state"]) == (DEMO, "loaded")
    assert (request["model"], request["protocol"], request["state"]) == (DEMO, "chat", "running")
    shown = run("ps", "--url", server).stdout
    assert request["id"] in shown
    assert "until room is needed" in shown
    assert "accepted" in shown
    # Two heads of keys and two of values, of 64 numbers each, in 5 layers.
    assert "5.00 kB float32" in shown
    refused = run("unload", DEMO, "--url", server)
    assert refused.returncode == 5
    assert "answering" in refused.stderr
    done = run("cancel", request["id"], "--url", server)
    assert done.stdout == f"{request['id']} is cancelled.\n"
    assert endless.ended.wait(60)
    assert "ended this request" in endless.error
    again = run("cancel", "chatcmpl-none", "--url", server)
    assert again.returncode == 4
    assert "chatcmpl-none" in again.stderr


def test_ps_says_why_prefixes_missed(run, server: str) -> None:
    client = ServerClient(server)
    for day in ("Monday", "Tuesday"):
        system = {
            "role": "system",
            "content": f"{'Be brief. ' * 40}It is {day}. {'Be kind. ' * 20}",
        }
        question = {"role": "user", "content": "Hello"}
        list(client.chat({"model": DEMO, "messages": [system, question], "max_tokens": 1}))
    client.close()
    last = json.loads(run("ps", "--why", "--url", server, "--json").stdout)["calls"][-1]
    assert last["missed"] == "messages[0] (system) from 256 on has changed"
    assert (
        "messages[0] (system) from 256 on has changed" in run("ps", "--why", "--url", server).stdout
    )
    assert "messages[0]" not in run("ps", "--url", server).stdout


def test_ps_watches_until_it_is_interrupted(
    server: str, endless: Endless, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "mlx_manager.cli", "ps", "--watch", "--url", server]
    own = environment | {"MLX_SERVER_ADMIN_TOKEN": "open-sesame"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as watching:
        assert watching.stdout is not None
        shown = (line for line in watching.stdout if "running (" in line)
        request = next(shown).split()[0]
        assert request in next(shown)
        client = ServerClient(server, "open-sesame")
        client.post(f"/v1/admin/requests/{request}/cancel", {}, "cancelled")
        client.close()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130


def test_a_model_goes_and_comes_back(run, server: str) -> None:
    assert "are free again" in run("unload", DEMO, "--url", server).stdout
    assert "was not loaded" in run("unload", DEMO, "--url", server).stdout
    assert "No model is loaded." in run("ps", "--url", server).stdout
    done = run("load", DEMO, "--pin", "--url", server)
    assert f"{DEMO} is loaded" in done.stdout
    assert "pinned" in run("ps", "--url", server).stdout
    done = run("unpin", DEMO, "--url", server)
    assert done.stdout == f"{DEMO} is no longer pinned. It stays loaded until room is needed.\n"
    assert "until room is needed" in run("ps", "--url", server).stdout
    assert json.loads(run("unpin", DEMO, "--url", server, "--json").stdout)["pinned"] is False
    assert run("unpin", "no/such", "--url", server).returncode == 4
    refused = run("load", "no/such", "--url", server)
    assert refused.returncode == 4
    assert DEMO in refused.stderr


def test_without_the_token_nothing_is_told(run, server: str) -> None:
    for arguments in (("ps",), ("load", DEMO), ("unload", DEMO), ("unpin", DEMO), ("cancel", "x")):
        done = run(*arguments, "--url", server, MLX_SERVER_ADMIN_TOKEN="wrong")
        assert done.returncode == 5
        assert "MLX_SERVER_ADMIN_TOKEN" in done.stderr
        assert done.stdout == ""


def test_a_server_that_is_not_ours_has_no_admin_api(run, other: OtherServer) -> None:
    done = run("ps", "--url", other.url)
    assert done.returncode == 4
    assert f"{other.url}/v1/admin/state answered 404" in done.stderr


def test_no_server_no_answer(run) -> None:
    done = run("ps")
    assert done.returncode == 3
    assert "mlx-manager serve" in done.stderr


@pytest.mark.parametrize("command", [("ps",), ("bench",), ("chat", "--once", "hi"), ("rm", "mine")])
@pytest.mark.parametrize(
    "url", ["http://here:abc", "http://here:99999", "http://[::1", "here", "ftp://here", "http://"]
)
def test_an_address_that_can_not_be_is_a_usage_error(
    run, command: tuple[str, ...], url: str, models_dir: Path
) -> None:
    result = run(*command, "--url", url, MLX_SERVER_MODELS_DIR=str(models_dir))
    assert result.returncode == 2
    assert result.stderr.startswith(f"mlx-manager: --url (MLX_MANAGER_URL): {url} is no address")
    assert (models_dir / "mine").is_dir()


@pytest.mark.parametrize("command", [("ps",), ("chat", "--once", "hi")])
def test_a_port_of_the_environment_that_can_not_be_is_named(run, command: tuple[str, ...]) -> None:
    result = run(*command, MLX_SERVER_PORT="abc")
    assert result.returncode == 2
    assert "MLX_SERVER_HOST with MLX_SERVER_PORT: http://127.0.0.1:abc is no add" in result.stderr

"""Ollama's API over HTTP: the embedded model, an embedding model, and a hub of our own."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_hub import fake_hub
from here import served_here
from live import PROGRAM, live_server
from tiny_encoders import make_tiny_encoder
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.config import DEMO_MODEL as DEMO
from mlx_manager.mlx_server.config import EMBEDDED

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_encoder(folder / "encoder", "bert")
    with served_here(models_dir=folder) as client:
        yield client


def asked(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"stream": False, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_clients_see_that_a_server_runs(client: httpx.Client):
    assert client.get("/").text == "Ollama is running"
    assert client.head("/").status_code == 200
    assert client.get("/api/version").json()["version"]


@pytest.mark.parametrize("name", [DEMO, f"{DEMO}:latest"])
def test_a_stream_is_the_whole_answer_in_lines(client: httpx.Client, name: str):
    body = {"model": name, "messages": says("How do I stop the server?"), "options": {"seed": 1}}
    body["options"] = {"temperature": 0}
    whole = asked(client, "/api/chat", **body)
    with client.stream("POST", "/api/chat", json=body) as streamed:
        assert streamed.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in streamed.iter_lines()]
    assert "Ctrl-C" in whole["message"]["content"]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert len(lines) > 1
    assert lines[-1]["eval_count"] == whole["eval_count"]
    assert whole["total_duration"] >= whole["eval_duration"] > 0
    assert {line["model"] for line in lines} == {name}


@pytest.mark.parametrize("page", [{}, {"origin": "https://elsewhere"}, {"referer": "http://x/"}])
def test_ollamas_own_examples_declare_no_json_and_a_page_must(
    client: httpx.Client, page: dict[str, str]
):
    headers = {"content-type": "application/x-www-form-urlencoded", **page}
    body = json.dumps({"messages": says("Hello"), "stream": False, "options": {"num_predict": 1}})
    answer = client.post("/api/chat", content=body, headers=headers)
    assert answer.status_code == (400 if page else 200)


def test_tools_are_called_and_their_results_are_read(client: httpx.Client):
    messages: list[dict[str, Any]] = list(says("What is 17 + 25?"))
    called = asked(client, "/api/chat", model=DEMO, messages=messages, tools=[ADD])["message"]
    assert called["tool_calls"][0]["function"]["arguments"] == {"a": 17, "b": 25}
    messages += [called, {"role": "tool", "tool_name": "add", "content": "42"}]
    answer = asked(client, "/api/chat", model=DEMO, messages=messages, tools=[ADD])["message"]
    assert "42" in answer["content"]


def test_an_answer_fits_its_schema(client: httpx.Client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    body = {"model": DEMO, "format": schema, "options": {"temperature": 0}}
    text = asked(client, "/api/chat", messages=says("Ada is 36."), **body)
    assert json.loads(text["message"]["content"]).keys() == {"name", "age"}
    body["format"] = "json"
    anything = asked(client, "/api/generate", prompt="Write JSON.", **body)
    assert isinstance(json.loads(anything["response"]), dict)


def test_a_prompt_is_gone_on_from_as_it_is(client: httpx.Client):
    options = {"temperature": 0, "num_predict": 20}
    answer = asked(
        client,
        "/api/generate",
        model=DEMO,
        prompt="The days of the week are",
        raw=True,
        options=options,
    )
    assert answer["response"].startswith(" Monday, Tuesday")
    assert answer["eval_count"] <= 20


def test_a_model_is_unloaded_and_loaded_by_itself(client: httpx.Client):
    assert asked(client, "/api/generate", model=DEMO, keep_alive=0)["done_reason"] == "unload"
    while any(m["name"] == f"{DEMO}:latest" for m in client.get("/api/ps").json()["models"]):
        pass
    assert asked(client, "/api/chat", model=DEMO, keep_alive="10m")["done_reason"] == "load"
    [loaded] = client.get("/api/ps").json()["models"]
    assert loaded["name"] == f"{DEMO}:latest"
    assert loaded["size"] > 0
    assert asked(client, "/api/generate", model=DEMO, keep_alive=-1)["done_reason"] == "load"


def test_models_are_listed_and_shown(client: httpx.Client):
    listed = {model["name"]: model for model in client.get("/api/tags").json()["models"]}
    assert listed.keys() == {*(f"{name}:latest" for name in EMBEDDED), "encoder:latest"}
    assert len(listed["encoder:latest"]["digest"]) == 64
    shown = asked(client, "/api/show", model=DEMO)
    assert shown["model_info"]["llama.context_length"] == 8192
    assert "tools" in shown["capabilities"]
    assert asked(client, "/api/show", name="encoder")["capabilities"] == ["embedding"]


def test_texts_are_embedded(client: httpx.Client):
    both = asked(client, "/api/embed", model="encoder", input=["one", "two"])
    alone = asked(client, "/api/embed", model="encoder:latest", input="one")
    old = asked(client, "/api/embeddings", model="encoder", prompt="one")
    assert len(both["embeddings"]) == 2
    assert both["embeddings"][0] == pytest.approx(alone["embeddings"][0], abs=1e-5)
    assert old["embedding"] == pytest.approx(alone["embeddings"][0], abs=1e-5)
    assert both["prompt_eval_count"] > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/api/chat", {"model": "none", "messages": says("x")}, 404, "none"),
        ("/api/chat", {"model": DEMO, "messages": says("x"), "keep_alive": "soon"}, 400, "keep_al"),
        ("/api/chat", {"model": DEMO, "messages": [{"role": "x"}]}, 400, "messages[0].role"),
        ("/api/generate", {"model": DEMO, "prompt": "x", "options": {"top_p": 7}}, 400, "top_p"),
        ("/api/show", {}, 400, "model"),
        ("/api/create", {"model": "x"}, 400, "/api/create"),
        ("/api/nothing", {}, 404, "/api/nothing"),
    ],
)
def test_what_is_wrong_is_said_in_ollamas_shape(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, named: str
):
    answer = client.post(path, json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert named in answer.json()["error"]


def test_models_are_pulled_and_deleted_by_the_owner(tmp_path: Path):
    repository = make_tiny_model(tmp_path / "repository")
    with fake_hub(repository) as hub:
        told = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        command = ["env", *(f"{name}={value}" for name, value in told.items())]
        command += [str(PROGRAM), "serve", "--hf-cache"]
        with (
            live_server(tmp_path / "log", command) as live,
            httpx.Client(base_url=live.url, timeout=60) as client,
        ):
            page = {"origin": "http://evil.example"}
            assert client.post("/api/pull", json={"model": "a/b"}, headers=page).status_code == 403
            with client.stream("POST", "/api/pull", json={"model": "hf.co/a/b"}) as pulled:
                lines = [json.loads(line) for line in pulled.iter_lines()]
            assert lines[0] == {"status": "pulling manifest"}
            assert lines[-1] == {"status": "success"}
            assert all(line["completed"] <= line["total"] for line in lines[1:-1])
            assert len(lines) > 2
            names = {model["name"] for model in client.get("/api/tags").json()["models"]}
            assert "a/b:latest" in names
            options = {"num_predict": 2}
            asked(client, "/api/generate", model="a/b", prompt="x", options=options)
            assert client.request("DELETE", "/api/delete", json={"model": "a/b"}).is_success
            names = {model["name"] for model in client.get("/api/tags").json()["models"]}
            assert "a/b:latest" not in names
            gone = client.request("DELETE", "/api/delete", json={"model": "a/b"})
            assert gone.status_code == 404
            missing = client.post("/api/pull", json={"model": "own/missing"})
            assert "missing" in json.loads(missing.text.splitlines()[-1])["error"]


def test_the_second_port_answers_as_the_first(tmp_path: Path):
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with live_server(tmp_path / "log", ollama_port=port) as live:
        for url in (live.url, f"http://127.0.0.1:{port}"):
            assert httpx.get(f"{url}/api/tags").json()["models"][0]["name"] == f"{DEMO}:latest"


def test_a_second_port_that_is_taken_is_named(tmp_path: Path):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [str(PROGRAM), "serve", "--port", "0", "--ollama-port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr
    assert "--ollama-port" in ended.stderr

"""Draft models over HTTP: named by the owner, checked, loaded beside the model, and unloaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from here import check_refusal, served_here
from test_speculation import DEMO, FORM, WAYS, chat, counter, said
from thorough import slow
from tiny_models import make_tiny_model

from mlx_manager.cli.server.ps import print_models
from mlx_manager.demo_model import demo_model_path

SETTINGS = f"""
[models.twin]
base = "{DEMO}"
draft_model = "{DEMO}"

[models.drafted]
base = "{DEMO}"
draft_model = "./models/random"

[models.another]
base = "{DEMO}"
draft_model = "bytes"

[models.missing]
base = "{DEMO}"
draft_model = "owner/not-here"

[models.elsewhere]
url = "http://127.0.0.1:9"

[models.apart]
base = "bytes"
draft_model = "elsewhere"

[models.recurring]
base = "bytes"
draft_model = "recurrent"

[models.undraftable]
base = "alone"
draft_model = "bytes"

[models.goes-back]
base = "recurrent"
draft_model = "bytes"
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("draft_model")
    models = folder / "models"
    size = json.loads((demo_model_path() / "config.json").read_text())["vocab_size"]
    random = make_tiny_model(models / "random", "llama", vocab_size=size)
    for file in demo_model_path().glob("*token*"):
        shutil.copy(file, random / file.name)
    make_tiny_model(models / "bytes", "llama")
    make_tiny_model(models / "recurrent", "lfm2")
    make_tiny_model(models / "alone", "gpt_bigcode")
    file = folder / "models.toml"
    file.write_text(SETTINGS)
    with served_here(models_file=file, models_dir=models, speculation="on", max_models=4) as client:
        yield client


def described(client: httpx.Client, name: str) -> dict[str, Any]:
    models = client.get("/v1/admin/models").json()["data"]
    found: dict[str, Any] = next(model for model in models if model["id"] == name)
    return found


@pytest.mark.parametrize("model", ["twin", "drafted"])
@pytest.mark.parametrize("way", WAYS)
def test_an_answer_is_the_same_with_a_draft_model(
    client: httpx.Client, way: str, model: str
) -> None:
    plain = chat(client, **WAYS[way], speculation="off")
    assert said(chat(client, model, **WAYS[way])) == said(plain)


def test_all_that_a_model_guesses_of_itself_is_accepted(
    client: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"spec_decode_num_{what}" for what in ("draft_tokens", "accepted_tokens")]
    chat(client, "twin", temperature=0, max_tokens=1)
    before = [counter(client, name, "twin") for name in names]
    chat(client, "twin", temperature=0, max_tokens=20)
    tried, accepted = (
        counter(client, name, "twin") - b for name, b in zip(names, before, strict=True)
    )
    assert tried == accepted > 8
    model = described(client, "twin")
    assert model["draft_model"] == DEMO
    assert model["memory"]["draft"] == model["memory"]["weights"] > 0
    print_models([model], [])
    shown = capsys.readouterr().out
    assert "draft model" in shown
    assert any(line.split()[:1] == ["twin"] and DEMO in line for line in shown.splitlines())


def test_unloading_gives_back_what_the_draft_model_took(client: httpx.Client) -> None:
    chat(client, "drafted", temperature=0, max_tokens=4)
    assert described(client, "drafted")["memory"]["draft"] > 0
    gone = client.post("/v1/admin/models/unload", json={"model": "drafted"}).json()
    assert gone["memory_after"] < gone["memory_before"]
    model = described(client, "drafted")
    assert (model["state"], model["memory"], model["draft_model"]) == ("loadable", {}, None)


@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("another", 400, ["bytes can't draft for another", "tokenizers differ", "draft_model"]),
        ("missing", 404, ["owner/not-here", "has not been downloaded"]),
        ("apart", 400, ["elsewhere is on another machine", "can't draft for apart", "draft_model"]),
        ("recurring", 400, ["recurrent can't draft for recurring", "pages"]),
    ],
)
def test_a_model_that_cannot_draft_is_refused_by_name(
    client: httpx.Client, model: str, status: int, words: list[str]
) -> None:
    check_refusal(client, model, status, words)


@pytest.mark.parametrize("way", ["greedy", "seeded"])
def test_a_model_with_recurrent_layers_has_what_it_refused_undone(
    client: httpx.Client, way: str
) -> None:
    asked = {**WAYS[way], "response_format": FORM, "max_tokens": 48}
    plain = chat(client, "recurrent", **asked, speculation="off")
    # Of what its draft model guesses, whose weights are random, next to nothing is right.
    for model in ("recurrent", "goes-back"):
        assert said(chat(client, model, **asked)) == said(plain)
        assert counter(client, "spec_decode_num_accepted_tokens", model) > 0
    tried = counter(client, "spec_decode_num_draft_tokens", "goes-back")
    assert tried > counter(client, "spec_decode_num_accepted_tokens", "goes-back")
    assert described(client, "goes-back")["draft_model"] == "bytes"


def test_a_model_that_takes_no_drafts_is_loaded_without(client: httpx.Client) -> None:
    chat(client, "undraftable", temperature=0, max_tokens=4)
    model = described(client, "undraftable")
    assert model["draft_model"] is None
    assert "draft" not in model["memory"]


@slow
def test_the_servers_draft_model_is_for_models_with_its_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    models = tmp_path / "models"
    make_tiny_model(models / "small", "llama", seed=1)
    make_tiny_model(models / "large", "llama", seed=2)
    settings = {"models_dir": models, "draft_model": "small", "speculation": "on"}
    with served_here(**settings) as client:
        for model in (DEMO, "small", "large"):
            chat(client, model, temperature=0, max_tokens=12)
        found = {name: described(client, name)["draft_model"] for name in (DEMO, "small", "large")}
    assert found == {DEMO: None, "small": None, "large": "small"}
    assert f"{DEMO} is loaded without a draft model: small can't draft for" in caplog.text

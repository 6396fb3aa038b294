"""Prefixes on disk, through a real server that is killed and started again."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from here import served_here
from live import live_server
from thorough import slow
from tiny_vision import make_seeing_model, picture
from typer.testing import CliRunner

from mlx_manager.cli import app

TEXT = " ".join(f"Rule {i}: page {i * 7 % 83} of the book comes first." for i in range(60))


def ask(client: httpx.Client) -> dict[str, Any]:
    body = {
        "model": "mlx-manager/demo",
        "messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": "Hello!"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = client.post("/v1/chat/completions", json=body)
    return answer.raise_for_status().json()  # type: ignore[no-any-return]


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def cached_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def on_disk(client: httpx.Client, of: str = "mlx-manager/demo") -> dict[str, int]:
    models = client.get("/v1/admin/models").raise_for_status().json()["data"]
    found = next(model for model in models if model["id"] == of)
    return found["prefix_disk"]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Killed:
    """A server that was killed. kept: its folder. text: its answer. prompt: tokens of the prompt,
    of which whole blocks are in the folder."""

    kept: Path
    text: str
    prompt: int


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    kept = folder / "kept"
    with (
        live_server(folder / "log", **settings_of(kept)) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        first, second = ask(client), ask(client)
        prompt = first["usage"]["prompt_tokens"]
        assert text_of(first) == text_of(second)
        due = time.monotonic() + 30
        while len(files := list(kept.rglob("*.safetensors"))) < prompt // 256:
            assert time.monotonic() < due, "what is used a second time is not written"
            time.sleep(0.02)
        written = on_disk(client)
        assert written["written_bytes"] == sum(file.stat().st_size for file in files)
        assert written["files_bytes"] == written["written_today"] == written["written_bytes"]
        server.process.kill()
    return Killed(kept, text_of(first), prompt)


def settings_of(kept: Path) -> dict[str, object]:
    return {"prefix_disk_gb": 1, "prefix_disk_dir": kept, "log_level": "info"}


def test_exported_prefixes_are_found_where_they_were_imported(
    killed: Killed, tmp_path: Path
) -> None:
    file, there = tmp_path / "kept.tar", tmp_path / "there"
    of = ("--model", "mlx-manager/demo")
    assert cache("export", *of, file, "--prefix-disk-dir", killed.kept)["damaged"] == 0
    moved = cache("import", file, "--prefix-disk-dir", there)
    assert moved["blocks"] == killed.prompt // 256
    with served_here(**settings_of(there)) as client:
        again = ask(client)
    assert text_of(again) == killed.text
    assert cached_of(again) == killed.prompt // 256 * 256


def cache(*arguments: object) -> dict[str, Any]:
    """Return the account of `mlx-manager cache`."""
    done = CliRunner().invoke(app, ["cache", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_killed_server_s_prefixes_are_found_by_the_next_one(killed: Killed) -> None:
    with served_here(**settings_of(killed.kept)) as client:
        again = ask(client)
        assert text_of(again) == killed.text
        assert cached_of(again) == killed.prompt // 256 * 256
        read = on_disk(client)
        assert read["hits"] == cached_of(again)
        assert read["read_bytes"] > 0
        metrics = client.get("/metrics").text
        for name in ("hits_total", "read_bytes_total", "written_bytes_total", "bytes"):
            assert f"mlx_manager_prefix_disk_{name}" in metrics
        cleared = client.post("/v1/admin/prefix-cache/clear", json={})
        cleared.raise_for_status()
        assert cached_of(ask(client)) == 0


@pytest.mark.parametrize("way", ["unload", pytest.param("stop", marks=slow)])
def test_what_is_in_memory_is_written_when_the_model_or_the_server_ends(
    tmp_path: Path, way: str
) -> None:
    kept = tmp_path / "kept"
    with served_here(**settings_of(kept)) as client:
        prompt = ask(client)["usage"]["prompt_tokens"]
        assert list(kept.rglob("*.safetensors")) == []
        if way == "unload":
            body = {"model": "mlx-manager/demo"}
            client.post("/v1/admin/models/unload", json=body)
            assert len(list(kept.rglob("*.safetensors"))) == prompt // 256
    assert len(list(kept.rglob("*.safetensors"))) == prompt // 256


@slow
@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl"])
def test_the_next_server_answers_about_a_picture_without_reading_it(
    tmp_path: Path, kind: str
) -> None:
    make_seeing_model(tmp_path / "models" / kind, kind)

    def ask(client: httpx.Client, text: str, *shown: dict[str, Any]) -> str:
        content = [{"type": "text", "text": text}, *shown]
        body = {"model": kind, "messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": 12, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body)
        return text_of(answer.raise_for_status().json())

    encoded = base64.b64encode(picture(64, 64, 3).data).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    questions = ("What is it?", "Which colour is it?")
    settings = {**settings_of(tmp_path / "kept"), "models_dir": tmp_path / "models"}
    with served_here(**settings) as client:
        expected = [ask(client, text, shown) for text in questions]
    assert len(list((tmp_path / "kept").rglob("*.picture.safetensors"))) == 1
    with served_here(**settings) as client:
        # Nothing is found before the model's files are known.
        ask(client, "Hello!")
        assert [ask(client, text, shown) for text in questions] == expected
        found = on_disk(client, kind)
        assert (found["picture_queries"], found["picture_hits"]) == (1, 1)
        metrics = client.get("/metrics").text
        assert f'mlx_manager_prefix_disk_picture_hits_total{{model_name="{kind}"}} 1.0' in metrics

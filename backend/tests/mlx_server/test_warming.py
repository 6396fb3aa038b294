"""Prompts that the owner has read ahead: files of the models' settings, and the admin API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from here import served_here
from minilm import minilm_folder
from pictures import data_url
from thorough import slow
from tiny_models import make_tiny_model
from tiny_vision import make_seeing_model, picture

from mlx_manager import demo_model
from mlx_manager.mlx_server.errors import InvalidSettings
from mlx_manager.mlx_server.models.settings import read_models_file

DEMO = "mlx-manager/demo"
TOKEN = "the owner's"
OWNER = {"authorization": f"Bearer {TOKEN}"}
PREAMBLE = "You are told a lot before anybody asks you, and all of it is the same each time. " * 12
LEAST = 200
"""Tokens of the preamble that are found, at least."""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city, today and on any other day. " * 8,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SETTINGS = f"""
[models."{DEMO}"]
warm = ["preamble.txt", "texts/other.txt"]

[models.brief]
base = "{DEMO}"
system = "{"The owner says this, and it is long enough for some pages of its own. " * 6}"
warm = ["preset.txt"]
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("warm")
    (folder / "texts").mkdir()
    (folder / "preamble.txt").write_text(PREAMBLE)
    (folder / "texts" / "other.txt").write_text(f"Other. {PREAMBLE}")
    (folder / "preset.txt").write_text(f"Preset. {PREAMBLE}")
    (folder / "models.toml").write_text(SETTINGS)
    settings = {"models_file": folder / "models.toml", "admin_token": TOKEN}
    with served_here(**settings) as client:
        yield client


def cached(client: httpx.Client, *messages: tuple[str, str], model: str = DEMO, **more: Any) -> int:
    said = [{"role": role, "content": content} for role, content in messages]
    body = {"model": model, "messages": said, "max_tokens": 1}
    answer = client.post("/v1/chat/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def warmed(client: httpx.Client, **body: Any) -> dict[str, Any]:
    path = "/v1/admin/prefix-cache/warm"
    answer = client.post(path, json={"model": DEMO} | body, headers=OWNER)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# -- files -------------------------------------------------------------------------------------


def test_the_first_chat_with_a_file_s_text_finds_it(client: httpx.Client) -> None:
    assert cached(client, ("system", PREAMBLE), ("user", "Hello!")) > LEAST
    assert cached(client, ("system", f"Other. {PREAMBLE} And more."), ("user", "Who?")) > LEAST
    assert cached(client, ("system", f"Unlike. {PREAMBLE}"), ("user", "Hello!")) < 16


def test_a_preset_s_file_stands_behind_its_own_system_text(client: httpx.Client) -> None:
    said = ("system", f"Preset. {PREAMBLE}"), ("user", "Hello!")
    assert cached(client, *said, model="brief") > LEAST + 50


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("gone.txt", None, "must be a file that can be read (No such file or directory)"),
        (".", None, "must be a file that can be read (Is a directory)"),
        ("binary", b"\xff\xfe\x00", "must be a file of text in UTF-8"),
        ("empty", b" \n", "must be a file with a text in it"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(
    name: str, content: bytes | None, wrong: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    settings = tmp_path / "models.toml"
    settings.write_text(f'[models."{DEMO}"]\nwarm = ["{name}"]\n')
    with pytest.raises(InvalidSettings) as refused:
        read_models_file(settings)
    assert f'models."{DEMO}".warm.0: {wrong}' in str(refused.value)
    assert name in str(refused.value)


def test_a_file_that_has_gone_or_is_too_long_fails_the_load_by_name(tmp_path: Path) -> None:
    shutil.copytree(Path(demo_model.__file__).parent, tmp_path / "models" / "small")
    text, settings = tmp_path / "text.txt", tmp_path / "models.toml"
    text.write_text(PREAMBLE)
    settings.write_text('[models.small]\ncontext_length = 64\nwarm = ["text.txt"]\n')
    options = {"models_dir": tmp_path / "models", "models_file": settings}
    with served_here(**options) as client:
        for wrong in ("64", "No such file"):
            failed = client.post("/v1/admin/models/load", json={"model": "small"})
            assert failed.status_code >= 400
            message = failed.json()["error"]["message"]
            assert f'models."small".warm: {text}' in message
            assert wrong in message
            text.unlink(missing_ok=True)
        # Nothing else is the worse for it.
        assert cached(client, ("user", "Hello!")) == 0


@slow
def test_a_model_without_a_chat_template_reads_the_beginning_of_prompts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "models" / "raw", "llama")
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "text.txt").write_text(PREAMBLE)
    settings = tmp_path / "models.toml"
    settings.write_text('[models.raw]\nwarm = ["text.txt"]\n')
    options = {"models_dir": tmp_path / "models", "models_file": settings}
    with served_here(**options) as client:
        body = {"model": "raw", "prompt": f"{PREAMBLE} Go on.", "max_tokens": 1}
        usage = client.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > LEAST


@slow
def test_a_model_that_generates_nothing_has_nothing_to_read_ahead(tmp_path: Path) -> None:
    folder = minilm_folder()
    (tmp_path / "text.txt").write_text(PREAMBLE)
    settings = tmp_path / "models.toml"
    settings.write_text(f'[models.vectors]\nbase = "{folder}"\nwarm = ["text.txt"]\n')
    with served_here(models_file=settings) as client:
        failed = client.post("/v1/embeddings", json={"model": "vectors", "input": "x"})
        assert failed.status_code >= 400
        assert "generates no text" in failed.json()["error"]["message"]


# -- the admin API -----------------------------------------------------------------------------


def test_a_text_is_found_by_prompts_that_begin_with_it(client: httpx.Client) -> None:
    text = f"By hand. {PREAMBLE}"
    first = warmed(client, text=text)
    assert first["model"] == DEMO
    assert first["computed_tokens"] == first["prompt_tokens"] - first["cached_tokens"] > LEAST
    assert LEAST < first["kept_tokens"] < first["prompt_tokens"]
    body = {"model": DEMO, "prompt": text + " So?", "max_tokens": 1}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == first["kept_tokens"]
    again = warmed(client, text=text)
    assert again["cached_tokens"] == first["kept_tokens"] == again["kept_tokens"]
    assert again["computed_tokens"] < first["computed_tokens"]


def test_messages_and_tools_are_found_by_chats_that_go_on_from_them(client: httpx.Client) -> None:
    system = f"With tools. {PREAMBLE}"
    told = [{"role": "system", "content": system}]
    found = warmed(client, messages=told, tools=[TOOL])
    assert found["computed_tokens"] > LEAST
    said = ("system", system), ("user", "Is it raining?")
    assert cached(client, *said, tools=[TOOL]) == found["kept_tokens"]
    other = TOOL | {"function": TOOL["function"] | {"name": "forecast"}}
    assert cached(client, *said, tools=[other]) < found["kept_tokens"]


def test_a_whole_chat_is_found_by_the_same_chat(client: httpx.Client) -> None:
    said = ("system", f"All of it. {PREAMBLE}"), ("user", "What is it about? " * 10)
    messages = [{"role": role, "content": content} for role, content in said]
    found = warmed(client, messages=messages)
    assert cached(client, *said) == found["kept_tokens"] > LEAST


def test_only_requests_of_its_salt_find_what_was_read(client: httpx.Client) -> None:
    system = f"Salted. {PREAMBLE}"
    warmed(client, messages=[{"role": "system", "content": system}], cache_salt="s")
    said = ("system", system), ("user", "Hello!")
    assert cached(client, *said) < 16
    assert cached(client, *said, cache_salt="t") == 0
    assert cached(client, *said, cache_salt="s") > LEAST


@pytest.mark.parametrize(
    ("body", "field", "status"),
    [
        ({}, "text", 400),
        ({"text": "x", "messages": [{"role": "user", "content": "x"}]}, "text", 400),
        ({"text": ""}, "text", 400),
        ({"text": "x", "tools": [TOOL]}, "tools", 400),
        ({"messages": []}, "messages", 400),
        ({"text": "x", "cache_salt": ""}, "cache_salt", 400),
        ({"text": "x", "model": "nobody/nothing"}, "nobody/nothing", 404),
        ({"text": "many words " * 9000}, "tokens", 400),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    client: httpx.Client, body: dict[str, Any], field: str, status: int
) -> None:
    answer = client.post("/v1/admin/prefix-cache/warm", json={"model": DEMO} | body, headers=OWNER)
    assert answer.status_code == status, answer.text
    assert field in answer.json()["error"]["message"]


@slow
def test_where_nothing_is_kept_nothing_is_read_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text(PREAMBLE)
    (tmp_path / "models.toml").write_text(f'[models."{DEMO}"]\nwarm = ["text.txt"]\n')
    options = {"models_file": tmp_path / "models.toml", "prefix_cache": False}
    with served_here(**options) as client:
        assert cached(client, ("system", PREAMBLE), ("user", "Hello!")) == 0
        answer = client.post("/v1/admin/prefix-cache/warm", json={"model": DEMO, "text": PREAMBLE})
        assert answer.status_code == 400
        assert "MLX_SERVER_PREFIX_CACHE" in answer.json()["error"]["message"]
    assert "text.txt is not read ahead: MLX_SERVER_PREFIX_CACHE" in caplog.text


def test_nobody_but_the_owner_has_anything_read(client: httpx.Client) -> None:
    answer = client.post("/v1/admin/prefix-cache/warm", json={"model": DEMO, "text": PREAMBLE})
    assert answer.status_code == 401


def test_pictures_are_read_ahead_only_in_whole_chats(tmp_path: Path) -> None:
    make_seeing_model(tmp_path / "models" / "seeing", "smolvlm")
    shown = {"type": "image_url", "image_url": {"url": data_url(picture(64, 64).data)}}
    messages = [{"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]}]
    with served_here(models_dir=tmp_path / "models") as client:
        path, asked = "/v1/admin/prefix-cache/warm", {"model": "seeing", "messages": messages}
        found = client.post(path, json=asked)
        assert found.status_code == 200, found.text
        usage = client.post("/v1/chat/completions", json=asked | {"max_tokens": 1}).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == found.json()["kept_tokens"] > 0
        asked["messages"] = [*messages, {"role": "assistant", "content": "A picture."}]
        assert "pictures" in client.post(path, json=asked).json()["error"]["message"]

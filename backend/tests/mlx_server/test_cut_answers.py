"""An answer that ends at its limit of tokens is the beginning of the longer one, on every path."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from here import start_here
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAID = [{"role": "user", "content": "Ä"}]
PATHS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "Ä"}, "max_tokens"),
    "/v1/chat/completions": ({"messages": SAID}, "max_tokens"),
    "/v1/responses": ({"input": "Ä"}, "max_output_tokens"),
    "/v1/messages": ({"messages": SAID}, "max_tokens"),
}
LONGEST = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A server of a model without sense, whose tokens are bytes."""
    models = tmp_path_factory.mktemp("models")
    make_tiny_model(models / "tiny")
    app = create_app(MLXServerSettings(models_dir=models), start=start_here)
    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client


def text_of(body: dict[str, Any]) -> str:
    match body:
        case {"choices": [{"text": text}]}:
            return str(text)
        case {"choices": [{"message": {"content": text}}]}:
            return str(text or "")
        case {"output": output}:
            return "".join(part["text"] for item in output for part in item.get("content") or ())
        case {"content": content}:
            return "".join(block["text"] for block in content)
    raise AssertionError(body)


def delta_of(data: dict[str, Any]) -> str:
    match data:
        case {"choices": [{"text": text}, *_]}:
            return str(text)
        case {"choices": [{"delta": delta}, *_]}:
            return str(delta.get("content") or "")
        case {"type": "response.output_text.delta", "delta": text}:
            return str(text)
        case {"type": "content_block_delta", "delta": {"text": text}}:
            return str(text)
    return ""


async def answer(http: httpx.AsyncClient, path: str, tokens: int, **fields: Any) -> str:
    """The answer's text, collected and streamed."""
    asked, limit = PATHS[path]
    body = {"model": "tiny", "temperature": 0, **asked, limit: tokens, **fields}
    whole = await http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    streamed = await http.post(path, json=body | {"stream": True})
    lines = (
        line.removeprefix("data: ") for line in streamed.text.splitlines() if "data: {" in line
    )
    text = text_of(whole.json())
    assert "".join(map(delta_of, map(json.loads, lines))) == text
    return text


@pytest.mark.parametrize("path", PATHS)
async def test_half_a_character_at_the_limit_is_not_shown(
    http: httpx.AsyncClient, path: str
) -> None:
    longest = await answer(http, path, LONGEST)
    assert len(longest.rstrip("\ufffd")) > 1, "the model writes some text"
    held_back = 0
    for tokens in range(1, LONGEST):
        text = await answer(http, path, tokens)
        assert longest.startswith(text)
        assert not text.endswith("\ufffd") or longest[len(text) - 1] == "\ufffd"
        held_back += longest[len(text) :].startswith("\ufffd")
    assert held_back, "some answer was cut within a character"


async def test_the_bytes_of_half_a_character_are_in_the_logprobs(http: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "temperature": 0, "messages": SAID, "logprobs": True}
    for tokens in range(1, LONGEST):
        response = await http.post("/v1/chat/completions", json=body | {"max_tokens": tokens})
        choice = response.json()["choices"][0]
        assert len(choice["logprobs"]["content"]) == tokens
        scores = [each for each in choice["logprobs"]["content"] if each["token"][:2] != "<|"]
        said = bytes(byte for each in scores for byte in each["bytes"])
        assert said.decode(errors="replace").startswith(choice["message"]["content"])

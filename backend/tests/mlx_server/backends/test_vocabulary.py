from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from live import live_server
from tiny_models import VOCAB_SIZE, make_tiny_model


def add_token(folder: Path, content: str, number: int) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"].append({**last, "id": number, "content": content})
    file.write_text(json.dumps(tokenizer))


@pytest.mark.asyncio
async def test_a_token_that_the_model_was_never_given_is_refused(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "models" / "m")
    add_token(folder, "<|image|>", VOCAB_SIZE)
    with live_server(tmp_path / "errors", models_dir=folder.parent, model=folder) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def asked(path: str, **fields: object) -> httpx.Response:
                return await client.post(path, json={"model": "m", "max_tokens": 2, **fields})

            said = [{"role": "user", "content": "a <|image|>"}]
            for answer, param in (
                (await asked("/v1/chat/completions", messages=said), "messages"),
                (await asked("/v1/completions", prompt="<|image|>"), "prompt"),
            ):
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert f"`{param}` has the token '<|image|>' ({VOCAB_SIZE})" in error["message"]
                assert error["param"] == param
            beyond = await asked("/v1/completions", prompt=[VOCAB_SIZE])
            assert (beyond.status_code, beyond.json()["error"]["param"]) == (422, "prompt")
            assert (await asked("/v1/completions", prompt="a")).status_code == 200

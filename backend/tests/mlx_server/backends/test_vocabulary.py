from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from here import served_here, start_here
from tiny_models import EOT_ID, VOCAB_SIZE, make_tiny_model

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import open_pool
from mlx_manager.mlx_server.services.inference import generate_chat_completion


def add_token(folder: Path, content: str, number: int) -> None:
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"].append({**last, "id": number, "content": content})
    file.write_text(json.dumps(tokenizer))


def test_a_token_that_the_model_was_never_given_is_refused(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "models" / "m")
    add_token(folder, "<|unheard|>", VOCAB_SIZE)
    with served_here(models_dir=folder.parent, model=str(folder)) as client:

        def asked(path: str, **fields: object) -> httpx.Response:
            return client.post(path, json={"model": "m", "max_tokens": 2, **fields})

        said = [{"role": "user", "content": "a <|unheard|>"}]
        for answer, param in (
            (asked("/v1/chat/completions", messages=said), "messages"),
            (asked("/v1/completions", prompt="<|unheard|>"), "prompt"),
        ):
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert f"`{param}` has the token '<|unheard|>' ({VOCAB_SIZE})" in error["message"]
            assert error["param"] == param
        beyond = asked("/v1/completions", prompt=[VOCAB_SIZE])
        assert (beyond.status_code, beyond.json()["error"]["param"]) == (422, "prompt")
        assert asked("/v1/completions", prompt="a").status_code == 200


@pytest.mark.parametrize("absent", [-1, 99_999])
async def test_an_end_that_the_model_lacks_stands_in_no_answers_way(tmp_path: Path, absent: int):
    make_tiny_model(tmp_path / "m", eos_token_id=[EOT_ID, absent])
    settings = MLXServerSettings(models_dir=tmp_path, hf_cache=False)
    async with open_pool(settings, start=start_here) as pool:
        for asked in ({"response_format": {"type": "json_object"}}, {"min_tokens": 2}):
            said = [{"role": "user", "content": "a"}]
            body = await generate_chat_completion("m", said, pool=pool, max_tokens=4, **asked)
            assert body["usage"]["completion_tokens"] > 0

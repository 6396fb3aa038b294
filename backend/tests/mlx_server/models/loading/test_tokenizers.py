from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_encoders import make_tiny_encoder
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.loading.tokenizers import read_encoder_tokenizer, read_tokenizer

Read = Callable[[Path, bool], object]


def text_model(folder: Path) -> Path:
    return make_tiny_model(folder)


@pytest.mark.parametrize("ends", [[1, 2], [5]])
def test_the_end_tokens_are_those_of_the_config(tmp_path: Path, ends: list[int]) -> None:
    folder = make_tiny_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
    tokenizer = read_tokenizer(folder, False)
    assert set(ends) <= set(tokenizer.eos_token_ids)
    assert tokenizer.decode(tokenizer.encode("hello"), skip_special_tokens=True) == "hello"


def test_an_encoder_s_tells_segments_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = read_encoder_tokenizer(make_tiny_encoder(tmp_path / "e"), False)
    ids = tokenizer("hello")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "hello"
    assert tokenizer.num_special_tokens_to_add() == len(ids) - len(tokenizer.tokenize("hello"))


@pytest.mark.parametrize(
    ("make", "read"),
    [(text_model, read_tokenizer), (make_tiny_encoder, read_encoder_tokenizer)],
    ids=["text", "encoder"],
)
def test_what_a_newer_release_wrote_is_said_to_be_unreadable(
    tmp_path: Path, make: Callable[[Path], Path], read: Read
) -> None:
    folder = make(tmp_path / "m")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model": {"type": "newer"}}))
    with pytest.raises(ValueError, match=r"tokenizers \d\S+ can't read its tokenizer\.json"):
        read(folder, False)


@pytest.mark.parametrize(
    ("make", "read"),
    [(text_model, read_tokenizer), (make_tiny_encoder, read_encoder_tokenizer)],
    ids=["text", "encoder"],
)
def test_a_file_without_an_end_is_named_and_not_opened(
    tmp_path: Path, make: Callable[[Path], Path], read: Read
) -> None:
    folder = make(tmp_path / "m")
    os.mkfifo(folder / "added_tokens.json")
    with pytest.raises(ModelLoadFailed, match=r"added_tokens\.json"):
        read(folder, False)

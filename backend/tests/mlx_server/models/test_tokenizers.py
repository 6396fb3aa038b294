from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_encoders import make_tiny_encoder
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.models.tokenizers import Tokenizers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model(root / name) for name in "abc"]


def test_a_tokenizer_is_read_once_and_kept(folders: list[Path]):
    tokenizers = Tokenizers(2)
    first = tokenizers.text(folders[0])
    assert tokenizers.text(folders[0]) is first
    assert first.decode(first.encode("hello"), skip_special_tokens=True) == "hello"


def test_the_least_recently_used_one_goes(folders: list[Path]):
    a, b, c = folders
    tokenizers = Tokenizers(2)
    kept = tokenizers.text(a)
    gone = tokenizers.text(b)
    assert tokenizers.full
    tokenizers.text(a)
    tokenizers.text(c)
    assert tokenizers.text(a) is kept
    assert tokenizers.text(b) is not gone


def test_of_none_to_be_kept_each_is_read_anew(folders: list[Path]):
    tokenizers = Tokenizers()
    first = tokenizers.text(folders[0])
    assert tokenizers.text(folders[0]) is not first


@pytest.mark.parametrize(
    "changed", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_files_that_have_changed_are_read_again(tmp_path: Path, changed: str):
    folder = make_tiny_model(tmp_path / "m")
    tokenizers = Tokenizers(2)
    first = tokenizers.text(folder)
    file = folder / changed
    before = file.read_text() if file.exists() else ""
    file.write_text(f"{before}\n" if changed.endswith("jinja") else json.dumps({"new": before}))
    assert tokenizers.text(folder) is not first


def test_a_template_in_a_folder_of_its_own_counts_as_well(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    tokenizers = Tokenizers(2)
    first = tokenizers.text(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    assert tokenizers.text(folder) is not first


def test_weights_that_are_written_anew_leave_it(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    tokenizers = Tokenizers(2)
    first = tokenizers.text(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert tokenizers.text(folder) is first


def test_what_can_t_be_read_is_tried_again(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    good = (folder / "tokenizer.json").read_bytes()
    other = {**json.loads(good), "model": {"type": "another release's"}}
    (folder / "tokenizer.json").write_text(json.dumps(other))
    tokenizers = Tokenizers(2)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"can't read its tokenizer\.json"):
            tokenizers.text(folder)
    (folder / "tokenizer.json").write_bytes(good)
    assert tokenizers.text(folder).encode("hello")


def test_an_encoder_s_is_kept_as_well(tmp_path: Path):
    folder = make_tiny_encoder(tmp_path / "e")
    tokenizers = Tokenizers(2)
    first = tokenizers.encoder(folder)
    assert tokenizers.encoder(folder) is first

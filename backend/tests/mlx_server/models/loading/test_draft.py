"""Draft models: whose tokenizer must be the model's, and what they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models.loading.test_load import PLENTY, edit, source
from tiny_models import make_tiny_adapter, make_tiny_model

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelTooLarge
from mlx_manager.mlx_server.models.loading.draft import PreparedDraft, load_draft, prepared_draft
from mlx_manager.mlx_server.models.loading.tokenizers import read_tokenizer
from mlx_manager.mlx_server.models.settings import AS_IT_IS, Recipe
from mlx_manager.mlx_server.utils.memory import Ledger


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "draft", "qwen3")


def prepared(tmp_path: Path, draft: Path, recipe: Recipe = AS_IT_IS) -> PreparedDraft:
    model = make_tiny_model(tmp_path / "model", "llama")
    tokenizer = read_tokenizer(model, False)
    return prepared_draft("large", tokenizer, source(draft), recipe, PoolLimits())


def test_its_weights_have_a_line_of_their_own(tmp_path: Path, draft: Path) -> None:
    ledger = Ledger(PLENTY)
    loaded = load_draft(prepared(tmp_path, draft), PoolLimits(), ledger)
    assert ledger.figures()["draft:large"] == loaded.nbytes > 0
    assert loaded.embedded == json.loads((draft / "config.json").read_text())["vocab_size"]
    assert loaded.context_length == 2048


def test_it_may_have_an_adapter_of_its_own(tmp_path: Path, draft: Path) -> None:
    adapter = make_tiny_adapter(tmp_path / "adapter", draft)
    plain = load_draft(prepared(tmp_path, draft), PoolLimits(), Ledger(PLENTY))
    ready = prepared(tmp_path, draft, Recipe(adapter=adapter))
    assert ready.checked.nbytes > prepared(tmp_path, draft).checked.nbytes
    assert load_draft(ready, PoolLimits(), Ledger(PLENTY)).nbytes == plain.nbytes


def test_a_draft_model_that_finds_no_room_leaves_nothing(tmp_path: Path, draft: Path) -> None:
    ready = prepared(tmp_path, draft)
    ledger = Ledger(ready.checked.nbytes // 2)
    with pytest.raises(ModelTooLarge, match="weights of m take"):
        load_draft(ready, PoolLimits(), ledger)
    assert "draft:large" not in ledger.figures()


def renamed(tokenizer: Path, one: str, other: str) -> None:
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[other] = vocabulary.pop(one)
    tokenizer.write_text(json.dumps(content))


def test_tokens_that_differ_are_named(tmp_path: Path, draft: Path) -> None:
    renamed(draft / "tokenizer.json", "a", "ab")
    with pytest.raises(ModelLoadFailed) as caught:
        prepared(tmp_path, draft)
    said = str(caught.value)
    assert said.startswith("m can't draft for large: their tokenizers differ. Token ")
    assert "is 'a' in the model's and is 'ab' in the draft model's." in said


def test_a_token_that_one_of_them_lacks_is_named(tmp_path: Path, draft: Path) -> None:
    content = json.loads((draft / "tokenizer.json").read_text())
    content["added_tokens"].append(
        content["added_tokens"][-1] | {"id": 4000, "content": "<|more|>"}
    )
    (draft / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadFailed, match=r"is none in the model's and is '<\|more\|>' in"):
        prepared(tmp_path, draft)


def test_a_model_that_only_reads_is_refused(tmp_path: Path, draft: Path) -> None:
    edit(draft, architectures=["BertModel"], model_type="bert")
    with pytest.raises(ModelLoadFailed, match="m generates nothing: it can't draft for large"):
        prepared(tmp_path, draft)

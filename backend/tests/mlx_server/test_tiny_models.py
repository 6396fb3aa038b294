from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load
from tiny_models import BOS_ID, EOT_ID, FAMILIES, VOCAB_SIZE, make_tiny_model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_loads_as_a_folder_and_gives_finite_logits(family: str, tmp_path: Path):
    model, tokenizer = load(str(make_tiny_model(tmp_path / family, family)))[:2]
    logits = model(mx.array([tokenizer.encode("hello")]))
    assert logits.shape == (1, 6, VOCAB_SIZE)
    assert mx.all(mx.isfinite(logits))
    assert logits.astype(mx.float32).std() > 0.05


def test_tokenizer_is_one_token_a_byte(tmp_path: Path):
    _, tokenizer = load(str(make_tiny_model(tmp_path / "m")))[:2]
    assert tokenizer.encode("né")[1:] == list("né".encode())
    assert tokenizer.encode("a")[0] == BOS_ID
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    assert rendered.count(BOS_ID) == 1
    assert EOT_ID in rendered
    assert tokenizer.decode(rendered[1:]).endswith("assistant<|end_header_id|>\n\n")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_same_arguments_same_weights(family: str, tmp_path: Path):
    folders = [make_tiny_model(tmp_path / name, family, seed=7) for name in "ab"]
    first, second = (mx.load(str(folder / "model.safetensors")) for folder in folders)
    assert all(mx.array_equal(first[name], second[name]) for name in first)


def test_quantised_model_loads(tmp_path: Path):
    folder = make_tiny_model(
        tmp_path / "q", dtype=mx.bfloat16, quantize={"group_size": 32, "bits": 4}
    )
    model = load(str(folder))[0]
    assert model.model.layers[0].mlp.up_proj.scales.dtype == mx.bfloat16

"""Checkpoints as they are uploaded: each is answered from what its own files mean, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from tiny_encoders import make_tiny_encoder
from tiny_models import FAMILIES, make_tiny_model

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.encoders.loading import load_encoder
from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.catalog import described
from mlx_manager.mlx_server.models.checkpoint.building import build, planned
from mlx_manager.mlx_server.models.checkpoint.weight_files import INDEX
from mlx_manager.mlx_server.models.loading.load import checked_folder
from mlx_manager.mlx_server.utils.broken import explained
from mlx_manager.mlx_server.utils.memory import Ledger

PLENTY = 10**9
TOKENS = mx.array([[256, *range(40, 60)]])
WHOLE = "model.safetensors"
PACKED = {"group_size": 32, "bits": 4}


def loaded(folder: Path) -> nn.Module:
    """The model as a load has it before its weights are brought into memory."""
    with explained("m"):
        checked = checked_folder(described("m", folder, "models_dir"), PoolLimits())
        model, _ = build(planned(checked))
    return model


def logits(folder: Path) -> np.ndarray:
    return np.array(loaded(folder)(TOKENS).astype(mx.float32))


def weights_of(file: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    mx.eval(found)
    return found


def save(file: Path, weights: Mapping[str, mx.array]) -> Path:
    mx.save_safetensors(str(file), dict(weights))
    return file


def index(folder: Path, placed: Mapping[str, str]) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(placed)}))
    return folder


def configured(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


# -- Which files ----------------------------------------------------------------------------------


def sharded(place: Path, *, seed: int = 0, shards: int = 2) -> Path:
    """A model in `shards` files with an index."""
    folder = make_tiny_model(place, seed=seed)
    weights = weights_of(folder / WHOLE)
    (folder / WHOLE).unlink()
    placed: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        some = {key: weights[key] for key in sorted(weights)[number::shards]}
        save(folder / name, some)
        placed |= dict.fromkeys(some, name)
    return index(folder, placed)


@pytest.mark.parametrize("stray", [WHOLE, "model-00001-of-00003.safetensors", "consolidated.safetensors", "model-old.safetensors"])  # fmt: skip
def test_a_stray_file_is_none_of_the_weights(tmp_path: Path, stray: str):
    expected = logits(sharded(tmp_path / "right"))
    folder = sharded(tmp_path / "stray")
    before = described("m", folder, "models_dir").nbytes
    shutil.copy(make_tiny_model(tmp_path / "wrong", seed=9) / WHOLE, folder / stray)
    np.testing.assert_array_equal(logits(folder), expected)
    assert described("m", folder, "models_dir").nbytes == before


def test_a_stray_file_need_not_even_be_sound(tmp_path: Path):
    expected = logits(sharded(tmp_path / "right"))
    folder = sharded(tmp_path / "stray")
    (folder / WHOLE).write_bytes(b"half a down")
    np.testing.assert_array_equal(logits(folder), expected)


def test_a_leftover_shard_does_not_mix_in_where_there_is_no_index(tmp_path: Path):
    expected = logits(sharded(tmp_path / "right"))
    folder = sharded(tmp_path / "stray")
    (folder / INDEX).unlink()
    other = sharded(tmp_path / "wrong", seed=9, shards=3)
    shutil.copy(other / "model-00002-of-00003.safetensors", folder)
    np.testing.assert_array_equal(logits(folder), expected)


def test_a_tensor_is_taken_from_the_file_that_the_index_names(tmp_path: Path):
    folder = sharded(tmp_path / "m")
    expected = logits(folder)
    first, second = sorted(folder.glob("model-*.safetensors"))
    wrong = {name: array + 1 for name, array in weights_of(first).items()}
    save(second, weights_of(second) | wrong)
    np.testing.assert_array_equal(logits(folder), expected)


@pytest.mark.parametrize("sidecar", ["mtp.safetensors", "model_vision.safetensors", "extra.safetensors"])  # fmt: skip
def test_a_sidecar_that_nobody_needs_is_no_hindrance(tmp_path: Path, sidecar: str):
    folder = make_tiny_model(tmp_path / "m")
    expected, names = logits(folder), weights_of(folder / WHOLE)
    if sidecar.startswith("model"):
        # Of such a name mlx-lm reads it, and must have a place for what it holds.
        sidecar = "m_vision.safetensors"
    save(folder / sidecar, {"mtp.fc.weight": mx.zeros((4, 4)), "visual.scales": mx.zeros((4,))})
    placed = dict.fromkeys(names, WHOLE) | dict.fromkeys(
        ("mtp.fc.weight", "visual.scales"), sidecar
    )
    np.testing.assert_array_equal(logits(index(folder, placed)), expected)


def test_a_sidecar_holds_what_the_model_needs(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    expected, weights = logits(folder), weights_of(folder / WHOLE)
    head = {"lm_head.weight": weights.pop("lm_head.weight")}
    save(folder / WHOLE, weights)
    save(folder / "extra.safetensors", head)
    with pytest.raises(ModelLoadFailed, match=r"(?s)Missing 1 parameters.*lm_head\.weight"):
        loaded(folder)
    index(folder, dict.fromkeys(weights, WHOLE) | dict.fromkeys(head, "extra.safetensors"))
    np.testing.assert_array_equal(logits(folder), expected)
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert described("m", folder, "models_dir").nbytes == whole


def test_a_file_of_the_index_that_is_not_there_is_named(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    names = dict.fromkeys(weights_of(folder / WHOLE), WHOLE)
    index(folder, names | {"mtp.fc.weight": "mtp.safetensors"})
    with pytest.raises(
        ModelLoadFailed, match=r"missing from .*m: mtp\.safetensors.*index\.json names"
    ):
        loaded(folder)


def test_an_encoder_has_the_weights_of_its_index_too(tmp_path: Path):
    folder = make_tiny_encoder(tmp_path / "m", "bert")
    weights = weights_of(folder / WHOLE)
    (folder / WHOLE).rename(folder / "model-00001-of-00001.safetensors")
    index(folder, dict.fromkeys(weights, "model-00001-of-00001.safetensors"))
    save(folder / WHOLE, {name: array + 1 for name, array in weights.items()})
    source = described("m", folder, "models_dir")
    encoder = load_encoder(source, PoolLimits(), Ledger(PLENTY))
    parameters = dict(tree_flatten(encoder.model.parameters()))
    name = "embeddings.word_embeddings.weight"
    assert mx.array_equal(parameters[f"body.{name}"], weights[name])


# -- Heads ----------------------------------------------------------------------------------------

NO_HEAD = ("gemma2", "cohere2", "cohere", "gemma3n", "lfm2")
"""Families whose classes in mlx-lm have no head beside the embeddings."""
TIED = (
    "phi3",
    "olmo2",
    "gemma2",
    "lfm2",
    "cohere2",
    "starcoder2",
    "ernie4_5",
    "falcon_h1",
    "llama",
    "granite",
    "qwen3",
    "gemma3_text",
    "gemma4_text",
    "gemma3n",
    "seed_oss",
    "smollm3",
)  # fmt: skip


def embedding_of(weights: Mapping[str, mx.array]) -> str:
    return next(name for name in weights if name.endswith("embed_tokens.weight"))


def tied_model(place: Path, family: str, **options: Any) -> Path:
    """A model without a head, as far as its class leaves one out."""
    folder = make_tiny_model(place, family, tie_word_embeddings=True, **options)
    weights = weights_of(folder / WHOLE)
    save(folder / WHOLE, {name: weights[name] for name in weights if "lm_head" not in name})
    return folder


def with_head(folder: Path, change: float = 0.0, *, name: str = "") -> Path:
    """The same model with a head in its file: its embeddings and `change`."""
    weights = weights_of(folder / WHOLE)
    embedding = embedding_of(weights).removesuffix(".weight")
    head = name or embedding.removesuffix("model.embed_tokens") + "lm_head"
    for part in ("weight", "scales", "biases"):
        if (array := weights.get(f"{embedding}.{part}")) is not None:
            weights[f"{head}.{part}"] = array + mx.array(change, array.dtype)
    save(folder / WHOLE, weights)
    return folder


@pytest.mark.parametrize("family", TIED)
def test_a_copy_of_the_embeddings_is_no_head(tmp_path: Path, family: str):
    folder = tied_model(tmp_path / "m", family)
    expected = logits(folder)
    np.testing.assert_array_equal(logits(with_head(folder, name="lm_head")), expected)


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3", "gemma2"])
def test_so_it_is_where_it_is_packed(tmp_path: Path, family: str):
    folder = tied_model(tmp_path / "m", family, quantize=PACKED, dtype=mx.bfloat16)
    expected = logits(folder)
    np.testing.assert_array_equal(logits(with_head(folder)), expected)


def test_so_it_is_within_a_model_that_also_sees(tmp_path: Path):
    folder = tied_model(tmp_path / "m", "gemma3")
    expected = logits(folder)
    weights = weights_of(folder / WHOLE)
    nested = next(name for name in weights if name.endswith("embed_tokens.weight"))
    assert nested.startswith("language_model.")
    np.testing.assert_array_equal(logits(with_head(folder)), expected)


def test_so_it_is_in_gemma_4_as_it_is_published(tmp_path: Path):
    folder = tied_model(tmp_path / "m", "gemma4_text")
    expected = logits(folder)
    text = json.loads((folder / "config.json").read_text())
    weights = weights_of(folder / WHOLE)
    named = {
        name.replace("model.", "model.language_model.", 1): array for name, array in weights.items()
    }
    named["lm_head.weight"] = weights[embedding_of(weights)]
    save(folder / WHOLE, named)
    whole = {"model_type": "gemma4", "text_config": text, "vocab_size": text["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": True}))
    np.testing.assert_array_equal(logits(folder), expected)


@pytest.mark.parametrize("family", [name for name in TIED if name not in NO_HEAD])
@pytest.mark.parametrize("said", [{"tie_word_embeddings": True}, {}])
def test_another_head_is_used_whatever_the_config_says(
    tmp_path: Path, family: str, said: dict[str, bool]
):
    folder = tied_model(tmp_path / "m", family)
    tied = logits(folder)
    with_head(folder, 0.1)
    untied = logits(configured(folder, tie_word_embeddings=False))
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | said))
    np.testing.assert_array_equal(logits(folder), untied)
    assert not np.allclose(tied, untied)


@pytest.mark.parametrize("family", NO_HEAD)
@pytest.mark.parametrize("tied", [True, False])
def test_another_head_that_the_class_has_no_place_for_is_refused_by_name(
    tmp_path: Path, family: str, tied: bool
):
    folder = make_tiny_model(tmp_path / "m", family, tie_word_embeddings=tied)
    expected = logits(folder)
    np.testing.assert_array_equal(logits(with_head(folder, name="lm_head")), expected)
    shutil.rmtree(folder)
    with_head(make_tiny_model(folder, family, tie_word_embeddings=tied), 0.1, name="lm_head")
    with pytest.raises(
        ModelLoadFailed, match=r"a head of its own \(.*lm_head\.weight\), which is no copy"
    ):
        loaded(folder)


# -- Names and sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen3", "QWEN3", "qwen3 "])
def test_case_and_blanks_are_no_other_architecture(tmp_path: Path, name: str):
    folder = make_tiny_model(tmp_path / "m", "qwen3")
    expected = logits(folder)
    np.testing.assert_array_equal(logits(configured(folder, model_type=name)), expected)


@pytest.mark.parametrize("name", ["lfm2-vl", "lfm2_vl", "LFM2_VL", "lfm2.vl"])
def test_dashes_and_underscores_are_one(tmp_path: Path, name: str):
    folder = make_tiny_model(tmp_path / "m", "lfm2")
    expected = logits(folder)
    text = json.loads((folder / "config.json").read_text())
    weights = weights_of(folder / WHOLE)
    save(folder / WHOLE, {f"language_model.{name}": array for name, array in weights.items()})
    (folder / "config.json").write_text(json.dumps({"model_type": name, "text_config": text}))
    np.testing.assert_array_equal(logits(folder), expected)


def test_a_name_of_another_module_may_be_spelled_so_too(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m", "deepseek_v3")
    expected = logits(folder)
    np.testing.assert_array_equal(logits(configured(folder, model_type="Kimi-K2")), expected)


@pytest.mark.parametrize("name", ["xyzformer", "llama_9", "", "lfm2/vl", "../llama"])
def test_a_name_that_nobody_knows_is_refused(tmp_path: Path, name: str):
    folder = configured(make_tiny_model(tmp_path / "m"), model_type=name)
    with pytest.raises(ModelLoadFailed, match=r"an architecture that mlx-lm|names no model_type"):
        loaded(folder)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"num_hidden_layers": 10**9}, r"num_hidden_layers 1,000,000,000, and the weights hold 2"),
        ("llama", {"num_hidden_layers": 3}, "num_hidden_layers 3, and the weights hold 2"),
        ("gpt2", {"n_layer": 10**9}, "n_layer 1,000,000,000"),
        ("longcat_flash", {"num_layers": 10**9}, "num_layers 1,000,000,000"),
        ("mamba2", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("llama", {"vocab_size": 10**12}, "vocab_size 1,000,000,000,000"),
        ("llama", {"hidden_size": 10**12}, "hidden_size"),
        ("llama", {"intermediate_size": 10**12}, "intermediate_size"),
        ("llama", {"num_attention_heads": 10**9}, "num_attention_heads"),
        ("mixtral", {"num_local_experts": 10**9}, "num_local_experts"),
        ("deepseek_v3", {"n_routed_experts": 10**9}, "n_routed_experts"),
        ("deepseek_v41", {"hc_mult": 10**9}, "hc_mult"),
    ],
)  # fmt: skip
def test_sizes_beyond_the_weights_are_refused_before_anything_is_built(
    tmp_path: Path, family: str, changes: dict[str, int], said: str
):
    folder = configured(make_tiny_model(tmp_path / "m", family), **changes)
    with pytest.raises(ModelLoadFailed, match=rf"config\.json says {said}"):
        loaded(folder)


@pytest.mark.parametrize("family", ["gemma3", "gemma3n", "llama4", "qwen3_5"])
def test_so_are_those_of_a_model_that_also_sees(tmp_path: Path, family: str):
    folder = make_tiny_model(tmp_path / "m", family)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 10**9
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadFailed, match="num_hidden_layers 1,000,000,000"):
        loaded(folder)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_family_is_taken_for_larger_than_it_is(tmp_path: Path, family: str):
    assert loaded(make_tiny_model(tmp_path / "m", family))


def test_layers_in_an_order_that_the_class_can_not_have_are_refused(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m", "cohere2")
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ModelNotSupported, match=r"layer_types"):
        loaded(configured(folder, layer_types=kinds))

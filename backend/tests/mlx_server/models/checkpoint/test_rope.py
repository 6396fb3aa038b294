"""Rotary settings in transformers 5's form compute what they compute in the old one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import transformers
from mlx import nn
from tiny_encoders import make_tiny_encoder
from tiny_models import FAMILIES, make_tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.encoders.loading import load_encoder
from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.catalog import described
from mlx_manager.mlx_server.models.checkpoint.building import build, planned
from mlx_manager.mlx_server.models.checkpoint.rope import in_all_forms
from mlx_manager.mlx_server.models.loading.load import checked_folder
from mlx_manager.mlx_server.utils.broken import explained
from mlx_manager.mlx_server.utils.memory import Ledger

TOKENS = mx.array([[256, *range(40, 90)]])
BASE, LOCAL = 500_000.0, 700.0
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}
KNOWN = sorted(
    name
    for name, config in FAMILIES.items()
    if config.get("model_type", name) in CONFIG_MAPPING_NAMES and "rope_theta" in json.dumps(config)
)
ROTATES_NOTHING = {"jamba", "kimi_linear", "nemotron_h"}
"""They have a base and no positions."""
SMALL: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_group": 1, "topk_group": 1},
    "deepseek_v32": {"n_group": 1, "topk_group": 1},
    # transformers scales where the config says nothing.
    "gpt_oss": {"rope_scaling": {"rope_type": "yarn", "truncate": True, **YARN}},
}
"""Beside what transformers would have."""
BY_LAYER = ("mimo_v2_flash", *(name for name in FAMILIES if "gemma4" in name))
"""transformers reads the old form of these otherwise, or not at all."""
HARD_WIRED = "recurrent_gemma"


def built(folder: Path) -> nn.Module:
    """The model as a load has it before its weights are brought into memory."""
    with explained("m"):
        checked = checked_folder(described("m", folder, "models_dir"), PoolLimits())
        model, _ = build(planned(checked))
    return model


def logits(folder: Path) -> np.ndarray:
    return np.array(built(folder)(TOKENS).astype(mx.float32))


def write(folder: Path, config: Mapping[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def with_base(config: dict[str, Any]) -> dict[str, Any]:
    """The config with other bases than anybody's default, in the form that its class reads."""
    if isinstance(config.get("text_config"), dict):
        return config | {"text_config": with_base(config["text_config"])}
    changed = {name: BASE for name in ("rope_theta", "rotary_emb_base") if name in config}
    if isinstance(rope := config.get("rope_parameters"), dict):
        changed["rope_parameters"] = rope | {"rope_theta": BASE}
    for name in ("rope_local_base_freq", "swa_rope_theta"):
        if name in config:
            changed[name] = LOCAL
    return config | changed


def as_transformers_writes(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return what transformers saves of a config as read, with fields unknown to transformers."""
    read = CONFIG_MAPPING[model_type](**json.loads(json.dumps(config)))
    written = json.loads(read.to_json_string())
    written["model_type"] = config["model_type"]
    if "text_config" in config:
        kept = without(config["text_config"], *ROTARY)
        return config | {"text_config": written["text_config"] | kept}
    return written | without(config, *ROTARY, *RENAMED)


ROTARY = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "swa_rope_theta",
    "partial_rotary_factor",
    "rotary_emb_base",
    "rotary_pct",
)
RENAMED = ("num_experts", "sliding_window_pattern", "layer_types", "hybrid_override_pattern")
"""Not rotary, and written by another name."""


def both_forms(family: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A family's config with anybody's base, and with one of its own in the old form and the new.

    What the tiny model leaves to defaults is as transformers has it in all three: not that is
    compared.
    """
    transformers.logging.set_verbosity_error()
    model_type = FAMILIES[family].get("model_type", family)
    config = {"model_type": model_type, **FAMILIES[family], **SMALL.get(family, {})}
    old = with_base(config)
    new = as_transformers_writes(old, model_type)
    plain = without(new, *ROTARY, *RENAMED, "text_config", "head_dim")
    return plain | config, plain | old, new


@pytest.mark.parametrize("family", [name for name in KNOWN if name not in (*BY_LAYER, HARD_WIRED)])
def test_a_config_as_transformers_5_writes_it_computes_the_same(tmp_path: Path, family: str):
    default, old, new = both_forms(family)
    folder = make_tiny_model(tmp_path / "m", family, **without(default, "model_type"))
    expected = logits(write(folder, old))
    np.testing.assert_allclose(logits(write(folder, new)), expected, atol=1e-4)
    unchanged = np.allclose(logits(write(folder, default)), expected, atol=1e-4)
    assert unchanged == (family in ROTATES_NOTHING), "the base had no effect"


def test_a_base_that_the_class_does_not_read_is_refused_by_name(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m", HARD_WIRED)
    write(folder, with_base(json.loads((folder / "config.json").read_text())))
    with pytest.raises(ModelNotSupported, match=r"rope_theta 500000; .*recurrent_gemma does not"):
        logits(folder)


def rewritten(folder: Path, remove: tuple[str, ...] = ("rope_theta",), **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    return write(folder, without(config, *remove) | changes)


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "seed_oss", "granite", "smollm3"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("linear", {"factor": 4}),
        ("yarn", YARN),
        ("llama3", LLAMA3),
        ("longrope", LONG),
        ("yarn", YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
        ("yarn", YARN | {"beta_fast": 8, "beta_slow": 2}),
    ],
)
def test_scaling_inside_the_new_form_is_scaling(
    tmp_path: Path, family: str, kind: str, settings: dict[str, Any]
):
    folder = make_tiny_model(tmp_path / "m", family, rope_theta=BASE)
    plain = logits(folder)
    old = logits(rewritten(folder, (), rope_scaling={"rope_type": kind, **settings}))
    parameters = {"rope_type": kind, "rope_theta": BASE, **settings}
    new = rewritten(folder, ("rope_theta", "rope_scaling"), rope_parameters=parameters)
    np.testing.assert_array_equal(logits(new), old)
    assert not np.allclose(plain, old)


def test_scaling_by_the_length_is_scaling_in_either_form():
    settings = {"rope_type": "dynamic", "factor": 2.0}
    old = in_all_forms({"rope_theta": BASE, "rope_scaling": settings})
    new = in_all_forms({"rope_parameters": {**settings, "rope_theta": BASE}})
    assert old["rope_scaling"] == new["rope_scaling"] == {**settings, "type": "dynamic"}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_phi_3_is_scaled_by_its_own_length(tmp_path: Path, kind: str, place: str):
    long = without(LONG, "original_max_position_embeddings")
    scaling = {"type": "longrope", **long}
    folder = make_tiny_model(
        tmp_path / "m", "phi3", rope_scaling=scaling, original_max_position_embeddings=64
    )
    expected = logits(folder)
    removed = ("rope_theta", "rope_scaling", "original_max_position_embeddings")
    given = {"rope_type": kind, "rope_theta": 10000.0, **LONG}
    np.testing.assert_array_equal(logits(rewritten(folder, removed, **{place: given})), expected)


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "qwen3_moe", "starcoder2", "cohere"])
@pytest.mark.parametrize("form", ["old", "new"])
def test_scaling_that_the_class_does_not_apply_is_refused_by_name(
    tmp_path: Path, family: str, form: str
):
    folder = make_tiny_model(tmp_path / "m", family)
    scaling = {"rope_type": "yarn", **YARN}
    new = {"rope_parameters": scaling | {"rope_theta": 10000.0}}
    rewritten(folder, (), **({"rope_scaling": scaling} if form == "old" else new))
    with pytest.raises(ModelNotSupported, match=rf"rope_type yarn.* {family} does not apply"):
        logits(folder)


@pytest.mark.parametrize("kind", ["ntk-by-hand", "axial"])
def test_a_kind_that_nobody_knows_is_refused(tmp_path: Path, kind: str):
    folder = make_tiny_model(tmp_path / "m")
    rewritten(folder, (), rope_parameters={"rope_type": kind, "rope_theta": BASE})
    with pytest.raises(ModelLoadFailed, match=kind):
        logits(folder)


def test_the_amplitude_of_yarn_is_that_of_the_config(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    scaling = {"rope_type": "yarn", **YARN}
    usual = logits(rewritten(folder, (), rope_scaling=scaling))
    said = scaling | {"attention_factor": 0.1 * float(np.log(4.0)) + 1.0}
    np.testing.assert_allclose(logits(rewritten(folder, (), rope_scaling=said)), usual, atol=1e-5)
    other = logits(rewritten(folder, (), rope_scaling=scaling | {"attention_factor": 1.0}))
    assert not np.allclose(other, usual)
    assert built(folder).model.layers[0].self_attn.rope.mscale == pytest.approx(1.0)


BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": BASE},
    "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL},
}


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3"])
def test_types_of_layers_have_their_own_rotations(tmp_path: Path, family: str):
    folder = make_tiny_model(tmp_path / "m", family)
    default = logits(folder)
    config = json.loads((folder / "config.json").read_text())
    text = without(config.get("text_config", config), "rope_theta")
    old = {
        "rope_theta": BASE,
        "rope_local_base_freq": LOCAL,
        "rope_scaling": {"type": "linear", "factor": 8},
    }
    kinds = ["sliding_attention", "full_attention"] * 2
    new = {"rope_parameters": BY_TYPE, "layer_types": kinds, "_sliding_window_pattern": 2}
    nested = family == "gemma3"

    def whole(changes: dict[str, Any], *removed: str) -> dict[str, Any]:
        changed = without(text, *removed) | changes
        return config | {"text_config": changed} if nested else changed

    expected = logits(write(folder, whole(old)))
    given = logits(write(folder, whole(new, "sliding_window_pattern")))
    np.testing.assert_array_equal(given, expected)
    assert not np.allclose(default, expected)


def test_gemma_3n_has_its_local_base(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m", "gemma3n")
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    old = text | {"rope_theta": BASE, "rope_local_base_freq": LOCAL}
    plain = {kind: {"rope_type": "default", **rope} for kind, rope in BY_TYPE.items()}
    plain["full_attention"] = {"rope_type": "default", "rope_theta": BASE}
    new = without(text, "rope_theta", "rope_local_base_freq") | {"rope_parameters": plain}
    expected = logits(write(folder, config | {"text_config": old}))
    np.testing.assert_array_equal(logits(write(folder, config | {"text_config": new})), expected)


def test_mimo_has_its_window_layers_base(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m", "mimo_v2_flash")
    config = json.loads((folder / "config.json").read_text())
    expected = logits(write(folder, config | {"rope_theta": BASE, "swa_rope_theta": LOCAL}))
    rope = {
        "full_attention": {"rope_theta": BASE, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": LOCAL, "partial_rotary_factor": 0.5},
    }
    new = without(config, "rope_theta", "swa_rope_theta", "partial_rotary_factor")
    given = logits(write(folder, new | {"rope_parameters": rope}))
    np.testing.assert_array_equal(given, expected)


@pytest.mark.parametrize("family", [name for name in FAMILIES if "gemma4" in name])
def test_gemma_4_takes_one_rotation_for_every_layer(tmp_path: Path, family: str):
    folder = make_tiny_model(tmp_path / "m", family)
    config = json.loads((folder / "config.json").read_text())
    one = {"rope_type": "default", "rope_theta": BASE}
    each = {"full_attention": one, "sliding_attention": one}
    default = logits(folder)
    expected = logits(write(folder, config | {"rope_parameters": each}))
    np.testing.assert_array_equal(
        logits(write(folder, config | {"rope_parameters": one})), expected
    )
    assert not np.allclose(default, expected)


def test_rotations_by_type_that_the_class_can_not_tell_apart_are_refused(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m", "olmo3")
    one, other = {"rope_theta": BASE}, {"rope_theta": LOCAL}
    rewritten(folder, rope_parameters={"full_attention": one, "sliding_attention": one})
    assert logits(folder).size
    rewritten(folder, rope_parameters={"full_attention": one, "sliding_attention": other})
    with pytest.raises(ModelNotSupported, match=r"rope_theta 700 for sliding_attention; .*olmo3"):
        logits(folder)


def test_types_that_are_alike_are_one(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m", rope_theta=BASE)
    expected = logits(folder)
    each = {"full_attention": {"rope_theta": BASE, "rope_type": "default"}}
    np.testing.assert_array_equal(logits(rewritten(folder, rope_parameters=each)), expected)


@pytest.mark.parametrize("beside", [{"rope_theta": LOCAL}, {"rope_scaling": None}, {}])
@pytest.mark.parametrize("family", ["llama", "qwen3", "lfm2", "granitemoehybrid"])
def test_the_new_form_counts_for_more_than_a_base_beside_it(
    tmp_path: Path, family: str, beside: dict[str, Any]
):
    folder = make_tiny_model(tmp_path / "m", family, rope_theta=BASE)
    expected = logits(folder)
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": BASE}}
    np.testing.assert_array_equal(logits(rewritten(folder, **new, **beside)), expected)


@pytest.mark.parametrize(("family", "base"), [("starcoder2", 10_000.0), ("cohere", 500_000.0)])
@pytest.mark.parametrize("parameters", [None, {"rope_type": "default"}])
def test_a_base_that_nobody_names_is_the_one_of_transformers(
    tmp_path: Path, family: str, base: float, parameters: dict[str, Any] | None
):
    folder = make_tiny_model(tmp_path / "m", family, rope_theta=base)
    expected = logits(folder)
    given = {} if parameters is None else {"rope_parameters": parameters}
    np.testing.assert_array_equal(logits(rewritten(folder, **given)), expected)


@pytest.mark.parametrize("family", ["phi", "stablelm", "glm4", "gpt_neox", "qwen3_next"])
def test_a_part_of_each_head_is_rotated_in_either_form(tmp_path: Path, family: str):
    names = ("partial_rotary_factor", "rotary_pct", "rotary_emb_base", "rope_theta")
    folder = make_tiny_model(tmp_path / "m", family)
    expected = logits(folder)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    np.testing.assert_array_equal(logits(rewritten(folder, names, rope_parameters=rope)), expected)


@pytest.mark.parametrize(
    "config", [{}, {"rope_parameters": None}, {"rope_scaling": {}}, {"text_config": {}}]
)
def test_a_config_without_rotations_is_left_as_it_is(config: dict[str, Any]):
    assert in_all_forms(config) == config


@pytest.mark.parametrize("family", ["qwen3", "modernbert"])
def test_an_encoder_rotates_by_either_form(tmp_path: Path, family: str):
    def bases(folder: Path) -> set[float]:
        source = described("m", folder, "models_dir")
        encoder = load_encoder(source, PoolLimits(), Ledger(10**9))
        return {float(one.base) for one in encoder.model.modules() if isinstance(one, nn.RoPE)}

    names = {"qwen3": ("rope_theta",), "modernbert": ("global_rope_theta", "local_rope_theta")}
    folder = make_tiny_encoder(tmp_path / "m", family)
    one = {"rope_type": "default", "rope_theta": BASE}
    local = one | {"rope_theta": LOCAL}
    new = one if family == "qwen3" else {"full_attention": one, "sliding_attention": local}
    rewritten(folder, names[family], rope_parameters=new)
    assert bases(folder) == ({BASE} if family == "qwen3" else {BASE, LOCAL})


@pytest.mark.parametrize(
    "rope",
    [
        "default",
        [5e5],
        7,
        {"rope_theta": "500000"},
        {"rope_theta": 0},
        {"rope_theta": -1.0},
        {"rope_theta": True},
        {"rope_theta": [5e5]},
        {"rope_theta": 1e999},
        {"rope_theta": 5e5, "partial_rotary_factor": "half"},
        {"full_attention": {"rope_theta": None}, "sliding_attention": {"rope_theta": "x"}},
    ],
)
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rotary_settings_of_another_form_are_refused_by_name(tmp_path: Path, rope: Any, name: str):
    folder = make_tiny_model(tmp_path / "m")
    with pytest.raises(ModelLoadFailed, match=r"config\.json has (rope_|partial_)"):
        logits(rewritten(folder, **{name: rope}))

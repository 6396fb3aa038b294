from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.utils import load_model
from tiny_models import FAMILIES, make_tiny_model

from mlx_manager.mlx_server.errors import ModelTooLarge
from mlx_manager.mlx_server.models.loading.weights import (
    Form,
    activation_dtype,
    convert,
    default_device,
    evaluate,
    forms_of,
    shortlist,
)
from mlx_manager.mlx_server.utils.text import sized

FOUR_BIT = {"group_size": 32, "bits": 4}
TOKENS = mx.array([[256, 72, 101, 108, 108, 111]])

pytestmark = pytest.mark.skipif(default_device() != "cpu", reason="the forms are a CPU's")


def model_of(folder: Path, family: str, dtype: mx.Dtype, quantize: dict[str, Any] | None):
    """The same model, loaded anew at every call."""
    if not folder.exists():
        # With every expert at work, rounding can't send a token to others.
        everyone = {"num_experts_per_tok": 4} if "experts_per_tok" in str(FAMILIES[family]) else {}
        make_tiny_model(folder, family, dtype=dtype, quantize=quantize, **everyone)
    return load_model(folder, lazy=True)[0]


def names(model: nn.Module, device: str = "cpu") -> list[str]:
    return [form.name for form in forms_of(model, device)]  # type: ignore[arg-type]


def nbytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize(
    ("family", "dtype", "quantize"),
    [
        ("llama", mx.float16, None),
        ("llama", mx.bfloat16, None),
        ("llama", mx.float16, FOUR_BIT),
        ("llama", mx.bfloat16, FOUR_BIT),
        ("llama", mx.bfloat16, {"group_size": 64, "bits": 8}),
        ("llama", mx.bfloat16, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        ("qwen3_moe", mx.float16, FOUR_BIT),
        ("deepseek_v3", mx.bfloat16, FOUR_BIT),
        ("gpt_oss", mx.bfloat16, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        # Its recurrence makes much of what bfloat16 rounds: a third of the scale with some weights.
        ("qwen3_next", mx.float16, FOUR_BIT),
        ("mamba2", mx.bfloat16, FOUR_BIT),
        ("gemma3_text", mx.bfloat16, FOUR_BIT),
    ],
)
def test_every_form_computes_the_same_and_takes_the_bytes_foretold(
    family: str, dtype: mx.Dtype, quantize: dict[str, Any] | None, tmp_path: Path
):
    stored = model_of(tmp_path / "m", family, dtype, quantize)(TOKENS).astype(mx.float32)
    scale = stored.std()
    wide: list[mx.array] = []
    for form in forms_of(model_of(tmp_path / "m", family, dtype, quantize), "cpu"):
        model = model_of(tmp_path / "m", family, dtype, quantize)
        convert(model, form)
        evaluate(model)
        assert nbytes(model) == form.nbytes
        logits = model(TOKENS)
        if form.wide:
            assert logits.dtype == activation_dtype(model) == mx.float32
            wide.append(logits)
        # 16 bits of activations round; what is compared is not more exact than that.
        assert mx.square(logits.astype(mx.float32) - stored).mean() < (0.2 * scale) ** 2
    assert all(mx.allclose(logits, wide[0], atol=1e-4 * scale.item()) for logits in wide)
    assert wide


def test_forms_of_a_dense_model_by_device(tmp_path: Path):
    model = model_of(tmp_path / "m", "llama", mx.bfloat16, None)
    assert names(model) == ["stored", "float32"]
    assert names(model, "cuda") == names(model, "metal") == ["stored"]
    assert names(model_of(tmp_path / "f32", "llama", mx.float32, None)) == ["stored"]


def test_forms_of_a_quantised_model_by_device(tmp_path: Path):
    model = model_of(tmp_path / "m", "llama", mx.bfloat16, FOUR_BIT)
    assert names(model) == ["stored", "dequantized", "float32", "dequantized-float32"]
    assert names(model, "cuda") == ["stored", "dequantized"]
    assert names(model, "metal") == ["stored"]
    model = model_of(tmp_path / "f32", "llama", mx.float32, FOUR_BIT)
    assert names(model) == ["stored", "dequantized"]


@pytest.mark.parametrize("tied", [False, True])
def test_dense_weights_beside_those_they_were_made_of_take_the_bytes_foretold(
    tmp_path: Path, tied: bool
):
    """On a device whose kernels multiply few rows by packed weights."""
    folder = make_tiny_model(
        tmp_path / "m", dtype=mx.bfloat16, quantize=FOUR_BIT, tie_word_embeddings=tied
    )
    model = load_model(folder, lazy=True)[0]
    expected = model(TOKENS)
    form = forms_of(model, "cuda", multiplies_packed=True)[-1]
    assert (form.name, form.keeps, form.dense) == ("stored+dequantized", True, True)
    convert(model, form)
    evaluate(model)
    assert nbytes(model) == form.nbytes
    assert ("packed" in model.model.embed_tokens) is tied
    off = mx.linalg.norm((model(TOKENS) - expected).astype(mx.float32))
    assert off < 0.05 * mx.linalg.norm(expected.astype(mx.float32))


def test_dense_experts_must_be_float32_on_a_cpu(tmp_path: Path):
    model = model_of(tmp_path / "m", "qwen3_moe", mx.bfloat16, None)
    (form,) = forms_of(model, "cpu")
    assert form.name == "float32"
    assert shortlist([form], "keep", form.nbytes)[0] == [form]
    with pytest.raises(ModelTooLarge, match=rf"take {sized(form.nbytes)} .* room for 1000 bytes"):
        shortlist([form], "auto", 1000)
    convert(model, form)
    assert mx.all(mx.isfinite(model(TOKENS)))
    quantized = model_of(tmp_path / "q", "qwen3_moe", mx.bfloat16, FOUR_BIT)
    assert names(quantized) == ["stored", "float32", "dequantized-float32"]


def test_mixed_quantisation_converts_layer_by_layer(tmp_path: Path):
    def six_bits_in_the_head(path: str, module: nn.Module) -> dict[str, int] | bool:
        if "norm" in path or "k_proj" in path:
            return False
        return {"group_size": 32, "bits": 6 if "lm_head" in path else 4}

    quantize = {**FOUR_BIT, "quant_predicate": six_bits_in_the_head}
    model = model_of(tmp_path / "m", "llama", mx.bfloat16, quantize)
    assert model.lm_head.bits == 6
    stored = model(TOKENS).astype(mx.float32)
    form = forms_of(model, "cpu")[-1]
    convert(model, form)
    assert not any("Quantized" in type(m).__name__ for _, m in model.named_modules())
    assert nbytes(model) == form.nbytes
    assert mx.square(model(TOKENS) - stored).mean() < (0.2 * stored.std()) ** 2


def test_unknown_quantised_layer_is_left_as_it_is():
    layer = QuantizedSwitchLinear(64, 32, 2, bias=False, group_size=16, mode="nvfp4")
    layer.global_scale = mx.ones(2)
    model = nn.Module()
    model.experts = layer
    assert names(model, "cuda") == ["stored"]
    convert(model, Form("dequantized", 0, dense=True))
    assert model.experts is layer


FORMS = [
    Form("stored", 100),
    Form("dequantized", 400, dense=True),
    Form("float32", 120, wide=True),
    Form("dequantized-float32", 800, dense=True, wide=True),
]


@pytest.mark.parametrize(
    ("setting", "room", "left", "reason"),
    [
        ("keep", 1000, ["stored"], "the setting is keep"),
        ("auto", 1000, ["stored", "dequantized", "float32", "dequantized-float32"], ""),
        ("auto", 500, ["stored", "dequantized", "float32"], "dequantized-float32 800"),
        ("auto", 0, ["stored"], "room of 0 bytes is too small"),
        ("dequantize", 1000, ["dequantized", "dequantized-float32"], "the setting is dequantize"),
        ("dequantize", 500, ["dequantized"], "dequantized-float32 800"),
    ],
)
def test_shortlist_is_what_is_asked_for_and_fits(
    setting: Any, room: int, left: list[str], reason: str
):
    forms, said = shortlist(FORMS, setting, room)
    assert [form.name for form in forms] == left
    assert reason in said


def test_packed_weights_are_kept_beside_dense_ones_where_both_fit_and_nothing_else_is_asked_for():
    both = Form("stored+dequantized", 500, dense=True, keeps=True)
    forms = [Form("stored", 100), Form("dequantized", 400, dense=True), both]
    assert both in shortlist(forms, "auto", 500)[0]
    alone, reason = shortlist(forms, "auto", 499)
    assert alone == forms[:1]
    assert (
        reason == "for other forms the room of 499 bytes is too small: stored+dequantized 500 bytes"
    )
    assert shortlist(forms, "keep", 500)[0] == forms[:1]
    assert shortlist(forms, "dequantize", 500)[0] == forms[1:2]


def test_dequantising_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(
        ModelTooLarge, match=r"400 bytes in the form dequantized, .* room for 300 bytes"
    ):
        shortlist(FORMS, "dequantize", 300)


def test_stored_form_needs_no_further_room_and_dense_models_have_nothing_to_dequantise():
    dense = [Form("stored", 100), Form("float32", 200, wide=True)]
    assert shortlist(dense, "dequantize", 500)[0] == dense
    assert shortlist(dense, "auto", -50)[0] == dense[:1]

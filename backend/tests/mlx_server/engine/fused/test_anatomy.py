"""Which modules are common decoders."""

from __future__ import annotations

import mlx.core as mx
import pytest
from engine.common_decoders import DIMENSIONS, GEMMA3, MODELS, make
from engine.portable import Portable, plainly

from mlx_manager.mlx_server.engine.fused.anatomy import Common
from mlx_manager.mlx_server.engine.fused.check import check
from mlx_manager.mlx_server.engine.fused.decoder import FusedDecoder
from mlx_manager.mlx_server.engine.kernels.kernel import Unsupported

PAGE = 16
MINISTRAL = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma", {"head_dim": 16}, "a body of other parts"),
        ("olmo2", {"head_dim": 16}, "a block of other parts"),
        ("ministral3", MINISTRAL, "attention that takes attn_scale"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "DynamicNTK"),
        ("llama", {"num_attention_heads": 8}, "rotation of 8 elements"),
    ],
)
def test_other_modules_are_declined_with_the_difference(family, changes, reason):
    declined = FusedDecoder.build(make(family, changes), PAGE, Portable)
    assert isinstance(declined, Unsupported)
    assert reason in declined.reason


def test_sums_that_are_clipped_to_what_float16_has_are_declined():
    model = make(*MODELS["gemma3"])
    model.set_dtype(mx.float16)
    declined = FusedDecoder.build(model, PAGE, Portable)
    assert "sums that are clipped" in declined.reason


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_embeddings_are_scaled_as_the_module_scales_them(name, dtype):
    model = make(*MODELS[name])
    model.set_dtype(dtype)
    tokens = mx.array([5, 96, 0])
    scale = mx.array(96**0.5, mx.bfloat16).astype(dtype) if name == "gemma3" else 96**0.5
    common = Common.of(model, PAGE)
    assert common.embedded(tokens).dtype == dtype
    assert mx.array_equal(common.embedded(tokens), model.model.embed_tokens(tokens) * scale)


@pytest.mark.parametrize("tied", [True, False])
def test_a_module_with_a_language_model_alone_is_that(tied):
    text = DIMENSIONS | GEMMA3 | {"model_type": "gemma3_text"}
    model = make("gemma3", {"text_config": text, "tie_word_embeddings": False})
    if tied:
        model.language_model.sanitize({})
    decoder = FusedDecoder.build(model, PAGE, Portable, compile=plainly)
    assert isinstance(decoder, FusedDecoder), decoder
    assert check(decoder, model, PAGE) is None
    common = Common.of(model, PAGE)
    assert (common.head is common.embed) == tied


def test_a_device_without_kernels_is_the_reason():
    declined = FusedDecoder.build(make("llama", {}), PAGE, lambda _: Unsupported("no GPU here"))
    assert declined == Unsupported("the module is no common decoder: no GPU here")

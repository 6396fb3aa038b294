"""Which models are multiplied as they are packed."""

from __future__ import annotations

import pytest
from engine.common_decoders import EXPERTS, make
from mlx import nn

from mlx_manager.mlx_server.engine.fused.anatomy import Common
from mlx_manager.mlx_server.engine.fused.packed import are_packed_alike, multiplies_packed

WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 384, "num_attention_heads": 2}


def packed(changes, different=lambda name: {}, **quantization):
    """different: what else a layer is quantised with, by its name; None for not at all."""
    model = make("llama", WIDE | changes)

    def chosen(name, layer):
        own = different(name)
        return hasattr(layer, "to_quantized") and own is not None and {**quantization, **own}

    nn.quantize(model, class_predicate=chosen)
    return model


def alike(model):
    return are_packed_alike(Common.of(model, 16))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_4_and_8_bits_are(bits, tied):
    assert alike(packed({"tie_word_embeddings": tied}, group_size=64, bits=bits))


def test_a_vocabulary_of_half_blocks_is():
    assert alike(packed({"vocab_size": 448}, group_size=64, bits=4))


@pytest.mark.parametrize("experts_bits", [4, 8])
def test_experts_are_if_they_are_packed_as_the_rest_is_whatever_their_router(experts_bits):
    wide = {"hidden_size": 256, "vocab_size": 384, "moe_intermediate_size": 256}
    wide |= {"intermediate_size": 512, "mlp_only_layers": [], "head_dim": 64}
    model = make("qwen3_moe", EXPERTS["qwen3_moe"] | wide)

    def chosen(name, layer):
        bits = experts_bits if "switch_mlp" in name else 8 if name.endswith("mlp.gate") else 4
        return hasattr(layer, "to_quantized") and {"group_size": 64, "bits": bits}

    nn.quantize(model, class_predicate=chosen)
    assert alike(model) == (experts_bits == 4)


@pytest.mark.parametrize(
    "model",
    [
        lambda: make("llama", WIDE),
        lambda: packed({}, group_size=64, bits=6),
        lambda: packed({}, group_size=32, bits=4, mode="mxfp4"),
        lambda: packed({"vocab_size": 390}, group_size=64, bits=4),
        lambda: packed({}, lambda name: None if "head" in name else {}, group_size=64, bits=4),
        lambda: packed({}, lambda name: {"bits": 8 if "down" in name else 4}, group_size=64),
    ],
    ids=["dense", "6-bits", "mxfp4", "odd-vocabulary", "dense-head", "mixed"],
)
def test_others_are_not(model):
    assert not alike(model())


def test_no_model_is_where_there_are_no_kernels_or_another_decoder():
    assert not multiplies_packed(packed({}, group_size=64, bits=4))
    assert not multiplies_packed(make("olmo2", {"head_dim": 16}))

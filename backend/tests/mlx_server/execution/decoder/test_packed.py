"""Which models are multiplied as they are packed."""

from __future__ import annotations

import pytest
from execution.decoder.common_decoders import EXPERTS, SHORTS, make
from mlx import nn

from mlx_manager.mlx_server.execution.decoder.packed import are_served, multiplies_packed
from mlx_manager.mlx_server.execution.spec.decoder import DecoderSpec

WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 384, "num_attention_heads": 2}


def packed(changes, different=lambda name: {}, **quantization):
    """different: what else a layer is quantised with, by its name; None for not at all."""
    model = make("llama", WIDE | changes)

    def chosen(name, layer):
        own = different(name)
        return hasattr(layer, "to_quantized") and own is not None and {**quantization, **own}

    nn.quantize(model, class_predicate=chosen)
    return model


def served(model):
    return are_served(DecoderSpec.of(model, 16))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_4_and_8_bits_are(bits, tied):
    assert served(packed({"tie_word_embeddings": tied}, group_size=64, bits=bits))


def test_a_vocabulary_of_half_blocks_is():
    assert served(packed({"vocab_size": 448}, group_size=64, bits=4))


EIGHT, FOUR = {"group_size": 64, "bits": 8}, {"group_size": 64, "bits": 4}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


@pytest.mark.parametrize("rest", [FOUR, EIGHT, None])
@pytest.mark.parametrize("experts", [FOUR, EIGHT, MXFP4])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4_text"])
def test_layers_with_experts_are_however_each_is_packed(family, experts, rest):
    wide = {"hidden_size": 256, "vocab_size": 384, "moe_intermediate_size": 256}
    wide |= {"intermediate_size": 512, "mlp_only_layers": [], "head_dim": 64}
    wide |= {"global_head_dim": 64}
    model = make(family, EXPERTS[family] | wide)

    def chosen(name, layer):
        of_experts = "switch_mlp" in name or "experts" in name
        own = experts if of_experts else EIGHT if name.endswith("mlp.gate") else rest
        return hasattr(layer, "to_quantized") and own is not None and own

    nn.quantize(model, class_predicate=chosen)
    assert served(model)


@pytest.mark.parametrize("family", SHORTS)
def test_layers_of_short_convolutions_are(family):
    model = make(family, SHORTS[family] | WIDE | {"moe_intermediate_size": 256})
    nn.quantize(model, **FOUR)
    assert served(model)


def test_experts_whose_packing_no_kernel_knows_are_not():
    model = make("mixtral", EXPERTS["mixtral"] | WIDE)
    nn.quantize(model, group_size=64, bits=6)
    assert not served(model)


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
    assert not served(model())


def test_no_model_is_where_there_are_no_kernels_or_another_decoder():
    assert not multiplies_packed(packed({}, group_size=64, bits=4))
    assert not multiplies_packed(make("olmo2", {"head_dim": 16}))

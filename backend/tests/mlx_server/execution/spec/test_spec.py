"""Which modules are common decoders."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.matmul.portable import PortableProducts
from devices.portable import Portable, plainly
from execution.decoder.common_decoders import (
    CORRECTED,
    DIMENSIONS,
    EXPERTS,
    GEMMA3,
    MODELS,
    SHORTS,
    drawn,
    make,
)
from mlx import nn
from mlx_lm.models import (
    deepseek_v2,
    deepseek_v3,
    dots1,
    glm4_moe,
    glm4_moe_lite,
    lfm2_moe,
    llama,
    minimax,
    mistral4,
)

from mlx_manager.mlx_server.devices.cuda.matmul.factors import ExpertScoring
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.execution.decoder.check import check
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.spec.decoder import DecoderSpec
from mlx_manager.mlx_server.execution.spec.mlps import MoESpec, RoutingSpec
from mlx_manager.mlx_server.execution.spec.parts import NotFusable

PAGE = 16


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma", {"head_dim": 16}, "a body of other parts"),
        ("olmo2", {"head_dim": 16}, "a block of other parts"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "DynamicNTK"),
        ("llama", {"num_attention_heads": 8}, "rotation of 8 elements"),
        ("lfm2", {**SHORTS["lfm2"], "conv_bias": True}, "a convolution with a bias"),
    ],
)
def test_other_modules_are_declined_with_the_difference(family, changes, reason):
    declined = FusedDecoder.build(make(family, changes), PAGE, Portable)
    assert isinstance(declined, Unsupported)
    assert reason in declined.reason


def test_attention_that_is_given_more_is_declined_whatever_it_is():
    class Given(llama.Attention):
        def __call__(self, x, mask=None, cache=None, offset=0):
            return super().__call__(x, mask, cache)

    model = make("llama", {})
    for layer in model.layers:
        layer.self_attn.__class__ = Given
    with pytest.raises(NotFusable, match="attention that takes offset"):
        DecoderSpec.of(model, 16)


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
    spec = DecoderSpec.of(model, PAGE)
    assert spec.embedded(tokens).dtype == dtype
    assert mx.array_equal(spec.embedded(tokens), model.model.embed_tokens(tokens) * scale)


@pytest.mark.parametrize("tied", [True, False])
def test_a_module_with_a_language_model_alone_is_that(tied):
    text = DIMENSIONS | GEMMA3 | {"model_type": "gemma3_text"}
    model = make("gemma3", {"text_config": text, "tie_word_embeddings": False})
    if tied:
        model.language_model.sanitize({})
    decoder = FusedDecoder.build(model, PAGE, Portable, compile=plainly)
    assert isinstance(decoder, FusedDecoder), decoder
    assert check(decoder, model, PAGE) is None
    spec = DecoderSpec.of(model, PAGE)
    assert (spec.head is spec.embed) == tied


def test_a_device_without_kernels_is_the_reason():
    declined = FusedDecoder.build(make("llama", {}), PAGE, lambda _: Unsupported("no GPU here"))
    assert declined == Unsupported("the module is no common decoder: no GPU here")


IN_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
AS_THEY_ARE = {"norm_topk_prob": False, "n_shared_experts": None}
# Layers with a router of their own kind, and what differs from `CORRECTED`.
SIGMOIDS = [
    (glm4_moe, "MoE", {}),
    (glm4_moe, "MoE", AS_THEY_ARE),
    (glm4_moe, "MoE", {"num_experts_per_tok": 1}),
    (glm4_moe, "MoE", {"n_group": 2, "topk_group": 2}),
    (glm4_moe_lite, "Glm4MoeLiteMoE", {}),
    (glm4_moe_lite, "Glm4MoeLiteMoE", AS_THEY_ARE),
    (deepseek_v3, "DeepseekV3MoE", {"n_shared_experts": 1}),
    (dots1, "Dots1MoE", {"mlp_bias": False}),
]
ROUTED = [*SIGMOIDS, (deepseek_v2, "DeepseekV2MoE", {"topk_method": "greedy"})]


def routed_layer(module, name: str, changes: dict) -> nn.Module:
    config = DIMENSIONS | EXPERTS["glm4_moe"] | {"rope_scaling": {}} | changes
    mx.random.seed(5)
    layer = getattr(module, name)(module.ModelArgs.from_dict({"model_type": "", **config}))
    layer.apply(drawn)
    return layer


def scores_of(routing: RoutingSpec, logits: mx.array) -> np.ndarray:
    """(rows, experts): what experts are weighted by, those that are not chosen by 0."""
    sigmoid = routing.scoring is ExpertScoring.SIGMOID
    scores = np.array(mx.sigmoid(logits) if sigmoid else mx.softmax(logits, axis=-1))
    by = scores if routing.bias is None else scores + np.array(routing.bias)
    last = np.argsort(-by, axis=1)[:, routing.chosen :]
    np.put_along_axis(scores, last, 0.0, axis=1)
    if routing.normalised:
        scores /= scores.sum(1, keepdims=True) + routing.least
    return scores * routing.scale


@pytest.mark.parametrize(("module", "name", "changes"), ROUTED)
def test_routers_choose_and_weigh_as_they_are_read(module, name, changes):
    layer = routed_layer(module, name, changes)
    routes = MoESpec.of(layer)
    assert routes is not None
    x = mx.random.normal((40, 64))
    chosen, scores = layer.gate(x[None])
    wanted = np.zeros((40, routes.router.weight.shape[0]), np.float32)
    np.put_along_axis(wanted, np.array(chosen[0]), np.array(scores[0]), axis=1)
    mine = scores_of(routes.routing, x @ routes.router.weight.T)
    np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"use_expert_bias": False}, {"norm_topk_prob": False}])
@pytest.mark.parametrize("logits", [0.0, -14.0])
def test_lfm_2_s_router_chooses_and_weighs_as_it_is_read(changes, logits):
    """Also where a row's scores are next to nothing."""
    changes = SHORTS["lfm2_moe"] | changes
    layer = routed_layer(lfm2_moe, "Lfm2MoeSparseMoeBlock", changes)
    layer.gate.weight[:, 0] = logits
    routes = MoESpec.of(layer)
    assert routes is not None
    x = mx.random.normal((40, 64))
    x[:, 0] = 1.0
    # Each expert gives itself, so that the layer gives the weights.
    layer.switch_mlp = lambda _, chosen: mx.eye(6)[chosen]
    mine = scores_of(routes.routing, x @ routes.router.weight.T)
    np.testing.assert_allclose(mine, np.array(layer(x[None])[0]), rtol=1e-4, atol=1e-9)


def experts_beside_an_mlp() -> nn.Module:
    return make("gemma4_text", EXPERTS["gemma4_text"])


def test_gemma_4_s_router_chooses_and_weighs_as_it_is_read():
    block = experts_beside_an_mlp().layers[0]
    routes = MoESpec.beside(block, block.pre_feedforward_layernorm_2)
    x = mx.random.normal((40, 96))
    chosen, scores = block.router(x[None])
    wanted = np.zeros((40, 6), np.float32)
    np.put_along_axis(wanted, np.array(chosen[0]), np.array(scores[0]), axis=1)
    normed = mx.fast.rms_norm(x, routes.router_norm, block.router.eps)
    mine = scores_of(routes.routing, normed @ routes.router.weight.T)
    mine = mine * np.array(routes.routing.expert_scale)
    np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("router", "norms that differ"),
        ("post_feedforward_layernorm_2", "norms behind experts and an MLP that differ"),
    ],
)
def test_norms_around_experts_beside_an_mlp_that_differ_are_the_reason(part, reason):
    model = experts_beside_an_mlp()
    model.layers[1][part].eps = 1e-3
    declined = FusedDecoder.build(model, PAGE, Portable, lambda _: PortableProducts())
    assert reason in declined.reason


def test_experts_beside_an_mlp_without_kernels_for_them_are_the_reason():
    declined = FusedDecoder.build(experts_beside_an_mlp(), PAGE, Portable)
    assert "experts, for which this device has no kernels" in declined.reason


@pytest.mark.parametrize(("module", "name", "changes"), ROUTED)
def test_what_all_rows_go_through_without_a_gate_is_so_many_experts(module, name, changes):
    routes = MoESpec.of(routed_layer(module, name, changes))
    assert routes is not None
    shared = (CORRECTED | changes)["n_shared_experts"]
    assert (routes.shared and (routes.shared.gate, routes.shared.times)) == (
        shared and (None, shared)
    )


@pytest.mark.parametrize(("module", "name", "changes"), SIGMOIDS)
def test_experts_that_are_chosen_in_groups_are_declined(module, name, changes):
    layer = routed_layer(module, name, changes | IN_GROUPS)
    with pytest.raises(NotFusable, match="in groups"):
        MoESpec.of(layer)


def test_groups_are_the_reason_that_a_whole_model_is_declined():
    of = EXPERTS["glm4_moe"] | IN_GROUPS
    declined = FusedDecoder.build(make("glm4_moe", of), PAGE, Portable)
    assert "experts that are chosen in groups" in declined.reason


def test_deepseek_v2_s_groups_are_declined_where_it_chooses_by_them():
    by_groups = IN_GROUPS | {"topk_method": "group_limited_greedy"}
    with pytest.raises(NotFusable, match="in groups"):
        MoESpec.of(routed_layer(deepseek_v2, "DeepseekV2MoE", by_groups))
    greedy = IN_GROUPS | {"topk_method": "greedy"}
    assert MoESpec.of(routed_layer(deepseek_v2, "DeepseekV2MoE", greedy)) is not None


@pytest.mark.parametrize(
    ("module", "name"), [(minimax, "MiniMaxSparseMoeBlock"), (mistral4, "Mistral4MoE")]
)
def test_routers_without_a_module_that_says_how_they_score_are_not_guessed(module, name):
    sizes = {"num_local_experts": 6, "shared_intermediate_size": 64, "rotary_dim": 16}
    sizes |= {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    assert MoESpec.of(routed_layer(module, name, sizes | {"qk_rope_head_dim": 16})) is None


def test_shared_experts_that_are_stored_otherwise_are_declined():
    layer = routed_layer(glm4_moe, "MoE", {})
    nn.quantize(layer.shared_experts, group_size=32, bits=8)
    assert MoESpec.of(layer) is None

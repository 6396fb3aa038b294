"""Small random modules of every kind of the common decoder."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

DIMENSIONS = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
# Windows shorter than texts, in two layers of three; a width whose root has to be rounded.
GEMMA3 = {
    "hidden_size": 96,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
MODELS = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "traditional": ("llama", {"rope_traditional": True}),
    "llama3-rope": ("llama", {"rope_scaling": LLAMA3}),
    "yarn": ("llama", {"rope_scaling": YARN}),
    "windows": (
        "llama",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,
        },
    ),
    "qwen2": ("qwen2", {}),
    # Queries that are multiplied from a position on that texts go past, in either kind of layer.
    "ministral3": (
        "ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.7,
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,
        },
    ),
    # Of whose layers some have no rotation.
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "glm4": (
        "glm4",
        {"head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", {"rope_scaling": LONGROPE}),
    "phi3-partial": ("phi3", {"hidden_size": 128, "partial_rotary_factor": 0.5}),
    "gemma2": (
        "gemma2",
        {
            "hidden_size": 96,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            # Low enough that scores and logits feel them.
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3-tied": ("gemma3_text", {**GEMMA3, "tie_word_embeddings": True}),
}
# Values that are normed, results that are scaled, inputs of each layer's own, and wider heads in
# every third layer.
GEMMA4 = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 32,
    "use_double_wide_mlp": False,
    "tie_word_embeddings": True,
}
GEMMA4S = {
    "gemma4": ("gemma4_text", GEMMA4),
    # Whose last layers attend to the keys and values of earlier ones, and have wider MLPs.
    "gemma4-shared": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "sliding_window_pattern": 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    # Without such inputs, and with values that are keys in every third layer.
    "gemma4-keys": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
}
HYBRID = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
# Layers of the gated delta rule, and attention with gates.
HYBRIDS = {
    "qwen3_5": {
        **HYBRID,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "qwen3_next": {
        **HYBRID,
        "partial_rotary_factor": 0.5,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 64,
    },
}
# Layers of a gated short convolution beside attention.
SHORT = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}
SHORTS = {
    "lfm2": {
        **SHORT,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    # Whose first layer has no experts.
    "lfm2_moe": {
        **SHORT,
        "moe_intermediate_size": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.8,
    },
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": None,
}
# With ranks and sizes that are multiples of a group.
PACKABLE = {**LATENT, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
# Latent attention, with and without a rank of its own for queries.
LATENTS = {
    "rank": ("glm4_moe_lite", LATENT),
    "no rank": ("glm4_moe_lite", {**LATENT, "q_lora_rank": None}),
    "biases": ("glm4_moe_lite", {**LATENT, "attention_bias": True}),
    "yarn": (
        "deepseek_v3",
        {**LATENT, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}
# Routers that score by sigmoids, corrected for the choice; experts shared without a gate; a first
# layer without experts.
CORRECTED = {
    "head_dim": 32,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": True,
    "rope_scaling": None,
}
EXPERTS = {
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    # Two shared ones, as large as one of the others each.
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 3},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_scaling": {**YARN, "factor": 32.0},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "glm4_moe_lite": {**CORRECTED, **PACKABLE, "n_routed_experts": 6},
    "deepseek_v3": {**CORRECTED, **PACKABLE, "n_routed_experts": 6},
    "glm4_moe": {**CORRECTED, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    # Without norms of q and k, and with weights that don't add up to the scale.
    "solar_open": {
        **CORRECTED,
        "n_shared_experts": 1,
        "norm_topk_prob": False,
        "partial_rotary_factor": 1.0,
    },
    "dots1": {**CORRECTED, "attention_bias": False, "mlp_bias": False},
    "exaone_moe": {
        **CORRECTED,
        "num_experts": 6,
        "num_shared_experts": 1,
        "is_moe_layer": [False, True, True],
        "sliding_window": 24,
        "layer_types": ["full_attention"] * 3,
    },
    # Softmax over all, of weights as they are.
    "deepseek": {
        **CORRECTED,
        "attention_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
    },
    "ernie4_5_moe": {
        "head_dim": 32,
        "use_bias": False,
        "moe_intermediate_size": 64,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_gate_act": "softmax",
    },
    # Beside an MLP, between norms of their own; a router that norms and scales by itself, and
    # weights that are scaled for each expert.
    "gemma4_text": {
        **GEMMA4S["gemma4-keys"][1],
        "num_hidden_layers": 3,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
}


def make(family: str, changes: dict) -> nn.Module:
    module = __import__(f"mlx_lm.models.{family}", fromlist=["Model"])
    mx.random.seed(3)
    config = {"model_type": family, **DIMENSIONS, **changes}
    model = module.Model(module.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"]:
        # Some modules take it from the weights.
        model.sanitize({})
    model.apply(drawn)
    mx.eval(model.parameters())
    return model


def drawn(x: mx.array) -> mx.array:
    """Norms and biases are born as ones and zeros, which would hide their being mixed up."""
    all_alike = x.ndim == 1 or not bool(mx.any(x))
    return x + 0.3 * mx.random.normal(x.shape) if all_alike else x * 2

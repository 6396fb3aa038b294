"""Real model folders, tiny and random: config.json, safetensors, tokenizer and chat template.

`make_tiny_model(tmp_path / "m", "qwen3")` writes a folder that mlx-lm loads like any other.
The tokenizer is byte-level (one token a byte) with Llama 3's special tokens.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes, load_model, quantize_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from mlx_manager.mlx_server.models.families import mtp_facts

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|finetune_right_pad_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(8)),
)
BOS_ID, EOS_ID, EOT_ID = 256, 257, 260
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
SLIDING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "qwen3_moe": DECODER | EXPERTS,
    "mixtral": DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": DECODER,
    "gemma2": DECODER | {"query_pre_attn_scalar": 16, "sliding_window": 32},
    "gemma3_text": DECODER
    | {
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
    },
    "phi3": DECODER,
    "olmo2": DECODER,
    "granite": DECODER
    | {
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "cohere2": DECODER
    | {"num_hidden_layers": 4, "sliding_window": 32, "sliding_window_pattern": 2},
    "deepseek_v3": DECODER | LATENT | ROUTED,
    # Latent attention without experts.
    "glm4_moe_lite": DECODER | LATENT | ROUTED | {"first_k_dense_replace": 2},
    "gpt_oss": DECODER
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "rope_theta": 10000,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4": DECODER | {"attention_bias": True, "partial_rotary_factor": 0.5},
    "qwen3_next": DECODER
    | EXPERTS
    | {
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
    "falcon_h1": DECODER
    | {
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
        "attention_out_multiplier": 1.0,
    },
    "lfm2": DECODER
    | {
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    },
    "cohere": DECODER,
    "phi": DECODER | {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "gpt2": {
        "n_ctx": 2048,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 2048,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCAB_SIZE,
    },
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 2,
        "n_inner": 128,
        "n_head": 4,
        "n_positions": 2048,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCAB_SIZE,
    },
    "gpt_neox": DECODER | {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    "starcoder2": DECODER | {"norm_epsilon": 1e-5},
    "stablelm": DECODER
    | {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "internlm2": DECODER,
    "seed_oss": DECODER,
    "ernie4_5": DECODER | {"use_bias": False},
    "hunyuan_v1_dense": DECODER
    | {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    # Every fourth layer of this one has no positions, and of the next no window.
    "smollm3": DECODER | {"num_hidden_layers": 4},
    "exaone4": DECODER
    | {
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_scaling": {"rope_type": "default"},
    },
    "olmo3": DECODER | SLIDING,
    # Queries grow with the position, in steps of 64 here.
    "ministral3": DECODER
    | SLIDING
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 64,
        }
    },
    "minicpm3": DECODER
    | LATENT
    | {
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "scale_emb": 1.0,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "original_max_position_embeddings": 2048,
        },
    },
    "gemma3": {
        "text_config": DECODER
        | {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
        },
        "vocab_size": VOCAB_SIZE,
    },
    # The last two layers attend to the keys and values of earlier ones.
    "gemma3n": {
        "text_config": DECODER
        | SLIDING
        | {
            "model_type": "gemma3n",
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.9, 0.0] * 2,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 16,
        }
    },
    "gemma4_text": DECODER
    | SLIDING
    | {
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text, keys shared": DECODER
    | SLIDING
    | {
        "model_type": "gemma4_text",
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text, experts": DECODER
    | SLIDING
    | {
        "model_type": "gemma4_text",
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "llama4": {
        "text_config": DECODER
        | {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": 32,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "llama4_text": DECODER
    | {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
    },
    "olmoe": DECODER | EXPERTS,
    "phimoe": DECODER
    | {
        "num_local_experts": 4,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "long_mscale": 1.0,
            "short_mscale": 1.0,
        },
    },
    "glm4_moe": DECODER
    | ROUTED
    | {
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "minimax": DECODER
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "rotary_dim": 8,
    },
    "mimo_v2_flash": DECODER
    | ROUTED
    | {
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 32,
        "n_shared_experts": None,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v2": DECODER
    | LATENT
    | ROUTED
    | {
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": 2048,
            "mscale_all_dim": 0,
        },
    },
    "deepseek_v32": DECODER
    | LATENT
    | ROUTED
    | {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 24},
    "deepseek_v41": {
        "hidden_size": 64,
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "sliding_window": 32,
        "compress_ratios": [0, 4, 4, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "max_position_embeddings": 2048,
        "hc_mult": 2,
    },
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 64,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "num_layers": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
        **LATENT,
    },
    "mamba": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
    "rwkv7": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "norm_eps": 1e-5,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "recurrent_gemma": DECODER
    | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 32,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "nemotron_h": DECODER
    | {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
    },
    "granitemoehybrid": DECODER
    | {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "jamba": DECODER
    | {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_linear": DECODER
    | LATENT
    | {
        "num_hidden_layers": 4,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
        },
        "model_max_length": 2048,
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "qwen3_5": {
        "text_config": DECODER
        | {
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "rope_parameters": {
                "type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        }
    },
    "olmo_hybrid": DECODER
    | {
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
    },
    "baichuan_m1": DECODER
    | {
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
    },
    "plamo2": DECODER
    | {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
        "mamba_step": 2,
    },
    "lfm2_moe": DECODER
    | {
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 2,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 2,
    },
}


def make_tiny_model(
    path: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    quantize: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random model of `model_type` (a key of `FAMILIES`) to the folder `path`.

    The same arguments give the same weights. `quantize` is passed to mlx-lm's `quantize_model`
    (`{"group_size": 32, "bits": 4}`), the scales then have `dtype`. `overrides` go to config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": model_type,
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, EOT_ID],
        **FAMILIES[model_type],
        **overrides,
    }
    packed = quantize and tuple(quantize.items())
    for name, content in _files(json.dumps(config), seed, dtype, packed).items():
        (path / name).write_bytes(content)
    # What a test draws does not depend on whether another has had this model made.
    mx.random.seed(seed)
    return path


@lru_cache(maxsize=64)
def _files(
    described: str, seed: int, dtype: mx.Dtype, packed: tuple[tuple[str, Any], ...] | None
) -> dict[str, bytes]:
    """The contents of a model's files: many tests have the same ones."""
    config = json.loads(described)
    model = random_model(config, seed=seed, dtype=dtype)
    if packed is not None:
        model, config = quantize_model(model, config, **dict(packed))
    weights = dict(tree_flatten(model.parameters()))
    with TemporaryDirectory() as folder:
        path = Path(folder)
        mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
        (path / "config.json").write_text(json.dumps(config, indent=1))
        write_byte_tokenizer(path)
        return {file.name: file.read_bytes() for file in path.iterdir()}


def add_mtp_head(
    path: Path, *, seed: int = 5, beside: Path | None = None, quantize: dict[str, Any] | None = None
) -> dict[str, mx.array]:
    """Add a random head for multi-token prediction to the model in the folder `path`, in the form
    of its family, and return its tensors by their names.

    beside: a folder of its own for the head, in mlx-vlm's form. quantize: as `make_tiny_model`.
    """
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    facts, last = mtp_facts(config["model_type"]), text["num_hidden_layers"]
    assert facts is not None
    of = {**text, **facts.config, "model_type": config["model_type"]}
    dtype = next(iter(mx.load(str(path / "model.safetensors")).values())).dtype
    model = random_model(of, seed=seed, dtype=dtype)
    width, keys = text["hidden_size"], mx.random.split(mx.random.key(seed + 1), 4)
    vectors = [1 + 0.1 * mx.random.normal((width,), key=key) for key in keys[:3]]
    joined = mx.random.normal((width, 2 * width), key=keys[3]) * (2 * width) ** -0.5
    body = model.language_model.model if "language_model" in model else model.model
    head = {
        "enorm.weight": vectors[0].astype(dtype),
        "hnorm.weight": vectors[1].astype(dtype),
        "norm.weight": vectors[2].astype(dtype),
        "eh_proj.weight": joined.astype(dtype),
    }
    layer = body.layers[0]
    if quantize is not None:
        size = quantize["group_size"]

        def fits(_: str, module: nn.Module) -> bool:
            return hasattr(module, "to_quantized") and module.weight.shape[-1] % size == 0

        nn.quantize(layer, class_predicate=fits, **quantize)
        packed, scales, *biases = mx.quantize(head.pop("eh_proj.weight"), **quantize)
        head |= {"eh_proj.weight": packed, "eh_proj.scales": scales}
        head |= {"eh_proj.biases": biases[0]} if biases else {}
    head |= {f"layer.{name}": array for name, array in tree_flatten(layer.parameters())}
    named = _stored_head(head, last if facts.layer else None, alone=beside is not None)
    if beside is None:
        replace_weights(path, {**mx.load(str(path / "model.safetensors")), **named})
    else:
        beside.mkdir(parents=True)
        file = beside / "model.safetensors"
        mx.save_safetensors(str(file), named, metadata={"format": "mlx"})
        own = {"model_type": f"{config['model_type']}_mtp", "text_config": text}
        own |= {} if quantize is None else {"quantization": quantize}
        (beside / "config.json").write_text(json.dumps(own))
    return named


def replace_weights(path: Path, tensors: dict[str, mx.array], written_by: str = "mlx") -> None:
    """Write other weights for the model in the folder `path`; who has read the old ones keeps
    them."""
    mx.save_safetensors(str(path / "new.safetensors"), tensors, metadata={"format": written_by})
    (path / "new.safetensors").replace(path / "model.safetensors")


def _stored_head(
    head: dict[str, mx.array], layer: int | None, *, alone: bool
) -> dict[str, mx.array]:
    """Give a head's tensors the names that it is stored with: as the layer of that number behind
    the model's, or as Qwen's; `alone` in mlx-vlm's form."""
    named = {}
    for name, array in head.items():
        module, _, part = name.rpartition(".")
        if layer is not None:
            outer, inner = ("model.", "mtp_block.") if alone else (f"model.layers.{layer}.", "")
            last = "shared_head_norm" if alone else "shared_head.norm"
            module = {"norm": last}.get(module, module).replace("layer.", inner, 1)
        else:
            outer = "" if alone else "mtp."
            others = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
            module = {**others, "eh_proj": "fc"}.get(module, module)
            module = module.replace("layer.", "layers.0.", 1)
        named[f"{outer}{module}.{part}"] = array
    return named


def make_tiny_adapter(path: Path, model: Path, *, seed: int = 1) -> Path:
    """Write a random LoRA adapter for `model` to the folder `path`, as mlx-lm's training does."""
    path.mkdir(parents=True, exist_ok=True)
    parameters = {"rank": 4, "scale": 8.0, "dropout": 0.5}
    settings = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    adapted, _ = load_model(model, lazy=True)
    linear_to_lora_layers(adapted, 2, parameters)
    shapes = tree_flatten(adapted.parameters())
    lora = [(name, array) for name, array in shapes if name.endswith(("lora_a", "lora_b"))]
    keys = mx.random.split(mx.random.key(seed), len(lora))
    drawn = {
        name: mx.random.normal(array.shape, key=key) * 0.1
        for (name, array), key in zip(lora, keys, strict=True)
    }
    mx.save_safetensors(str(path / "adapters.safetensors"), drawn)
    return path


def random_model(config: dict[str, Any], *, seed: int, dtype: mx.Dtype) -> nn.Module:
    """The mlx-lm module of a config, every matrix drawn from N(0, 1 / inputs)."""
    model_class, args_class = _get_classes(config)
    # Some modules draw vectors of their own when they are made.
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters()))))

    def draw(name: str, array: mx.array) -> mx.array:
        key = next(keys)
        if array.ndim < 2:
            return array.astype(dtype)
        # Untied rows of unit length would make the likeliest next token the last one.
        scale = array.shape[-1] ** -0.5
        return (mx.random.normal(array.shape, key=key) * scale).astype(dtype)

    model.update(tree_map_with_path(draw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def write_byte_tokenizer(path: Path) -> None:
    """Token i is the byte i for i < 256 (by the byte-level alphabet), then the special tokens."""
    vocabulary = {character: i for i, character in enumerate(_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", BOS_ID)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": "<|finetune_right_pad_id|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


@cache
def _alphabet() -> list[str]:
    """The characters of the byte-level alphabet (GPT-2's), each where the byte is that it stands
    for: itself where that is printable, or else the next one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]

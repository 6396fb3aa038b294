"""Forms of pictures in prompts, against those that transformers' processors write.

`layouts.json` is what transformers 5.24 made of empty pictures of these sizes, by the settings of
published checkpoints: for each picture its width and height, the text with one token for each run
of rows, the rows of each run, and the grid for M-RoPE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_manager.mlx_server.core import Image
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.models.families import vision_facts
from mlx_manager.mlx_server.models.loading.vision import with_defaults
from mlx_manager.mlx_server.vision.towers import tower_of
from mlx_manager.mlx_server.vision.towers.base import Checkpoint, VisionTower

WRITTEN: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("layouts.json").read_text()
)
SMALL = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_heads": 2},
    **{"num_hidden_layers": 1, "depth": 1, "num_key_value_heads": 2, "head_dim": 16},
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
"""Sizes that no layout depends on."""


def tower(kind: str, config: dict[str, Any], processor: dict[str, Any]) -> VisionTower:
    own = {"model_type": kind, "text_config": {"hidden_size": 64}, **config}
    own["vision_config"] = {**SMALL, **config["vision_config"]}
    facts = vision_facts(own)
    assert facts is not None
    return tower_of(facts.tower, Checkpoint(Path(), with_defaults(own), processor, {}))


def picture(width: int, height: int) -> Image:
    return Image(b"", "", width, height, "messages.0.content.1.image_url")


@pytest.mark.parametrize("name", WRITTEN)
def test_pictures_have_the_form_that_transformers_writes(name: str) -> None:
    made = WRITTEN[name]
    seeing = tower(name.removesuffix("_whole"), made["config"], made["processor"])
    for width, height, text, runs, *grid in made["pictures"]:
        layout = seeing.layout(picture(width, height))
        assert (layout.text, list(layout.runs)) == (text, runs), (width, height)
        assert ([list(layout.grid)] if layout.grid else []) == grid


@pytest.mark.parametrize("name", WRITTEN)
def test_without_a_processors_file_the_settings_are_the_familys(name: str) -> None:
    made = WRITTEN[name]
    seeing = tower(name.removesuffix("_whole"), made["config"], {})
    assert sum(seeing.layout(picture(640, 480)).runs) > 0


def test_a_picture_that_is_too_narrow_is_refused_by_its_field() -> None:
    made = WRITTEN["qwen3_vl"]
    seeing = tower("qwen3_vl", made["config"], made["processor"])
    with pytest.raises(InvalidParameter, match="1 x 201 pixels") as refusal:
        seeing.layout(picture(1, 201))
    assert refusal.value.param == "messages.0.content.1.image_url"
    assert seeing.layout(picture(1, 200)).runs

"""Towers: their features, which mlx-vlm and transformers compute as well, and their stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config
from mlx_vlm.utils import load_model
from tiny_vision import PLENTY, SEEING, loaded_from, make_seeing_model, picture, seen

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.engine.prompt_images import Features
from mlx_manager.mlx_server.models.catalog import described
from mlx_manager.mlx_server.models.loading.load import LoadedModel, load
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.vision.towers.base import VisionTower


@pytest.fixture(scope="module", params=sorted(SEEING))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(kind: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded_from(make_seeing_model(tmp_path_factory.mktemp(kind), kind))


def test_rows_are_as_many_as_the_layout_says_and_of_the_models_type(
    kind: str, loaded: LoadedModel
) -> None:
    assert loaded.vision is not None
    tower = loaded.vision.tower
    for width, height in SEEING[kind].sizes:
        image = picture(width, height)
        features, steps = seen(tower, image)
        assert features.rows.shape == (sum(tower.layout(image).runs), 64)
        assert features.rows.dtype == mx.float32
        assert len(features.levels) == loaded.vision.levels
        slices = 2 if mx.default_device() == mx.cpu else 1
        assert steps % (slices * len(tower.layers()) + 1) == 0
        assert steps > len(tower.layers())


def test_stages_of_two_pictures_may_alternate(loaded: LoadedModel) -> None:
    assert loaded.vision is not None
    tower = loaded.vision.tower
    images = [picture(64, 48, seed) for seed in (1, 2)]
    alone = [seen(tower, image)[0].rows for image in images]
    running = [tower.stages(tower.pixels(image)) for image in images]
    found: dict[int, Features] = {}
    while len(found) < len(running):
        for number, stages in enumerate(running):
            try:
                mx.eval(*next(stages))
            except StopIteration as end:
                found.setdefault(number, end.value)
    for number, rows in enumerate(alone):
        assert mx.array_equal(found[number].rows, rows)
    assert not mx.allclose(*alone)


def patches_and_grid(pixels: Any) -> dict[str, mx.array]:
    return {"pixel_values": mx.array(pixels[0]), "image_grid_thw": mx.array(pixels[1])}


def padded_views(pixels: Any) -> dict[str, mx.array]:
    most = max(len(patches) for patches, _ in pixels)
    padded = [np.pad(patches, ((0, most - len(patches)), (0, 0))) for patches, _ in pixels]
    real = [np.arange(most) < len(patches) for patches, _ in pixels]
    return {
        "pixel_values": mx.array(np.stack(padded)),
        "spatial_shapes": mx.array([shape for _, shape in pixels]),
        "pixel_attention_mask": mx.array(np.stack(real).astype(np.int32)),
    }


INPUTS = {
    "smolvlm": lambda pixels: {"pixel_values": mx.array(pixels)[None]},
    "qwen3_vl": patches_and_grid,
    "qwen3_5": patches_and_grid,
    "gemma4": lambda pixels: {
        "pixel_values": mx.array(pixels[0])[None],
        "image_position_ids": mx.array(pixels[1])[None],
    },
    "lfm2_vl": padded_views,
}
"""Kinds whose tiny checkpoints mlx-vlm reads whole, and its models' inputs. The others are tried
against transformers."""


@pytest.mark.parametrize("kind", INPUTS)
def test_features_are_those_of_mlx_vlms_whole_model(kind: str, tmp_path: Path) -> None:
    folder = make_seeing_model(tmp_path, kind)
    loaded = loaded_from(folder)
    assert loaded.vision is not None
    tower, image = loaded.vision.tower, picture(100, 60)
    features, _ = seen(tower, image)
    ids = mx.array([[1, *[loaded.vision.row] * len(features.rows), 2]])
    inputs = INPUTS[kind](tower.pixels(image))
    whole = load_model(folder).get_input_embeddings(ids, **inputs)
    expected = whole.inputs_embeds[0, 1:-1]
    # mlx-vlm has another epsilon in SigLIP's last norm.
    assert mx.allclose(features.rows * tower.scale, expected, atol=3e-5)
    for level, other in zip(features.levels, whole.deepstack_visual_embeds or (), strict=True):
        assert mx.allclose(level, other, atol=1e-5)


@pytest.mark.parametrize("kind", ["mistral3", "llava"])
def test_one_picture_needs_no_mask_of_pixtrals(kind: str, tmp_path: Path) -> None:
    loaded = loaded_from(make_seeing_model(tmp_path, kind))
    assert loaded.vision is not None
    tower = loaded.vision.tower
    pixels = tower.pixels(picture(100, 60))
    features = tower.features(pixels)
    encoded = tower.module.vision_tower(
        mx.array(pixels).transpose(0, 2, 3, 1), output_hidden_states=True
    )[-1][-1]
    sizes = {"image_sizes": [pixels.shape[2:]]} if kind == "mistral3" else {}
    expected = tower.module.multi_modal_projector(encoded, *sizes.values())
    assert mx.allclose(features.rows, expected.reshape(features.rows.shape), atol=1e-5)


@pytest.mark.parametrize("kind", ["smolvlm", "internvl", "internvl_chat"])
def test_tiles_are_the_same_alone_and_together(kind: str, tmp_path: Path) -> None:
    """A GPU takes several in a slice of work, and a CPU one."""
    tower = tower_in(make_seeing_model(tmp_path, kind))
    pixels = tower.pixels(picture(100, 60))
    assert len(pixels) > 2
    apart = [tower.features(pixels[n : n + 1]).rows for n in range(len(pixels))]
    assert mx.allclose(tower.features(pixels).rows, mx.concatenate(apart), atol=1e-5)


def test_bfloat16_stays_bfloat16(kind: str, tmp_path: Path) -> None:
    loaded = loaded_from(make_seeing_model(tmp_path, kind, dtype=mx.bfloat16))
    assert loaded.vision is not None
    tower = loaded.vision.tower
    kept = {array.dtype for _, array in tree_flatten(tower.module.parameters())}
    # MLX can't multiply experts in bfloat16 on a CPU; towers follow their models.
    wanted = mx.bfloat16 if loaded.weights.name == "stored" else mx.float32
    assert wanted == mx.bfloat16 or kind.endswith("_moe")
    assert kept == {wanted}
    assert seen(tower, picture(40, 40))[0].rows.dtype == wanted


def test_the_ledger_has_the_towers_weights(tmp_path: Path) -> None:
    folder, ledger = make_seeing_model(tmp_path, "qwen3_vl"), Ledger(PLENTY)
    loaded = load(described("m", folder, "models_dir"), PoolLimits(weights="keep"), ledger)
    assert loaded.vision is not None
    towers = sum(a.nbytes for _, a in tree_flatten(loaded.vision.tower.module.parameters()))
    models = sum(a.nbytes for _, a in tree_flatten(loaded.model.parameters()))
    assert ledger.figures()["weights:m"] == loaded.nbytes == towers + models


def test_a_quantised_tower_is_loaded(tmp_path: Path) -> None:
    folder = make_seeing_model(tmp_path / "m", "qwen3_vl")
    expected = seen(tower_in(folder), picture(64, 64))[0].rows
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    for name in [name for name in weights if ".mlp.linear_fc1.weight" in name and "visual" in name]:
        packed, scales, biases = mx.quantize(weights[name], group_size=32, bits=8)
        module = name.removesuffix("weight")
        weights |= {name: packed, f"{module}scales": scales, f"{module}biases": biases}
    mx.save_safetensors(str(file), weights)
    config = load_config(folder) | {"quantization": {"group_size": 32, "bits": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    tower = tower_in(folder)
    found = seen(tower, picture(64, 64))[0].rows
    assert mx.allclose(found, expected, atol=0.1)
    assert not mx.array_equal(found, expected)


def tower_in(folder: Path) -> VisionTower:
    vision = loaded_from(folder).vision
    assert vision is not None
    return vision.tower


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("kind", INPUTS)
def test_checkpoints_that_mlx_vlm_has_written_are_read_as_well(
    kind: str, bits: int, tmp_path: Path
) -> None:
    folder = make_seeing_model(tmp_path, kind)
    before = loaded_from(folder)
    assert before.vision is not None
    expected, image = seen(before.vision.tower, picture(64, 48))[0].rows, picture(64, 48)
    prompt = mx.array([[1, 2, 3]])
    logits = before.model(prompt)
    whole = load_model(folder)
    config = load_config(folder)
    if bits:
        finer = {
            name: {"group_size": 32, "bits": 6}
            for name, module in whole.named_modules()
            if "fc1" in name and is_divisible(module)
        }
        nn.quantize(
            whole, 32, bits, class_predicate=lambda name, m: finer.get(name, is_divisible(m))
        )
        config["quantization"] = {"group_size": 32, "bits": bits, **finer}
    weights = dict(tree_flatten(whole.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    after = loaded_from(folder)
    assert after.vision is not None
    tolerance = 0.4 if bits else 1e-5
    assert mx.allclose(seen(after.vision.tower, image)[0].rows, expected, atol=tolerance)
    assert mx.allclose(after.model(prompt), logits, atol=3 * tolerance)


def is_divisible(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

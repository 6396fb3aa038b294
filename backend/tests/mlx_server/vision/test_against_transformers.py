"""Prompts, features and logits against transformers' own models, where torch is installed.

The tiny folders are read by both. transformers resizes pictures by other code where torch is
installed, so its models get the pixels of the processors that need none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_vision import SEEING, loaded_from, make_seeing_model, picture, seen

torch = pytest.importorskip("torch", reason="torch is not installed")


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, ignore_mismatched_sizes=True
    ).eval()


def inputs_of(kind: str, pixels: Any) -> dict[str, Any]:
    """transformers' inputs for the pixels of one picture."""
    if kind.startswith("qwen"):
        patches, grid = map(torch.tensor, pixels)
        return {"pixel_values": patches, "image_grid_thw": grid}
    if kind == "gemma4":
        patches, places = (torch.tensor(array)[None] for array in pixels)
        return {"pixel_values": patches, "image_position_ids": places}
    if kind == "lfm2_vl":
        most = max(len(patches) for patches, _ in pixels)
        padded = [np.pad(patches, ((0, most - len(patches)), (0, 0))) for patches, _ in pixels]
        real = [np.arange(most) < len(patches) for patches, _ in pixels]
        return {
            "pixel_values": torch.tensor(np.stack(padded)),
            "spatial_shapes": torch.tensor([shape for _, shape in pixels]),
            "pixel_attention_mask": torch.tensor(np.stack(real).astype(np.int64)),
        }
    tiles = torch.tensor(pixels)
    if kind == "idefics3":
        return {"pixel_values": tiles[None]}
    if kind in ("mistral3", "llava"):
        return {"pixel_values": tiles, "image_sizes": torch.tensor([tiles.shape[2:]])}
    return {"pixel_values": tiles}


@pytest.mark.parametrize("kind", sorted(SEEING.keys() - {"smolvlm", "internvl_chat"}))
def test_features_are_transformers(kind: str, tmp_path: Path) -> None:
    folder = make_seeing_model(tmp_path, kind)
    loaded = loaded_from(folder)
    assert loaded.vision is not None
    tower, image = loaded.vision.tower, picture(100, 60)
    features, _ = seen(tower, image)
    with torch.no_grad():
        found = model_of(folder).model.get_image_features(**inputs_of(kind, tower.pixels(image)))
    rows = found.pooler_output
    if isinstance(rows, list | tuple):
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in rows])
    expected = rows.reshape(features.rows.shape).numpy()
    assert np.allclose(np.array(features.rows * tower.scale), expected, atol=5e-5)
    levels = getattr(found, "deepstack_features", None) or ()
    for level, others in zip(features.levels, levels, strict=True):
        expected = (torch.cat(others) if isinstance(others, tuple) else others).numpy()
        assert np.allclose(np.array(level), expected, atol=5e-5)

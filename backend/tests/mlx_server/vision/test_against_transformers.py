"""Features and answers against transformers' own models, where torch is installed.

The tiny folders are read by both. transformers resizes pictures by other code where torch is
installed, so its models get the pixels of the processors that need none.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from live import live_server
from tiny_vision import SEEING, loaded_from, make_seeing_model, picture, seen

torch = pytest.importorskip("torch", reason="torch is not installed")

KINDS = sorted(SEEING.keys() - {"smolvlm", "internvl_chat", "qwen3_vl_moe", "qwen3_5_moe"})
"""Idefics 3 stands for SmolVLM. transformers reads neither InternVL's own checkpoints nor those of
mlx-vlm, as which the ones with experts are written."""


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


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    models = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        make_seeing_model(models / kind, kind)
    log = tmp_path_factory.mktemp("log") / "errors"
    command = (sys.executable, "-m", "mlx_manager.mlx_server.main")
    with live_server(log, command, models_dir=models, open_access=True, weights="keep") as live:
        yield live.url, models


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_token_is_as_likely_as_transformers_says(
    kind: str, server: tuple[str, Path]
) -> None:
    url, models = server
    image = picture(100, 60)
    encoded = base64.b64encode(image.data).decode()
    content = [
        {"type": "text", "text": "word1 "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": " what?"},
    ]
    body = {
        "model": kind,
        "messages": [{"role": "user", "content": content}],
        **{"max_tokens": 1, "logprobs": True, "top_logprobs": 5},
        **{"ignore_eos": True, "return_token_ids": True},
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    tower = loaded_from(models / kind).vision
    assert tower is not None
    ids = torch.tensor([answer["prompt_token_ids"]])
    types = (ids == tower.row).long()
    more = {}
    if kind.startswith("qwen") or kind == "gemma4":
        more = {"mm_token_type_ids": types}
    elif kind == "gemma3":
        more = {"token_type_ids": types}
    inputs = inputs_of(kind, tower.tower.pixels(image))
    with torch.no_grad():
        logits = model_of(models / kind)(input_ids=ids, **inputs, **more).logits[0, -1]
    expected = torch.log_softmax(logits.float(), -1).topk(5).values.tolist()
    [first] = answer["choices"][0]["logprobs"]["content"]
    found = [token["logprob"] for token in first["top_logprobs"]]
    assert found == pytest.approx(expected, abs=1e-4)

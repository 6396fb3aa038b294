"""Towers against mlx-vlm's whole models: the same features for the same pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_vision import SEEING, make_seeing_model, picture

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.engine.images import Features
from mlx_manager.mlx_server.models.catalog import described
from mlx_manager.mlx_server.models.loading.load import LoadedModel, load
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.vision.towers.base import VisionTower

PLENTY = 1 << 32


@pytest.fixture(scope="module", params=sorted(SEEING))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_seeing_model(tmp_path_factory.mktemp(request.param), request.param)
    return loaded_from(folder)


def loaded_from(folder: Path, **limits: Any) -> LoadedModel:
    return load(
        described("m", folder, "models_dir"),
        PoolLimits(**{"weights": "keep", **limits}),
        Ledger(PLENTY),
    )


def seen(tower: VisionTower, image: core.Image) -> tuple[Features, int]:
    """A picture's features, and in how many stages they were computed."""
    stages, steps = tower.stages(tower.pixels(image)), 0
    while True:
        try:
            mx.eval(*next(stages))
        except StopIteration as end:
            return end.value, steps
        steps += 1


def test_rows_are_as_many_as_the_layout_says_and_of_the_models_type(loaded: LoadedModel) -> None:
    assert loaded.vision is not None
    tower = loaded.vision.tower
    for width, height in ((100, 60), (30, 31), (20, 90)):
        image = picture(width, height)
        features, steps = seen(tower, image)
        assert features.rows.shape == (sum(tower.layout(image).runs), 64)
        assert features.rows.dtype == mx.float32
        assert len(features.levels) == loaded.vision.levels
        assert steps > 2

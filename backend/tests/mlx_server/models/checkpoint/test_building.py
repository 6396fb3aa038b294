from __future__ import annotations

import mlx.core as mx
from mlx_lm.utils import load_model
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.models.checkpoint.building import build, planned
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder


def test_a_model_is_as_mlx_lm_makes_it(tmp_path):
    folder = make_tiny_model(tmp_path / "gemma3", "gemma3_text")
    model, _ = build(planned(ModelFolder.read(folder)))
    plain, _ = load_model(folder, lazy=True)
    assert type(model) is type(plain)
    assert "sanitize" not in vars(model)
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(model(tokens), plain(tokens))

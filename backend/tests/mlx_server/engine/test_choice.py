"""How the choice of a forward goes on beside other models' steps. What it chooses is in
test_forward.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from tiny_models import FAMILIES, random_model

from mlx_manager.mlx_server.engine.choice import choose, choosing
from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.models.streams import on_stream, side_stream
from mlx_manager.mlx_server.utils.steps import Aside, Done, advance


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "fused"), ("olmo2", "ragged"), ("deepseek_v3", "separate")]
)
def test_every_pass_of_a_comparison_is_computed_aside(family: str, kind: str) -> None:
    model = random_model({"model_type": family, **FAMILIES[family]}, seed=0, dtype=mx.float32)
    step = mx.ones((64, 64)) @ mx.ones((64, 64))
    steps = on_stream(side_stream(), choosing(model, 16))
    passes = 0
    with ThreadPoolExecutor(1) as other:
        while not isinstance(piece := advance(steps), Done):
            if isinstance(piece, Aside):
                passes += 1
                waiting = other.submit(piece.run)
                # Another model's step, meanwhile.
                step = step @ mx.ones((64, 64)) / 64
                mx.eval(step)
                waiting.result()
    assert piece.value.kind == kind
    # Of the two sequences by the model itself, and then by the forward.
    assert passes >= 4 + 4 + 5
    assert mx.all(step == 64)


def test_a_model_whose_logits_are_no_numbers_is_refused() -> None:
    of = {"model_type": "llama", **FAMILIES["llama"]}
    model = random_model(of, seed=0, dtype=mx.float32)
    model.model.norm.weight = model.model.norm.weight * float("nan")
    with pytest.raises(ModelNotSupported, match="no number"):
        choose(model, 16)

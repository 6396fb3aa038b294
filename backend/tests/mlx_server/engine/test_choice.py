"""How the choice of a forward goes on beside other models' steps. What it chooses is in
test_forward.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from tiny_models import FAMILIES, random_model

from mlx_manager.mlx_server.engine.choice import choosing
from mlx_manager.mlx_server.engine.forward import Forward
from mlx_manager.mlx_server.models.streams import on_stream, side_stream
from mlx_manager.mlx_server.utils.steps import Aside, Done, advance


def chosen_beside(family: str, layers: int) -> tuple[Forward, int]:
    """The forward of a model, and how often another thread waited for a piece of a pass."""
    config = {"model_type": family, **FAMILIES[family], "num_hidden_layers": layers}
    model = random_model(config, seed=0, dtype=mx.float32)
    steps = on_stream(side_stream(), choosing(model, 16))
    waits = 0
    with ThreadPoolExecutor(1) as other:
        while True:
            match advance(steps):
                case Done(forward):
                    return forward, waits
                case Aside() as aside:
                    waits += 1
                    other.submit(aside.run).result()
                case None:
                    pass


@pytest.mark.parametrize(("family", "kind"), [("llama", "ragged"), ("gemma2", "separate")])
def test_each_layer_of_a_pass_is_waited_for_by_itself(family: str, kind: str) -> None:
    shallow, few = chosen_beside(family, 2)
    deep, many = chosen_beside(family, 8)
    assert shallow.kind == deep.kind == kind
    passes = (many - few) / 6
    assert passes == int(passes) >= 2
    assert few >= 2 * passes

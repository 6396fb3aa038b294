from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_model
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.devices.cpu.blocked import BlockedExperts, BlockedLinear
from mlx_manager.mlx_server.models.loading.layout import (
    are_better,
    blockable_layers,
    by_columns,
    experts_alike,
    gains,
    lay_out,
    layers_alike,
    times_of,
    times_of_experts,
)
from mlx_manager.mlx_server.models.loading.weights import default_device, evaluate

TOKENS = mx.array([[256, 72, 101, 108, 108, 111]])

pytestmark = pytest.mark.skipif(default_device() != "cpu", reason="the layout is a CPU's")


def nbytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def test_weights_laid_out_by_columns_compute_the_same_in_the_same_bytes(tmp_path: Path):
    make_tiny_model(tmp_path / "m", "llama", dtype=mx.float32)
    model = load_model(tmp_path / "m", lazy=True)[0]
    rows, stored = model(TOKENS), nbytes(model)
    for _, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.weight = by_columns(module).weight
    evaluate(model)
    before = mx.get_active_memory()
    assert mx.allclose(model(TOKENS), rows, atol=1e-5)
    assert nbytes(model) == stored
    assert mx.get_active_memory() - before < 1e5, "products copy the weights"


def test_a_model_that_is_laid_out_computes_the_same_in_the_same_bytes(tmp_path: Path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024}
    make_tiny_model(tmp_path / "m", "llama", dtype=mx.float32, **sizes)
    model = load_model(tmp_path / "m", lazy=True)[0]
    rows, stored = model(TOKENS), nbytes(model)
    lay_out(model)
    evaluate(model)
    assert mx.allclose(model(TOKENS), rows, atol=1e-4)
    assert nbytes(model) == stored


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (2**30, "from the caches, which hold 1,024 MiB"),
        (2**20, "from memory; the caches hold 1 MiB"),
    ],
)
def test_the_layout_says_how_weights_lie_and_whence_they_were_timed(
    tmp_path: Path, cache: int, said: str
):
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    make_tiny_model(tmp_path / "m", "llama", dtype=mx.float32, **sizes)
    model = load_model(tmp_path / "m", lazy=True)[0]
    layout = lay_out(model, cache)
    modules = [module for _, module in model.named_modules()]
    assert layout.blocks == sum(isinstance(module, BlockedLinear) for module in modules)
    assert layout.blocks + layout.columns + layout.rows == sum(
        isinstance(module, nn.Linear) for module in modules
    )
    assert str(layout).startswith(f"of {7 * len(model.layers) + 1} products in float32 ")
    assert str(layout).endswith(f"as stored (timed {said})")


EXPERTS = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8}


def test_a_model_whose_experts_are_in_blocks_computes_the_same_in_the_same_bytes(tmp_path: Path):
    make_tiny_model(tmp_path / "m", "qwen3_moe", dtype=mx.float32, **EXPERTS)
    model = load_model(tmp_path / "m", lazy=True)[0]
    many = mx.arange(300)[None] % 250
    rows, prompt, stored = model(TOKENS), model(many), nbytes(model)
    (up, down) = experts_alike(model)
    layers = up | down
    assert len(layers) == 3 * len(model.layers)
    blocked = [(name, BlockedExperts(layer)) for name, layer in layers.items()]
    model.update_modules(tree_unflatten(blocked))
    evaluate(model)
    assert mx.allclose(model(TOKENS), rows, atol=1e-4)
    assert mx.allclose(model(many), prompt, atol=1e-4)
    assert nbytes(model) == stored
    assert experts_alike(model) == []


def test_experts_are_timed_in_both_layouts(tmp_path: Path):
    make_tiny_model(tmp_path / "m", "qwen3_moe", dtype=mx.float32, **EXPERTS)
    model = load_model(tmp_path / "m", lazy=True)[0]
    rows = model(TOKENS)
    first = next(iter(experts_alike(model)[0].values()))
    for laid in (lambda experts: experts, BlockedExperts):
        times = times_of_experts(first, laid)
        assert len(times) == 3
        assert all(seconds > 0 for seconds in times)
    lay_out(model)
    assert mx.allclose(model(TOKENS), rows, atol=1e-4)


def test_layout_is_tried_for_large_float32_layers_of_each_shape():
    model = nn.Module()
    model.layers = [nn.Linear(512, 1024), nn.Linear(512, 1024), nn.Linear(1024, 512)]
    model.small, model.narrow = nn.Linear(8, 8), nn.Linear(512, 1024)
    model.narrow.set_dtype(mx.bfloat16)
    model.embedding, model.packed = nn.Embedding(1024, 512), nn.QuantizedLinear(512, 1024)
    groups = {group[0].weight.shape: len(group) for group in layers_alike(model)}
    assert groups == {(1024, 512): 2, (512, 1024): 1}
    assert all(seconds > 0 for seconds in times_of(model.layers[:2], BlockedLinear))


def test_siblings_are_in_blocks_together_or_not_at_all():
    model = nn.Module()
    model.even, model.odd = nn.Module(), nn.Module()
    model.even.q, model.even.k = nn.Linear(512, 512), nn.Linear(512, 64)
    model.odd.q, model.odd.k = nn.Linear(512, 512), nn.Linear(512, 80)
    model.odd.out = nn.Linear(256, 512)
    assert blockable_layers(model).keys() == {"even.q", "even.k", "odd.out"}


def test_a_layout_is_changed_for_a_tenth_of_the_time():
    assert gains([0.8, 0.9, 9.0], [1.0, 1.0, 1.0])
    assert not gains([0.95, 0.95, 0.1], [1.0, 1.0, 1.0])


def test_blocks_are_not_taken_where_prompts_would_pay_for_them():
    small, large = [0.1, 0.1, 1.0], [1.0, 1.0, 10.0]
    assert are_better([[0.2, 0.5, 10.0], small], [large, small])
    assert not are_better([[0.2, 0.5, 13.0], small], [large, small])
    assert not are_better([], [])

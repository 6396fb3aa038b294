"""The common decoder by joined products on a CPU, against mlx-lm's modules."""

from __future__ import annotations

import logging

import mlx.core as mx
import numpy as np
import pytest
from execution.decoder.common_decoders import MODELS, SHORTS, make
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.decoder.joined import JoinedForward, join
from mlx_manager.mlx_server.execution.decoder.projections import Dense, OfItsOwn
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, NotApplicable
from mlx_manager.mlx_server.execution.reference import Reference
from mlx_manager.mlx_server.execution.select import choose

PAGE = 16


def disagreement(model: nn.Module) -> str | None:
    reference = Reference.of(model, PAGE)
    return reference.disagreement(join(model, PAGE))


@pytest.mark.parametrize("kind", MODELS)
def test_joined_steps_give_the_modules_logits(kind: str) -> None:
    assert disagreement(make(*MODELS[kind])) is None


def test_quantised_projections_are_joined_too() -> None:
    model = make("llama", {"attention_bias": True})
    nn.quantize(model, group_size=32, bits=4)
    assert disagreement(model) is None


def test_the_module_keeps_working_and_nothing_exists_twice() -> None:
    model = make("llama", {"hidden_size": 512, "intermediate_size": 1024})
    tokens = mx.array([[5, 6, 7]])
    before = model(tokens)
    mx.eval(before)
    mx.clear_cache()
    used = mx.get_active_memory()
    forward = join(model, PAGE)
    mx.clear_cache()
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert mx.get_active_memory() - used < 0.02 * weights
    np.testing.assert_allclose(np.array(before), np.array(model(tokens)), rtol=1e-5, atol=1e-5)
    assert isinstance(forward, JoinedForward)


def test_steps_of_rows_and_a_chunk_that_are_put_together_ahead_write_their_pages_in_place() -> None:
    forward = join(make("llama", {}), PAGE)
    for store in forward.stores:
        store.resize(60)
    pages = [array for store in forward.stores for array in (store.keys, store.values)]
    begin = [address(array) for array in pages]
    del pages
    tables = [PageTable(range(row, 20, 2)) for row in range(2)]
    prompt = PageTable(range(20, 60))
    tokens = mx.array([3, 4], mx.uint32)
    for step in range(8):
        chunk = Chunk(2, Span(prompt, 20 * (step + 1), 20), [5] * 20, False)
        logits = forward.run(Decode([0, 1], tables, [80 + step] * 2, tokens), [chunk])
        mx.eval(tokens)
        tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
        del logits
        mx.async_eval(tokens, forward.state())
    mx.eval(tokens)
    assert [address(a) for store in forward.stores for a in (store.keys, store.values)] == begin


@pytest.mark.parametrize("kind", ["llama", "qwen3", "windows"])
def test_a_prompt_in_two_halves_gives_the_same_logits(kind: str) -> None:
    family, changes = MODELS[kind]
    wide = make(family, {**changes, "hidden_size": 512})
    forwards = [join(wide, PAGE) for _ in range(2)]
    forwards[1].serve()
    logits = []
    for forward in forwards:
        for store in forward.stores:
            store.resize(60)
        rows = [PageTable([row]) for row in range(2)]
        prompts = [PageTable(range(2, 21)), PageTable(range(21, 40))]
        chunks = [
            Chunk(3 + i, Span(table, n, n), [5 + j % 50 for j in range(n)], True)
            for i, (table, n) in enumerate(zip(prompts, (300, 295), strict=True))
        ]
        decode = Decode([0, 1], rows, [1, 1], mx.array([3, 4], mx.uint32))
        for steps in (forward.run(None, chunks), forward.run(decode, chunks[:1])):
            mx.eval(steps, forward.state())
            logits.append(np.array(steps))
    np.testing.assert_allclose(logits[0], logits[2], atol=1e-4)
    np.testing.assert_allclose(logits[1], logits[3], atol=1e-4)


def address(array: mx.array) -> int:
    return int(np.array(array, copy=False).ctypes.data)


def test_weights_that_lie_by_columns_are_joined_by_columns() -> None:
    model = make("llama", {})
    for projection in (p for _, p in model.named_modules() if isinstance(p, nn.Linear)):
        projection.weight = mx.contiguous(projection.weight.T).T
    mx.eval(model.parameters())
    for layer in join(model, PAGE)._layers:
        for product in (layer.block.qkv, layer.block.output.product, layer.block.mlp.gate_up):
            assert isinstance(product, Dense)
            outputs, _ = product.weight.shape
            assert np.array(product.weight, copy=False).strides == (4, 4 * outputs)
    assert disagreement(make("llama", {})) is None


class Reversed(nn.Linear):
    """Keeps its weight in a way of its own: the inputs from the last to the first."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.reversed = linear.weight[:, ::-1]
        if "bias" in linear:
            self.bias = linear.bias

    @property
    def weight(self) -> mx.array:
        return self.reversed[:, ::-1]

    def __call__(self, x: mx.array) -> mx.array:
        out = x[..., ::-1] @ self.reversed.T
        return out + self.bias if "bias" in self else out


@pytest.mark.parametrize("kind", ["llama", "biases", "qwen3"])
def test_layers_that_multiply_by_themselves_are_joined_too(kind: str) -> None:
    model = make(*MODELS[kind])
    model.update_modules(
        tree_unflatten(
            [(name, Reversed(m)) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        )
    )
    assert disagreement(model) is None
    layer = join(model, PAGE)._layers[0]
    assert isinstance(layer.block.qkv, OfItsOwn)


@pytest.mark.parametrize(
    ("family", "dtype", "reason"),
    [
        ("olmo2", mx.float32, "no common decoder: a block of other parts"),
        ("llama", mx.bfloat16, "half precision"),
    ],
)
def test_what_is_not_joined_is_declined_with_the_reason(
    family: str, dtype: mx.Dtype, reason: str
) -> None:
    model = make(family, {"head_dim": 16})
    model.set_dtype(dtype)
    with pytest.raises(NotApplicable, match=reason):
        join(model, PAGE)
    assert choose(model, PAGE).kind == "ragged"


@pytest.mark.parametrize("family", SHORTS)
def test_layers_of_short_convolutions_are_left_to_their_module(family: str) -> None:
    with pytest.raises(NotApplicable, match="layers without attention"):
        join(make(family, SHORTS[family]), PAGE)


def test_joined_steps_that_are_wrong_are_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama", {})
    attention = model.model.layers[1].self_attn

    class Louder(type(attention)):  # type: ignore[misc]
        def __call__(self, x: mx.array, mask: object = None, cache: object = None) -> mx.array:
            return super().__call__(x, mask, cache) * 1.5

    attention.__class__ = Louder
    with caplog.at_level(logging.WARNING):
        assert choose(model, PAGE).kind == "ragged"
    assert "not fused: its logits differ" in caplog.text

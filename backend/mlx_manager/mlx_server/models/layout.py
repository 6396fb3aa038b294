"""How the float32 weights of a CPU's products lie in memory: by rows, as stored, by columns, or in
blocks. Products with a layer of each shape are timed, and the fastest is taken.

By rows or by columns a BLAS packs the weight for every product, and with few rows the packing
takes the time. It crawls where the stride is a large power of two, which for one layout is the
number of inputs and for the other that of outputs. Blocks it need not pack, if it has kernels for
that (see `blocked`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from mlx_manager.mlx_server.models.blocked import BlockedLinear, can_be_blocked
from mlx_manager.mlx_server.models.timing import ROWS, seconds
from mlx_manager.mlx_server.utils.steps import Steps

SMALLEST = 2**16
"""Numbers of a weight whose layout is tried."""
COLD = 2**22
"""Bytes of weights that are multiplied in turn, more than a core's caches keep: in a step no layer
finds its weight there."""
GAIN = 0.9
"""Of a product's time, that a change of layout must bring it below."""

Times = list[float]
"""Seconds of products with so many rows as `ROWS` has."""


def lay_out(model: nn.Module) -> Steps[None]:
    """Turn the weights whose products are faster for it, pausing after each product timed.

    Lazily, as `weights.convert`. All that can be in blocks is, or nothing: what is not alike could
    not be joined.
    """
    blockable = blockable_layers(model)
    in_blocks = {id(layer) for layer in blockable.values()}
    turned: list[nn.Linear] = []
    without, with_blocks = [0.0] * len(ROWS), [0.0] * len(ROWS)
    for layers in layers_alike(model):
        best = yield from times_of(layers, lambda layer: layer)
        columns = yield from times_of(layers, by_columns)
        if gains(columns, best):
            best = columns
            turned += layers
        blocked = [layer for layer in layers if id(layer) in in_blocks]
        times = (yield from times_of(blocked, BlockedLinear)) if blocked else best
        for i, (one, other) in enumerate(zip(best, times, strict=True)):
            without[i] += len(layers) * one
            with_blocks[i] += len(blocked) * other + (len(layers) - len(blocked)) * one
        yield None
    if gains(with_blocks, without):
        model.update_modules(
            tree_unflatten([(name, BlockedLinear(layer)) for name, layer in blockable.items()])
        )
        turned = [layer for layer in turned if id(layer) not in in_blocks]
    for layer in turned:
        layer.weight = by_columns(layer).weight


def gains(times: Times, over: Times) -> bool:
    ratio = 1.0
    for one, other in zip(times, over, strict=True):
        ratio *= one / other if other else 1.0
    return ratio < GAIN ** len(ROWS)


def by_columns(layer: nn.Linear) -> nn.Linear:
    """The same layer, its weight lying in memory column by column."""
    turned = copy.copy(layer)
    turned.weight = mx.contiguous(layer.weight.T).T
    return turned


def layers_alike(model: nn.Module) -> list[list[nn.Linear]]:
    """The float32 `nn.Linear` layers, grouped by shape, of a size whose layout matters."""
    groups: dict[tuple[int, ...], list[nn.Linear]] = {}
    for _, module in model.named_modules():
        if type(module) is nn.Linear and module.weight.dtype == mx.float32:
            groups.setdefault(module.weight.shape, []).append(module)
    return [layers for layers in groups.values() if layers[0].weight.size >= SMALLEST]


def blockable_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Those that can be in blocks, by name, with all siblings that have the same inputs: the engine
    joins layers of one kind only."""
    families: dict[tuple[str, int], dict[str, nn.Linear]] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.weight.dtype == mx.float32:
            family = name.rpartition(".")[0], module.weight.shape[1]
            families.setdefault(family, {})[name] = module
    return {
        name: layer
        for family in families.values()
        if all(map(can_be_blocked, family.values()))
        for name, layer in family.items()
    }


def times_of(layers: Sequence[nn.Linear], laid: Callable[[nn.Linear], nn.Linear]) -> Steps[Times]:
    """Of a product with one of `layers`, which are alike, in that layout."""
    sample = [laid(layer) for layer in layers[: -(-COLD // layers[0].weight.nbytes)]]
    times = []
    for rows in ROWS:
        times.append((yield from seconds(sample, rows, mx.float32)) / len(sample))
    return times

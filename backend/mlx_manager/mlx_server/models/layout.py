"""How the float32 weights of a CPU's products lie in memory: by rows, as stored, by columns, or in
blocks. Products with a layer of each shape are timed, and the fastest is taken; of experts as they
are stored, and in blocks.

By rows or by columns a BLAS packs the weight for every product, and with few rows the packing
takes the time. It crawls where the stride is a large power of two, which for one layout is the
number of inputs and for the other that of outputs. Blocks it need not pack, if it has kernels for
that (see `blocked`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from math import prod

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_manager.mlx_server.models.blocked import (
    OUTPUTS,
    BlockedExperts,
    BlockedLinear,
    can_be_blocked,
    experts_can_be_blocked,
)
from mlx_manager.mlx_server.models.timing import CHOSEN, ROWS, part_of, seconds
from mlx_manager.mlx_server.utils.steps import Steps

SMALLEST = 2**16
"""Numbers of a weight whose layout is tried."""
COLD = 2**22
"""Bytes of weights that are multiplied in turn, more than a core's caches keep: in a step no layer
finds its weight there."""
COLD_EXPERTS = 2**26
"""The same of experts, more than cores keep that share their caches: a step goes through so many
that in the next none is found there. Of each no more outputs are taken than that has room for."""
GAIN = 0.9
"""Of a product's time, that a change of layout must bring it below."""

MANY_ROWS = 64
"""Of a prompt. A BLAS may have several threads for them, and for blocks it has one."""
MOST_OUTPUTS = 65 * 64
"""Of a layer that is multiplied by so many, since running streams wait for it."""
FEW_EXPERTS = 4
"""Of a layer, that a prompt's rows are shared out among when it is timed."""
LOSS = 1.1
"""Of a prompt's time, that blocks may bring it to."""

Times = list[float]
"""Seconds of products with so many rows as `ROWS` has, and with `MANY_ROWS`."""


def lay_out(model: nn.Module) -> Steps[None]:
    """Turn the weights whose products are faster for it, pausing after each product timed.

    Lazily, as `weights.convert`. All that can be in blocks is, or nothing: what is not alike could
    not be joined.
    """
    blockable = blockable_layers(model)
    in_blocks = {id(layer) for layer in blockable.values()}
    turned: list[nn.Linear] = []
    without: list[Times] = []
    with_blocks: list[Times] = []
    for layers in layers_alike(model):
        best = yield from times_of(layers, lambda layer: layer)
        columns = yield from times_of(layers, by_columns)
        if gains(columns, best):
            best = columns
            turned += layers
        blocked = [layer for layer in layers if id(layer) in in_blocks]
        times = (yield from times_of(blocked, BlockedLinear)) if blocked else best
        without += [best] * len(layers)
        with_blocks += [times] * len(blocked) + [best] * (len(layers) - len(blocked))
        yield None
    if are_better(with_blocks, without):
        model.update_modules(
            tree_unflatten([(name, BlockedLinear(layer)) for name, layer in blockable.items()])
        )
        turned = [layer for layer in turned if id(layer) not in in_blocks]
    for layer in turned:
        layer.weight = by_columns(layer).weight
    for alike in experts_alike(model):
        first = next(iter(alike.values()))
        stored = yield from times_of_experts(first, lambda experts: experts)
        times = yield from times_of_experts(first, BlockedExperts)
        if are_better([times], [stored]):
            model.update_modules(
                tree_unflatten([(name, BlockedExperts(layer)) for name, layer in alike.items()])
            )
        yield None


def are_better(with_blocks: Sequence[Times], without: Sequence[Times]) -> bool:
    """Whether blocks are, by the times of each layer: for few rows, and no worse for a prompt."""
    ours, others = (list(map(sum, zip(*each, strict=True))) for each in (with_blocks, without))
    return bool(ours) and gains(ours, others) and ours[-1] <= LOSS * others[-1]


def gains(times: Sequence[float], over: Sequence[float]) -> bool:
    """With few rows."""
    few = len(ROWS)
    return prod(times[:few]) < GAIN**few * prod(over[:few])


def by_columns(layer: nn.Linear) -> nn.Linear:
    """The same layer, its weight lying in memory column by column."""
    turned = copy.copy(layer)
    turned.weight = mx.contiguous(layer.weight.T).T
    return turned


def float32_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The `nn.Linear` layers, by name."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.weight.dtype == mx.float32:
            yield name, module


def layers_alike(model: nn.Module) -> list[list[nn.Linear]]:
    """The float32 `nn.Linear` layers, grouped by shape, of a size whose layout matters."""
    groups: dict[tuple[int, ...], list[nn.Linear]] = {}
    for _, layer in float32_layers(model):
        groups.setdefault(layer.weight.shape, []).append(layer)
    return [layers for layers in groups.values() if layers[0].weight.size >= SMALLEST]


def blockable_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Those that can be in blocks, by name, with all siblings that have the same inputs: the engine
    joins layers of one kind only."""
    families: dict[tuple[str, int], dict[str, nn.Linear]] = {}
    for name, layer in float32_layers(model):
        family = name.rpartition(".")[0], layer.weight.shape[1]
        families.setdefault(family, {})[name] = layer
    return {
        name: layer
        for siblings in families.values()
        if all(map(can_be_blocked, siblings.values()))
        for name, layer in siblings.items()
    }


def times_of(layers: Sequence[nn.Linear], laid: Callable[[nn.Linear], nn.Linear]) -> Steps[Times]:
    """Of a product with one of `layers`, which are alike, in that layout."""
    sample = [laid(layer) for layer in layers[: -(-COLD // layers[0].weight.nbytes)]]
    times = []
    for rows in ROWS:
        times.append((yield from seconds(sample, rows, mx.float32)) / len(sample))
    outputs = layers[0].weight.shape[0]
    whole = max(1.0, outputs / MOST_OUTPUTS)
    first = part_of(layers[0], (slice(MOST_OUTPUTS),))
    times.append(whole * (yield from seconds([laid(first)], MANY_ROWS, mx.float32)))
    return times


def experts_alike(model: nn.Module) -> list[dict[str, SwitchLinear]]:
    """The float32 experts that can be in blocks, by name, grouped by shape."""
    groups: dict[tuple[int, ...], dict[str, SwitchLinear]] = {}
    for name, module in model.named_modules():
        if type(module) is SwitchLinear and module.weight.dtype == mx.float32:
            groups.setdefault(module.weight.shape, {})[name] = module
    return [
        alike for alike in groups.values() if experts_can_be_blocked(next(iter(alike.values())))
    ]


def times_of_experts(
    experts: SwitchLinear, laid: Callable[[SwitchLinear], SwitchLinear]
) -> Steps[Times]:
    """Of a product with `experts` in that layout: a row has other ones than the row before, and of
    a prompt's rows each expert has many."""
    count, outputs, inputs = experts.weight.shape
    times = []
    for rows in ROWS:
        together = min(rows * CHOSEN, count)
        fitting = COLD_EXPERTS // (4 * together * inputs)
        most = min(outputs, max(fitting // OUTPUTS, 1) * OUTPUTS)
        parts = min(count // together, -(-fitting // most))
        starts = [number * together for number in range(parts)]
        cuts = [(slice(start, start + together), slice(most)) for start in starts]
        sample = [laid(part_of(experts, cut)) for cut in cuts]
        times.append((yield from seconds(sample, rows, mx.float32)) / parts)
    few = laid(part_of(experts, (slice(FEW_EXPERTS), slice(MOST_OUTPUTS))))
    times.append((yield from seconds([few], MANY_ROWS, mx.float32)))
    return times

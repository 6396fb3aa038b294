"""How the float32 weights of a CPU's products lie in memory: by rows, as stored, by columns, or in
blocks. Products with a layer of each shape are timed, and the fastest is taken; of experts as they
are stored, and in blocks.

By rows or by columns a BLAS packs the weight for every product, and with few rows the packing
takes the time. It crawls where the stride is a large power of two, which for one layout is the
number of inputs and for the other that of outputs. Blocks it need not pack, if it has kernels for
that (see `blocked`).

Products are timed with weights that lie in memory, unless the caches hold a whole model: what a
step has read before it comes to a layer has pushed that layer's weight out of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_manager.mlx_server.devices.cpu.blocked import (
    OUTPUTS,
    BlockedExperts,
    BlockedLinear,
    can_be_blocked,
    experts_can_be_blocked,
)
from mlx_manager.mlx_server.devices.cpu.cache import last_level_cache
from mlx_manager.mlx_server.models.loading.timing import CHOSEN, ROWS, CacheFlush, part_of, seconds
from mlx_manager.mlx_server.utils.progress import Doing, counted, unheard

SMALLEST = 2**16
"""Numbers of a weight whose layout is tried."""
SAMPLE = 2**23
"""Bytes of weights that are multiplied in turn, where layers have so many: that takes long beside
the time in which the thread that computes wakes up."""
EXPERTS_SAMPLE = 2**26
"""The same of experts. Of each no more outputs are taken than that has room for."""
GAIN = 0.9
"""Of a product's time, that a change of layout must bring it below."""

MANY_ROWS = 64
"""Of a prompt. A BLAS may have several threads for them, and for blocks it has one."""
MOST_OUTPUTS = 65 * 64
"""Of a layer that is multiplied by so many: all of a vocabulary's would take long."""
FEW_EXPERTS = 4
"""Of a layer, that a prompt's rows are shared out among when it is timed."""
LOSS = 1.1
"""Of a prompt's time, that blocks may bring it to."""

Times = list[float]
"""Seconds of products with so many rows as `ROWS` has, and with `MANY_ROWS`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Counts of a model's products by the layout of their weights.

    cache: bytes of the CPU's largest. cached: whether it holds all the weights.
    """

    blocks: int
    columns: int
    rows: int
    cache: int
    cached: bool

    def __str__(self) -> str:
        where = "from the caches, which hold" if self.cached else "from memory; the caches hold"
        return (
            f"of {self.blocks + self.columns + self.rows} products in float32 {self.blocks} have "
            f"their weights in blocks, {self.columns} by columns and {self.rows} as stored "
            f"(timed {where} {self.cache / 2**20:,.0f} MiB)"
        )


def lay_out(model: nn.Module, cache: int | None = None, doing: Doing = unheard) -> Layout:
    """Turn the weights whose products are faster for it.

    Lazily, as `weights.convert`. All that can be in blocks is, or nothing: what is not alike could
    not be joined. cache: bytes of the CPU's largest, this machine's unless told.
    """
    cache = cache or last_level_cache()
    nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    flush = CacheFlush(cache).before(nbytes)
    columns = _lay_out_layers(model, flush, doing)
    _lay_out_experts(model, flush)
    modules = [module for _, module in model.named_modules()]
    blocks = sum(isinstance(module, BlockedLinear | BlockedExperts) for module in modules)
    rows = sum(
        type(module) in (nn.Linear, SwitchLinear) and module.weight.dtype == mx.float32
        for module in modules
    )
    return Layout(blocks, columns, rows - columns, cache, flush is None)


def _lay_out_layers(model: nn.Module, flush: CacheFlush | None, doing: Doing) -> int:
    """Returns how many lie by columns."""
    blockable = blockable_layers(model)
    in_blocks = {id(layer) for layer in blockable.values()}
    turned: list[nn.Linear] = []
    without: list[Times] = []
    with_blocks: list[Times] = []
    for layers in counted(doing, "layouts of its weights are timed", layers_alike(model)):
        best = times_of(layers, lambda layer: layer, flush)
        columns = times_of(layers, by_columns, flush)
        if gains(columns, best):
            best = columns
            turned += layers
        blocked = [layer for layer in layers if id(layer) in in_blocks]
        times = times_of(blocked, BlockedLinear, flush) if blocked else best
        without += [best] * len(layers)
        with_blocks += [times] * len(blocked) + [best] * (len(layers) - len(blocked))
    if are_better(with_blocks, without):
        model.update_modules(
            tree_unflatten([(name, BlockedLinear(layer)) for name, layer in blockable.items()])
        )
        turned = [layer for layer in turned if id(layer) not in in_blocks]
    for layer in turned:
        layer.weight = by_columns(layer).weight
    return len(turned)


def _lay_out_experts(model: nn.Module, flush: CacheFlush | None) -> None:
    for alike in experts_alike(model):
        first = next(iter(alike.values()))
        stored = times_of_experts(first, lambda experts: experts, flush)
        times = times_of_experts(first, BlockedExperts, flush)
        if are_better([times], [stored]):
            model.update_modules(
                tree_unflatten([(name, BlockedExperts(layer)) for name, layer in alike.items()])
            )


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


def times_of(
    layers: Sequence[nn.Linear],
    laid: Callable[[nn.Linear], nn.Linear],
    flush: CacheFlush | None = None,
) -> Times:
    """Of a product with one of `layers`, which are alike, in that layout."""
    sample = [laid(layer) for layer in layers[: -(-SAMPLE // layers[0].weight.nbytes)]]
    times = []
    for rows in ROWS:
        times.append(seconds(sample, rows, mx.float32, flush) / len(sample))
    outputs = layers[0].weight.shape[0]
    whole = max(1.0, outputs / MOST_OUTPUTS)
    first = part_of(layers[0], (slice(MOST_OUTPUTS),))
    times.append(whole * seconds([laid(first)], MANY_ROWS, mx.float32, flush))
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
    experts: SwitchLinear,
    laid: Callable[[SwitchLinear], SwitchLinear],
    flush: CacheFlush | None = None,
) -> Times:
    """Of a product with `experts` in that layout: a row has other ones than the row before, and of
    a prompt's rows each expert has many."""
    count, outputs, inputs = experts.weight.shape
    times = []
    for rows in ROWS:
        together = min(rows * CHOSEN, count)
        fitting = EXPERTS_SAMPLE // (4 * together * inputs)
        most = min(outputs, max(fitting // OUTPUTS, 1) * OUTPUTS)
        parts = min(count // together, -(-fitting // most))
        starts = [number * together for number in range(parts)]
        cuts = [(slice(start, start + together), slice(most)) for start in starts]
        sample = [laid(part_of(experts, cut)) for cut in cuts]
        times.append(seconds(sample, rows, mx.float32, flush) / parts)
    few = laid(part_of(experts, (slice(FEW_EXPERTS), slice(MOST_OUTPUTS))))
    times.append(seconds([few], MANY_ROWS, mx.float32, flush))
    return times

"""Layouts of the float32 weights of a CPU's products: by rows (as stored), by columns, in blocks.

Products with layers of each shape are timed in every layout, and the fastest layout is taken.
Experts are timed as stored and in blocks only.

A BLAS packs a weight that lies by rows or by columns for every product. With few rows the packing
takes most of the time. Packing is slow where the stride is a large power of two; the stride is the
number of inputs in one of these layouts and the number of outputs in the other. A BLAS with kernels
for blocks need not pack them (see `blocked`).

Products are timed with weights in memory, unless the caches hold a whole model: before a step
reaches a layer, its earlier reads have pushed that layer's weight out of the caches.
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
"""Least elements of a weight for which other layouts are tried."""
SAMPLE = 2**23
"""Bytes of alike layers that are multiplied in one timing, if there are so many: the products then
take long beside the wake-up of the computing thread."""
EXPERTS_SAMPLE = 2**26
"""The same for experts, of which each is cut to as many outputs as fit."""
GAIN = 0.9
"""Share of a product's time below which another layout must bring it."""

MANY_ROWS = 64
"""Rows of the timed prompt. A BLAS may use several threads for them, but one for blocks."""
MOST_OUTPUTS = 65 * 64
"""Most outputs of a layer in the timing of a prompt: a whole vocabulary would take long."""
FEW_EXPERTS = 4
"""Experts of a layer among which the rows of the timed prompt are shared out."""
LOSS = 1.1
"""Most that blocks may take for a prompt, as a multiple of the time without blocks."""

Times = list[float]
"""Seconds of a product for each number of rows in `ROWS`, and last for `MANY_ROWS`."""


@dataclass(frozen=True, slots=True)
class LayoutCounts:
    """Counts of a model's products by the layout of their weights.

    cache: bytes of the CPU's largest cache. cached: True if that cache holds all the weights.
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


def lay_out(model: nn.Module, cache: int | None = None, doing: Doing = unheard) -> LayoutCounts:
    """Change the layout of the weights whose products become faster by it.

    The change is lazy, as in `weights.convert`. All `blockable_layers` go into blocks, or none: the
    engine joins layers of one kind only. cache: bytes of the CPU's largest cache; None: as measured
    on this machine.
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
    return LayoutCounts(blocks, columns, rows - columns, cache, flush is None)


def _lay_out_layers(model: nn.Module, flush: CacheFlush | None, doing: Doing) -> int:
    """Lay out the layers that are not experts, and return the number that lie by columns."""
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
    """Return whether blocks are faster for few rows, summed over the layers, and at most by `LOSS`
    slower for a prompt."""
    ours, others = (list(map(sum, zip(*each, strict=True))) for each in (with_blocks, without))
    return bool(ours) and gains(ours, others) and ours[-1] <= LOSS * others[-1]


def gains(times: Sequence[float], over: Sequence[float]) -> bool:
    """Return whether products with few rows become faster by more than `GAIN`, in their mean."""
    few = len(ROWS)
    return prod(times[:few]) < GAIN**few * prod(over[:few])


def by_columns(layer: nn.Linear) -> nn.Linear:
    """Return a copy of the layer whose weight lies in memory column by column."""
    turned = copy.copy(layer)
    turned.weight = mx.contiguous(layer.weight.T).T
    return turned


def float32_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the `nn.Linear` layers with float32 weights, by name."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.weight.dtype == mx.float32:
            yield name, module


def layers_alike(model: nn.Module) -> list[list[nn.Linear]]:
    """Return the float32 `nn.Linear` layers of at least `SMALLEST` elements, grouped by shape."""
    groups: dict[tuple[int, ...], list[nn.Linear]] = {}
    for _, layer in float32_layers(model):
        groups.setdefault(layer.weight.shape, []).append(layer)
    return [layers for layers in groups.values() if layers[0].weight.size >= SMALLEST]


def blockable_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the float32 layers that can be in blocks, by name. A layer counts only if all siblings
    with as many inputs can be, too: the engine joins layers of one kind only."""
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
    """Return the times of a product with one of `layers`, which are alike, in the layout that
    `laid` makes."""
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
    """Return the float32 experts that can be in blocks, by name, grouped by shape."""
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
    """Return the times of a product with `experts` in the layout that `laid` makes. Neighbouring
    rows use different experts; in a prompt each expert has many rows."""
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

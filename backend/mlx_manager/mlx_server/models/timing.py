"""Which form of the weights is fastest: one product of a typical layer, timed in each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, prod
from time import perf_counter

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_manager.mlx_server.models.weights import (
    Device,
    Form,
    activation_dtype,
    computed,
    converted,
    elements,
)
from mlx_manager.mlx_server.utils.steps import TURN, Steps

LAYERS = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)
ROWS = (1, 16)
"""A conversation alone, and a batch."""
CHOSEN = 8
"""Experts of a row."""
SORTED = 64
"""Pairs of a row and an expert from which on mlx-lm puts them in order by expert, and says so."""
SAMPLE_ELEMENTS = 2**20
"""Of a weight, on a CPU, where a product with a whole layer may take a second."""
HOPELESS = 8.0
"""A form that many times slower than the best with one row is not timed with more."""
ROUNDS = 2
"""In which every form has its turn, since what else the machine does outlasts a form's turn."""
SAMPLES, ENOUGH = 3, 0.002
"""A product is timed so many times, and so many seconds in all, at least."""
AT_ONCE = 0.001
"""Seconds of products that are timed together, as a step has many: to wake the thread that computes
may take 0.1 ms, ten times a small product."""


def fastest(model: nn.Module, forms: Sequence[Form], device: Device) -> Steps[tuple[Form, str]]:
    """The form with the least product of its times with one row and with many, and the figures.

    Evaluates one layer of `model`, which stays in the form it has.
    """
    layer = typical_layer(model)
    if layer is None:
        return forms[0], "there is no product to time"
    narrow = activation_dtype(model)
    # The likely winner first, so that the slow forms are found hopeless.
    likely = sorted(forms, key=lambda form: (form.dense, form.wide), reverse=True)
    samples = {form: converted(sample_of(layer, device), form) for form in likely}
    times: dict[Form, dict[int, float]] = {form: {} for form in likely}
    for _ in range(ROUNDS):
        for form, sample in samples.items():
            dtype = mx.float32 if form.wide else narrow
            for rows in ROWS:
                if rows != ROWS[0] and is_hopeless(form, times):
                    break
                taken = yield from seconds([sample], rows, dtype)
                times[form][rows] = min(taken, times[form].get(rows, inf))
    best = min(times, key=lambda form: prod(times[form].get(rows, inf) for rows in ROWS))
    figures = ", ".join(
        f"{form.name} {' / '.join(f'{1e3 * taken:.2g}' for taken in taken_by.values())}"
        for form, taken_by in times.items()
    )
    return best, f"ms for a product of {' / '.join(map(str, ROWS))} rows: {figures}"


def is_hopeless(form: Form, times: Mapping[Form, Mapping[int, float]]) -> bool:
    """By its time with one row, beside those of the forms that have been timed."""
    alone = ROWS[0]
    best = min(taken[alone] for taken in times.values() if taken)
    return times[form][alone] > HOPELESS * best


def typical_layer(model: nn.Module) -> nn.Module | None:
    """A layer of the kind that most of the weights belong to, of median size."""
    kinds: dict[type, list[nn.Module]] = {}
    for _, module in model.named_modules():
        if isinstance(module, LAYERS):
            kinds.setdefault(type(module), []).append(module)
    if not kinds:
        return None
    layers = max(kinds.values(), key=lambda layers: sum(map(elements, layers)))
    return sorted(layers, key=elements)[len(layers) // 2]


def sample_of(layer: nn.Module, device: Device) -> nn.Module:
    """A copy of `layer`, on a CPU cut to its first experts and outputs."""
    if device != "cpu":
        return copy.copy(layer)
    inputs = elements(layer) // prod(layer.weight.shape[:-1])
    cut: tuple[slice, ...] = (slice(max(1, SAMPLE_ELEMENTS // inputs)),)
    if isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
        experts = min(4, layer.weight.shape[0])
        cut = (slice(experts), slice(max(1, SAMPLE_ELEMENTS // (experts * inputs))))
    return part_of(layer, cut)


def part_of(layer: nn.Module, cut: tuple[slice, ...]) -> nn.Module:
    """A copy of `layer` with a part of each parameter."""
    part = copy.copy(layer)
    part.update({name: array[cut] for name, array in layer.parameters().items()})
    return part


def seconds(layers: Sequence[nn.Module], rows: int, dtype: mx.Dtype) -> Steps[float]:
    """The least time of products with `layers`, which are alike, and `rows` rows of activations."""
    layer = layers[0]
    inputs = elements(layer) // prod(layer.weight.shape[:-1])
    # A decode step's shape: the CUDA kernel for quantised weights takes each row alone there.
    x = mx.random.normal((rows, 1, inputs), key=mx.random.key(0)).astype(dtype)
    arguments: tuple[mx.array, ...] = (x,)
    how: dict[str, bool] = {}
    if isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
        count = layer.weight.shape[0]
        chosen = min(CHOSEN, count)
        experts = mx.arange(rows * chosen, dtype=mx.uint32).reshape(rows, chosen) % count
        arguments = (x.reshape(rows, 1, 1, inputs), experts)
        if experts.size >= SORTED:
            order = mx.argsort(experts.flatten())
            arguments = (x[order // chosen], experts.flatten()[order])
            how["sorted_indices"] = True
    weights = [array for layer in layers for array in layer.parameters().values()]
    yield from computed([*arguments, *weights])
    # The first is not counted: it may compile a kernel, or wake threads.
    yield from computed([layer(*arguments, **how) for layer in layers])

    def products(times: int) -> None:
        mx.eval([layer(*arguments, **how) for _ in range(times) for layer in layers])

    alone = yield from least_seconds(partial(products, 1))
    times = int(AT_ONCE / alone)
    return (yield from least_seconds(partial(products, times))) / times if times > 1 else alone


def least_seconds(work: Callable[[], object]) -> Steps[float]:
    """Of several times that `work` is done, with pauses."""
    taken: list[float] = []
    turn = 0
    while len(taken) < SAMPLES or sum(taken) < ENOUGH:
        start = perf_counter()
        work()
        taken.append(perf_counter() - start)
        if sum(taken[turn:]) > TURN:
            turn = len(taken)
            yield None
    return min(taken)

"""Choice of the fastest form of the weights: one product of a typical layer is timed in each form.

On a CPU the timed weights lie where a step will find them: in the caches if those hold all of a
model's weights, and otherwise in memory, from which reading may take ten times as long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, prod
from time import perf_counter, process_time

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_manager.mlx_server.devices.cpu.cache import last_level_cache
from mlx_manager.mlx_server.models.loading.weights import (
    Device,
    Form,
    activation_dtype,
    converted,
    default_device,
    elements,
)

LAYERS = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)
ROWS = (1, 16)
"""Rows of the timed products: a conversation alone, and a batch."""
CHOSEN = 8
"""Experts per row in a timed product."""
SORTED = 64
"""Pairs of a row and an expert from which on mlx-lm sorts them by expert (`sorted_indices`)."""
SAMPLE_ELEMENTS = 2**20
"""Elements of a weight that are timed on a CPU: a product with a whole layer may take a second."""
HOPELESS = 8.0
"""A form that many times slower than the best with one row is not timed with more."""
ROUNDS = 2
"""Rounds in which every form is timed once: other load of the machine outlasts one timing."""
SAMPLES, ENOUGH = 3, 0.002
"""Least number of timings of a product, and their least sum in seconds."""
ALIKE, MOST_SAMPLES = 1.05, 12
"""The least time is accepted once a second one exceeds it by at most a twentieth, or after
`MOST_SAMPLES` timings: other load of a busy machine lengthens single ones."""
FLUSHED, LEAST_FLUSHED, MOST_FLUSHED = 2, 2**26, 2**29
"""Bytes read to empty the last-level cache, as a multiple of its size, with their bounds: a virtual
machine may report another size than it has."""
AT_ONCE = 0.001
"""Seconds of products that are timed together, as a step has many: waking the computing thread may
take 0.1 ms, ten times a small product."""


def fastest(model: nn.Module, forms: Sequence[Form], device: Device) -> tuple[Form, str]:
    """Return the form with the least product of its times with one row and with many, and the
    times as text.

    One layer of `model` is evaluated; its form stays.
    """
    layer = typical_layer(model)
    if layer is None:
        return forms[0], "there is no product to time"
    narrow = activation_dtype(model)
    # The likely winner first, so that the slow forms are found hopeless.
    likely = sorted(forms, key=lambda form: (form.dense, form.wide), reverse=True)
    samples = {form: converted(sample_of(layer, device), form) for form in likely}
    flush = CacheFlush(last_level_cache())
    times: dict[Form, dict[int, float]] = {form: {} for form in likely}
    for _ in range(ROUNDS):
        for form, sample in samples.items():
            dtype = mx.float32 if form.wide else narrow
            for rows in ROWS:
                if rows != ROWS[0] and is_hopeless(form, times):
                    break
                cold = flush.before(form.nbytes) if device == "cpu" else None
                taken = seconds([sample], rows, dtype, cold)
                times[form][rows] = min(taken, times[form].get(rows, inf))
    best = min(times, key=lambda form: prod(times[form].get(rows, inf) for rows in ROWS))
    figures = ", ".join(
        f"{form.name} {' / '.join(f'{1e3 * taken:.2g}' for taken in taken_by.values())}"
        for form, taken_by in times.items()
    )
    return best, f"ms for a product of {' / '.join(map(str, ROWS))} rows: {figures}"


def is_hopeless(form: Form, times: Mapping[Form, Mapping[int, float]]) -> bool:
    """Return whether a form takes `HOPELESS` times as long with one row as the best form so far."""
    alone = ROWS[0]
    best = min(taken[alone] for taken in times.values() if taken)
    return times[form][alone] > HOPELESS * best


def typical_layer(model: nn.Module) -> nn.Module | None:
    """Return a layer of median size, of the kind that most of the weights belong to."""
    kinds: dict[type, list[nn.Module]] = {}
    for _, module in model.named_modules():
        if isinstance(module, LAYERS):
            kinds.setdefault(type(module), []).append(module)
    if not kinds:
        return None
    layers = max(kinds.values(), key=lambda layers: sum(map(elements, layers)))
    return sorted(layers, key=elements)[len(layers) // 2]


def sample_of(layer: nn.Module, device: Device) -> nn.Module:
    """Return a copy of `layer`, on a CPU cut to its first experts and outputs."""
    if device != "cpu":
        return copy.copy(layer)
    inputs = elements(layer) // prod(layer.weight.shape[:-1])
    cut: tuple[slice, ...] = (slice(max(1, SAMPLE_ELEMENTS // inputs)),)
    if isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
        experts = min(4, layer.weight.shape[0])
        cut = (slice(experts), slice(max(1, SAMPLE_ELEMENTS // (experts * inputs))))
    return part_of(layer, cut)


def part_of(layer: nn.Module, cut: tuple[slice, ...]) -> nn.Module:
    """Return a copy of `layer` with the part `cut` of each parameter."""
    part = copy.copy(layer)
    part.update({name: array[cut] for name, array in layer.parameters().items()})
    return part


class CacheFlush:
    """Reader of other memory, which empties a CPU's caches. cache: bytes of the largest cache."""

    def __init__(self, cache: int) -> None:
        self._cache = cache
        self.nbytes = min(max(FLUSHED * cache, LEAST_FLUSHED), MOST_FLUSHED)
        self._other: mx.array | None = None

    def before(self, nbytes: int) -> CacheFlush | None:
        """Return this flush if weights of `nbytes` exceed the cache, so that steps find none in
        it; else None."""
        return self if nbytes > self._cache else None

    def __call__(self) -> None:
        if self._other is None:
            self._other = mx.ones((self.nbytes // 4096, 1024))
            mx.eval(self._other)
        # The thread that computes the products must read: some caches belong to one core. Sums of
        # columns are MLX's fastest way to read.
        mx.eval(self._other.sum(axis=0))


def seconds(
    layers: Sequence[nn.Module], rows: int, dtype: mx.Dtype, flush: CacheFlush | None = None
) -> float:
    """Return the least time of products with all `layers`, which are alike, and `rows` rows of
    activations.

    flush: called before each timing.
    """
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
    mx.eval([*arguments, *weights])
    # The first is not counted: it may compile a kernel, or wake threads.
    mx.eval([layer(*arguments, **how) for layer in layers])

    def products(times: int) -> None:
        mx.eval([layer(*arguments, **how) for _ in range(times) for layer in layers])

    alone = least_seconds(partial(products, 1), flush)
    times = 1 if flush else int(AT_ONCE / alone)
    return least_seconds(partial(products, times)) / times if times > 1 else alone


def least_seconds(work: Callable[[], object], flush: CacheFlush | None = None) -> float:
    """Return the least seconds that `work` takes in several runs: of the CPU if MLX computes there,
    else by the clock."""
    taken_by = cpu_seconds if default_device() == "cpu" else wall_seconds
    taken: list[float] = []
    while not is_believed(taken):
        if flush is not None:
            flush()
        taken.append(taken_by(work))
    return min(taken)


def wall_seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the seconds that the work takes where no other program has the CPU. This is the time
    that this program had the CPU, unless several threads had it at once."""
    start = process_time()
    whole = wall_seconds(work)
    return min(whole, process_time() - start)


def is_believed(taken: Sequence[float]) -> bool:
    """Return whether the least of these seconds is the time of the work on an otherwise idle
    machine."""
    if len(taken) < SAMPLES or sum(taken) < ENOUGH:
        return False
    least, second, *_ = sorted(taken)
    return second <= ALIKE * least or len(taken) >= MOST_SAMPLES

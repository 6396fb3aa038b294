"""Experts of a layer (mixture of experts), on NVIDIA GPUs: see route.cu.

A pair is a row with one of its chosen experts. An errand is a block's work item: up to a fixed
number of pairs of one expert.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, CudaDevice
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernels, CudaSource
from mlx_manager.mlx_server.devices.cuda.matmul.factors import (
    LEAST,
    Activation,
    Experts,
    ExpertScoring,
    Packed,
    RowNorm,
    Weight,
    arrays_of,
)
from mlx_manager.mlx_server.devices.cuda.matmul.forms import GroupForm, Packing, WarpForm, knows
from mlx_manager.mlx_server.devices.kernel import (
    Argument,
    Constant,
    KernelName,
    OptionalArgument,
    Size,
    Struct,
)
from mlx_manager.mlx_server.devices.kinds import checks
from mlx_manager.mlx_server.devices.likeness import distance

MOST_CHOSEN = 32
# Numbers of an errand: expert, first place in the order of pairs, rows, unused.
_ERRAND = 4
# Rows and experts of a router's block, if there is more than one row.
_ROUTED, _ROUTER_TILE = 8, 16
_ROUTER_WARPS = 16
# Most rows that one launch routes. With more rows MLX does the norm and the product with the
# router, and blocks of `_CHOOSING` rows choose the experts: with 8 192 rows and 128 experts one
# launch takes 475 us (H100).
_MOST_ROUTED, _CHOOSING = 512, 64
# Most groups of rows of a router's launch: the rows are at most 8 times as many.
_MOST_GROUPS = 8192
# Most rows that are mixed by the last blocks of the down projection, and most parts of its width.
# With more rows these few blocks would have too much to do.
_MOST_MIXED, _MOST_PARTS = 64, 1024
_MIX_THREADS = 256
_PIECE = 8
_ROUTE_SOURCE = Path(__file__).with_name("route.cu")
_EXPERTS_SOURCE = Path(__file__).with_name("experts.cu")
_GROUP_EXPERTS_SOURCE = Path(__file__).with_name("group_experts.cu")
# Pairs of an errand for warpgroups, used if an expert has more than 32 pairs on average.
_GROUPED = (64, 128)
# Comparison of warpgroups with warps: rows of an expert, most rows in all, number of runs, and
# allowed difference of the results.
_COMPARED, _MOST_COMPARED, _TIMES, _TOLERANCE = 128, 4096, 3, 1e-2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterForm:
    """Constants of the router's kernel.

    each: rows of a block. held: most pairs of an errand. gated: the router has logits of the
    `shared` experts, too. bias: whether logits have a bias. corrected, router_norm, scales: whether
    there are such arrays; see `Experts`, also for the other constants.
    """

    each: int
    held: int
    experts: int
    chosen: int
    shared: int
    normalised: bool
    bias: bool
    width: int
    epsilon: float
    gated: bool = True
    scoring: ExpertScoring = ExpertScoring.SOFTMAX
    corrected: bool = False
    scale: float = 1.0
    least: float = LEAST
    router_norm: bool = False
    scales: bool = False

    @property
    def threads(self) -> int:
        return _ROUTER_WARPS * 32

    @property
    def logits(self) -> int:
        """Logits of a row."""
        return self.experts if self.gated else self.experts - self.shared

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of inputs that not all routers have."""
        there = {
            "router_norm": self.router_norm,
            "bias": self.bias,
            "correction": self.corrected,
            "scales": self.scales,
        }
        return tuple(name for name, is_there in there.items() if is_there)

    @property
    def choosing(self) -> tuple[str, ...]:
        """Names of the optional inputs that the choice of experts takes."""
        return tuple(name for name in self.optional if name in {"correction", "scales"})

    @property
    def shared_memory(self) -> int:
        merged = _ROUTER_WARPS * _ROUTER_TILE * 8 * 4
        return max(self.each * 2 * self.width + merged, 4 * (3 * self.experts + 2))

    def groups(self, rows: int) -> int:
        """Return the number of groups of rows; a block has one group."""
        return -(-rows // self.each)

    def blocks(self, rows: int) -> int:
        return self.groups(rows) * -(-self.logits // _ROUTER_TILE)

    def most_errands(self, rows: int) -> int:
        """Return the most errands that so many rows can need."""
        pairs = rows * self.chosen
        return min(pairs, self.experts + pairs // self.held)


@dataclass(frozen=True, slots=True)
class Mix:
    """Weighted sum of the outputs of a row's `chosen` experts.

    alone: the row itself (the residual) is not added.
    """

    chosen: int
    alone: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs beside the experts' outputs."""
        return (*([] if self.alone else ["residual"]), "places", "scores")


@dataclass(frozen=True, slots=True)
class ErrandVariant:
    """Constants of a product's kernel.

    activation: activation of gates and ups; None for the down projection. mix: sum of the experts'
    outputs, if the same launch does it.
    """

    form: WarpForm | GroupForm
    experts: int
    activation: Activation | None
    bias: bool
    mix: Mix | None = None

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the inputs that select the rows."""
        return ("gated", "errands") if self.activation is None else ("x", "order", "errands")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the kernel's inputs."""
        bias = ("bias",) if self.bias else ()
        mixed = () if self.mix is None else ("done", *self.mix.inputs)
        return (*self.rows, *self.form.weight_parts, *bias, *mixed)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("out",) if self.mix is None else ("out", "mixed")


class ExpertKernels:
    """Kernels for the experts of layers, for any number of rows, (rows, width)."""

    def __init__(self, dtype: mx.Dtype, device: CudaDevice) -> None:
        self._dtype = dtype
        self._device = device
        self._kernel = CudaKernels(dtype)
        # By size of experts: whether warpgroups multiply many rows.
        self._grouped: dict[Hashable, bool] = {}
        # By kind of router: whether several launches route many rows right.
        self._routes_many: dict[Hashable, bool] = {}
        # Counters of finished blocks of the router and of the down projection. Launches run in
        # order, and leave zeros.
        self._routed = mx.zeros((1 + _MOST_GROUPS,), mx.int32)
        self._lowered = mx.zeros((_MOST_PARTS,), mx.int32)
        mx.eval(self._routed, self._lowered)

    def serves(self, experts: Experts) -> bool:
        """Return whether the kernels serve `experts`."""
        weights = (experts.gate_up, experts.down)
        return (
            all(map(knows, weights))
            and len({Packing.of(weight) is None for weight in weights}) == 1
            and experts.width % 64 == 0
            and experts.width // 32 <= _MOST_PARTS
            and experts.inner % 64 == 0
            and experts.chosen <= min(MOST_CHOSEN, experts.count)
            and self._router_form(experts, _ROUTED, 0.0).shared_memory <= self._device.block_memory
        )

    def check(self, experts: Experts) -> None:
        """Check, once for each kind of router, that several launches route many rows right.

        If they do not, one launch is used.
        """
        kind = self._router_kind(experts)
        if kind in self._routes_many:
            return
        try:
            of = f"routes of {self._dtype} {kind!r}"
            wrong = checks().outcome(of, partial(self._misrouted, experts))
        except (RuntimeError, ValueError) as error:
            # MLX raises these as in `compare`.
            wrong = str(error)
        self._routes_many[kind] = wrong is None
        if wrong is not None:
            log.warning("prompts' experts are chosen by one launch: %s", wrong)

    def _misrouted(self, experts: Experts) -> str | None:
        hidden, norm = self._rows_for(experts, 2 * _MOST_ROUTED)
        form = self._router_form(experts, hidden.shape[0], norm.epsilon)
        made = self._route_many(hidden, norm, experts, form)
        mx.eval(made)
        return misrouted(experts, made)

    def compare(self, experts: Experts) -> None:
        """Measure, once for each size of experts, whether warpgroups multiply many rows faster.

        Nothing is measured if the device or the weights do not allow warpgroups.
        """
        kind = _kind(experts)
        if kind in self._grouped or not self._serves_in_groups(experts):
            return
        rows = min(-(-_COMPARED * experts.count // experts.chosen), _MOST_COMPARED)
        hidden, norm = self._rows_for(experts, rows)
        self._grouped[kind] = False
        seconds, wanted = self._timed(hidden, norm, experts)
        self._grouped[kind] = True
        try:
            less, got = self._timed(hidden, norm, experts)
        except (RuntimeError, ValueError) as error:
            # MLX raises these if a kernel can't be compiled, loaded or launched.
            self._grouped[kind] = False
            log.warning("prompts' experts are not multiplied by warpgroups: %s", error)
            return
        off = distance(*((x - hidden).reshape(-1) for x in (got, wanted)))
        self._grouped[kind] = off <= _TOLERANCE and less < seconds
        log.info(
            "prompts' experts by warpgroups: %.2f times as fast, %.2g off%s",
            seconds / less,
            off,
            "" if self._grouped[kind] else "; not used",
        )

    def _rows_for(self, experts: Experts, rows: int) -> tuple[mx.array, RowNorm]:
        """Return so many rows, and a norm, for a trial: each expert is the first choice of some."""
        times = -(-rows // experts.router.shape[0])
        hidden = mx.concatenate([experts.router] * times)[:rows]
        return hidden, RowNorm(mx.ones((experts.width,), self._dtype), 1e-6)

    def _timed(self, hidden: mx.array, norm: RowNorm, experts: Experts) -> tuple[float, mx.array]:
        """Return the seconds that the experts take for `hidden`, and the result."""
        launches = self(hidden, norm, experts)
        mx.eval(launches)
        return self._seconds(hidden, norm, experts), launches[-1]

    def _seconds(self, hidden: mx.array, norm: RowNorm, experts: Experts) -> float:
        """Return the seconds that the experts take for `hidden`, the shortest of several runs."""
        best = math.inf
        for _ in range(_TIMES):
            began = time.perf_counter()
            mx.eval(self(hidden, norm, experts)[-1])
            best = min(best, time.perf_counter() - began)
        return best

    def _serves_in_groups(self, experts: Experts) -> bool:
        dense = not any(isinstance(weight, Packed) for weight in (experts.gate_up, experts.down))
        whole = experts.width % 128 == 0 and experts.inner % 64 == 0
        form = group_errand_form(experts.width, _GROUPED[-1], down=True)
        fits = form.shared_memory <= self._device.block_memory
        return self._device.multiplies_in_groups and dense and whole and fits

    def __call__(
        self, hidden: mx.array, norm: RowNorm, experts: Experts, *, alone: bool = False
    ) -> list[mx.array]:
        """Return the intermediate results and, last, `hidden` plus the experts' output.

        The experts are applied to `norm(hidden)`. alone: `hidden` is not added.
        """
        form = self._router_form(experts, hidden.shape[0], norm.epsilon)
        routed = self._route(hidden, norm, experts, form)
        normed, _, _, scores, places, order, errands = routed
        (gated,) = self._multiply(experts, form, experts.activation, [normed, order, errands])
        mix = Mix(experts.chosen, alone)
        mixed = [*([] if alone else [hidden]), places, scores]
        given, *out = self._multiply(experts, form, mix, [gated, errands], mixed)
        return [*routed, gated, given, *(out or [self._mix(mix, given, mixed)])]

    def _router_form(self, experts: Experts, rows: int, epsilon: float) -> RouterForm:
        # An errand has few rows, about as many as most experts have.
        mean = rows * experts.chosen / experts.count
        held = next(held for held in (8, 16, 32) if mean <= held / 2 or held == 32)
        if mean > held and self._grouped.get(_kind(experts), False):
            held = next(held for held in _GROUPED if mean <= held or held == _GROUPED[-1])
        each = 1 if rows == 1 else _ROUTED
        bias = experts.router_bias is not None
        numbers = (experts.count, experts.chosen, experts.shared)
        return RouterForm(
            each,
            held,
            *numbers,
            experts.normalised,
            bias,
            experts.width,
            epsilon,
            gated=experts.gated,
            scoring=experts.scoring,
            corrected=experts.correction is not None,
            scale=experts.scale,
            least=experts.least,
            router_norm=experts.router_norm is not None,
            scales=experts.scales is not None,
        )

    def _router_kind(self, experts: Experts) -> Hashable:
        """Return a key that is equal for routers that route many rows by the same kernels."""
        return replace(self._router_form(experts, _MOST_ROUTED, 0.0), held=0)

    def _route(
        self, hidden: mx.array, norm: RowNorm, experts: Experts, form: RouterForm
    ) -> list[mx.array]:
        rows, width = hidden.shape
        if rows > _MOST_ROUTED and self._routes_many.get(self._router_kind(experts), False):
            return self._route_many(hidden, norm, experts, form)
        if form.groups(rows) > _MOST_GROUPS:
            raise ValueError(f"{rows} rows: the router takes {_MOST_GROUPS * _ROUTED} at most")
        pairs = rows * form.chosen
        of_pairs = [(rows, form.chosen)] * 2 + [(pairs,)] * 2
        may_be = (experts.router_norm, experts.router_bias)
        optional = [array for array in (*may_be, *_choosing(experts)) if array is not None]
        kernel = self._kernel(route_source, form)
        return kernel(
            inputs=[hidden, norm.weight, experts.router, *optional, self._routed],
            grid=(form.blocks(rows) * form.threads, 1, 1),
            threadgroup=(form.threads, 1, 1),
            output_shapes=[
                (rows, width),
                (rows, form.logits),
                *of_pairs,
                (form.most_errands(rows), _ERRAND),
            ],
            output_dtypes=[self._dtype, mx.float32, mx.int32, mx.float32, *[mx.int32] * 3],
        )

    def _route_many(
        self, hidden: mx.array, norm: RowNorm, experts: Experts, form: RouterForm
    ) -> list[mx.array]:
        """Route as `_route` does, by several launches."""
        rows, threads = hidden.shape[0], (form.threads, 1, 1)
        normed = own = mx.fast.rms_norm(hidden, norm.weight, norm.epsilon)
        if experts.router_norm is not None:
            own = mx.fast.rms_norm(hidden, experts.router_norm, norm.epsilon)
        if experts.router_bias is None:
            logits = own @ experts.router.T
        else:
            logits = mx.addmm(experts.router_bias, own, experts.router.T)
        blocks, pairs = -(-rows // _CHOOSING), (rows * form.chosen,)
        chosen, scores, counts, errands = self._kernel(choose_source, form)(
            inputs=[logits, *_choosing(experts), self._routed],
            grid=(blocks * form.threads, 1, 1),
            threadgroup=threads,
            output_shapes=[
                *[(rows, form.chosen)] * 2,
                (blocks + 1, form.experts),
                (form.most_errands(rows), _ERRAND),
            ],
            output_dtypes=[mx.int32, mx.float32, mx.int32, mx.int32],
        )
        places, order = self._kernel(place_source, form)(
            inputs=[chosen, counts],
            grid=(blocks * form.threads, 1, 1),
            threadgroup=threads,
            output_shapes=[pairs, pairs],
            output_dtypes=[mx.int32, mx.int32],
        )
        return [normed, logits, chosen, scores, places, order, errands]

    def _multiply(
        self,
        experts: Experts,
        router: RouterForm,
        way: Activation | Mix,
        given: list[mx.array],
        mixed: Sequence[mx.array] = (),
    ) -> list[mx.array]:
        """Multiply by the experts' gates and ups, or by their down projections.

        way: the activation for gates and ups, the mix for the down projection. given: arrays of the
        rows; the first has a row for each pair, or for each row, and the last is the errands.
        mixed: inputs of the mix.
        """
        down = isinstance(way, Mix)
        weight, bias = experts.down if down else experts.gate_up, experts.biases
        pairs = given[0].shape[0] * (1 if down else experts.chosen)
        form = self._errand_form(weight, router.held, experts, pairs, down=down)
        mix = way if isinstance(way, Mix) and pairs <= _MOST_MIXED * experts.chosen else None
        activation = None if isinstance(way, Mix) else way
        variant = ErrandVariant(form, experts.count, activation, bias is not None, mix)
        arrays = [*given, *arrays_of(weight), *([] if bias is None else [bias[down]])]
        shapes = [(pairs, experts.width if down else experts.inner)]
        if mix is not None:
            arrays += [self._lowered, *mixed]
            shapes.append((pairs // experts.chosen, experts.width))
        parts = weight.shape[0] // experts.count // form.outputs
        return self._kernel(errand_source, variant)(
            inputs=arrays,
            grid=(given[-1].shape[0] * parts * form.threads, 1, 1),
            threadgroup=(form.threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=[self._dtype] * len(shapes),
        )

    def _errand_form(
        self, weight: Weight, held: int, experts: Experts, pairs: int, *, down: bool
    ) -> WarpForm | GroupForm:
        if held in _GROUPED:
            return group_errand_form(experts.width if down else experts.inner, held, down=down)
        return errand_form(weight, held, self._device, few=pairs < experts.count)

    def _mix(self, mix: Mix, given: mx.array, mixed: list[mx.array]) -> mx.array:
        pairs, width = given.shape
        rows = pairs // mix.chosen
        kernel = self._kernel(mix_source, mix)
        threads = rows * width // _PIECE
        (out,) = kernel(
            inputs=[given, *mixed],
            grid=(threads + -threads % _MIX_THREADS, 1, 1),
            threadgroup=(_MIX_THREADS, 1, 1),
            output_shapes=[(rows, width)],
            output_dtypes=[self._dtype],
        )
        return out


def group_errand_form(outputs: int, held: int, *, down: bool) -> GroupForm:
    """Return the form for warpgroups. outputs: outputs of an expert; the gates unless `down`."""
    return GroupForm(4 if outputs % (256 if down else 128) == 0 else 2, held)


def errand_form(weight: Weight, held: int, device: CudaDevice, *, few: bool = False) -> WarpForm:
    """Return the form for up to `held` pairs of an expert, as measured on an H200.

    Of packed weights a stage holds 64 bytes of a row, and there are two stages, so that many blocks
    fit. Unless pairs are few, more tiles share the reading of the rows; weights packed as floats
    take too much work for that.

    few: most experts have no pairs.
    """
    packing = Packing.of(weight)
    if packing is None:
        forms = [
            WarpForm(2, held, warps, stages) for warps, stages in ((4, 3), (4, 2), (2, 2), (1, 2))
        ]
        most = device.multiprocessor_memory // 2 - 1024
    else:
        most_tiles = 2 if few or packing.floats else 4
        sizes = [(tiles, 4) for tiles in (4, 2) if tiles <= most_tiles] + [(2, 2), (2, 1)]
        narrow = packing.narrower()
        forms = [WarpForm(tiles, held, warps, 2, narrow) for tiles, warps in sizes]
        most = device.block_memory
    fitting = (form for form in forms if form.shared_memory <= most)
    return next(fitting, forms[-1])


def route_source(dtype: mx.Dtype, form: RouterForm) -> CudaSource:
    sizes = (form.each, _ROUTER_WARPS, form.experts, form.chosen, form.shared)
    outputs = ("normed", "logits", "chosen", "scores", "places", "order", "errands")
    return CudaSource(
        name="route",
        files=(DEVICE_SOURCE, _ROUTE_SOURCE),
        bounds=(form.threads, 1),
        function="route_rows",
        constants=(dtype, *sizes, form.bias, form.held),
        arguments=(
            *(
                "x",
                "norm",
                OptionalArgument("router_norm"),
                "router",
                OptionalArgument("bias"),
                _choice(form),
                "done",
            ),
            *(*outputs, Size("x", 0), Size("x", 1), form.epsilon),
        ),
        inputs=("x", "norm", "router", *form.optional, "done"),
        outputs=outputs,
        shared_memory=form.shared_memory,
    )


def choose_source(dtype: mx.Dtype, form: RouterForm) -> CudaSource:
    sizes = (_CHOOSING, _ROUTER_WARPS, form.experts, form.chosen, form.shared)
    outputs = ("chosen", "scores", "counts", "errands")
    return CudaSource(
        name="choose_experts",
        files=(DEVICE_SOURCE, _ROUTE_SOURCE),
        bounds=(form.threads, 1),
        function="choose_rows",
        constants=(dtype, *sizes, form.held),
        arguments=("logits", _choice(form), "done", *outputs, Size("logits", 0)),
        inputs=("logits", *form.choosing, "done"),
        outputs=outputs,
        shared_memory=4 * (3 * form.experts + 2),
    )


def place_source(_: mx.Dtype, form: RouterForm) -> CudaSource:
    return CudaSource(
        name="place_experts",
        files=(DEVICE_SOURCE, _ROUTE_SOURCE),
        bounds=(form.threads, 1),
        function="place_pairs",
        constants=(_CHOOSING, form.experts, form.chosen, form.threads),
        arguments=("chosen", "counts", "places", "order", Size("chosen", 0)),
        inputs=("chosen", "counts"),
        outputs=("places", "order"),
        shared_memory=4 * form.experts,
    )


def _choice(form: RouterForm) -> Struct:
    """Return the choice of a row's experts."""
    scoring = KernelName(f"Scoring::{form.scoring.value}")
    kind = KernelName("Choice", (scoring, form.gated, form.normalised, form.corrected))
    return Struct(
        kind, (OptionalArgument("correction"), OptionalArgument("scales"), form.scale, form.least)
    )


def misrouted(experts: Experts, made: Sequence[mx.array]) -> str | None:
    """Return an error if the routes are wrong for their logits, else None.

    made: results of the router's launches. The definition is computed on the host.
    """
    logits, chosen, places, order, errands = (
        np.array(made[i].astype(mx.float32) if i == 1 else made[i]) for i in (1, 2, 4, 5, 6)
    )
    own, count = experts.count - experts.shared, experts.chosen - experts.shared
    by = logits[:, :own]
    if experts.scoring is ExpertScoring.SIGMOID:
        by = 1 / (1 + np.exp(-by))
    if experts.correction is not None:
        by = by + np.array(experts.correction)
    kept = np.sort(np.take_along_axis(by, chosen[:, :count], 1), 1)
    if not np.allclose(kept, np.sort(by, 1)[:, own - count :], rtol=1e-3, atol=1e-5):
        return "others than the largest are chosen"
    pairs = chosen.size
    if (np.sort(places) != np.arange(pairs)).any():
        return "pairs of rows and experts share places"
    if (order[places] != np.repeat(np.arange(len(chosen)), experts.chosen)).any():
        return "pairs are in others' places"
    sizes = np.bincount(chosen.reshape(-1), minlength=experts.count)
    first = np.cumsum(sizes) - sizes
    if (places < first[chosen.reshape(-1)]).any() or (
        np.bincount(errands[:, 0], errands[:, 2], experts.count) != sizes
    ).any():
        return "experts are given others' rows"
    return None


def _choosing(experts: Experts) -> list[mx.array]:
    """Return the arrays that experts are chosen by, beside logits."""
    return [array for array in (experts.correction, experts.scales) if array is not None]


def _kind(experts: Experts) -> Hashable:
    """Return a key that is equal for experts of one size with the same kernels."""
    sizes = (experts.count, experts.width, experts.inner, experts.chosen)
    return (*sizes, experts.activation, experts.biases is not None)


def errand_source(dtype: mx.Dtype, variant: ErrandVariant) -> CudaSource:
    form, activation, mix = variant.form, variant.activation, variant.mix
    groups, down = isinstance(form, GroupForm), activation is None
    name = "lower" if down else "gate"
    lines, inputs = form.size_of("weight", variant.experts * (1 if down else 2))
    constants: tuple[Constant, ...] = (dtype, *form.constants)
    sizes: tuple[Argument, ...] = (inputs, lines)
    if activation is None:
        constants += (variant.bias,)
        if not groups:
            rows = () if mix is None else (Size("scores", 0),)
            given = (
                ()
                if mix is None
                else ("done", OptionalArgument("residual"), "places", "scores", "mixed")
            )
            sizes += (Struct(None, (*given, *rows)),)
            constants += (0 if mix is None else mix.chosen,)
    else:
        constants += (KernelName(activation.value), variant.bias)
        sizes += (variant.experts,)
    return CudaSource(
        name=f"{name}_group_experts" if groups else f"{name}_experts",
        files=(*form.files, _ROUTE_SOURCE, _GROUP_EXPERTS_SOURCE if groups else _EXPERTS_SOURCE),
        bounds=(form.threads, 1) if groups else None,
        function=f"{name}_group_errand" if groups else f"{name}_errand",
        constants=constants,
        arguments=(*variant.rows, form.weight(dtype), OptionalArgument("bias"), "out", *sizes),
        inputs=variant.inputs,
        outputs=variant.outputs,
        shared_memory=form.shared_memory,
    )


def mix_source(dtype: mx.Dtype, mix: Mix) -> CudaSource:
    return CudaSource(
        name="mix_experts",
        files=(DEVICE_SOURCE, _ROUTE_SOURCE),
        function="mix_all_rows",
        constants=(dtype, mix.chosen),
        arguments=(
            *(OptionalArgument("residual"), "given", "places", "scores", "out"),
            *(Size("scores", 0), Size("given", 1)),
        ),
        inputs=("given", *mix.inputs),
        outputs=("out",),
    )

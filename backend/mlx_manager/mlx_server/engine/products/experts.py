"""The experts of a layer, on NVIDIA GPUs: see route.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.engine.kernels.cuda import DEVICE_SOURCE, TYPES, CudaDevice
from mlx_manager.mlx_server.engine.kernels.kernel import (
    CompiledForCuda,
    KernelSource,
    bounded,
    flag,
    real,
    source,
)
from mlx_manager.mlx_server.engine.products.factors import (
    LEAST,
    Activation,
    Experts,
    Norm,
    Scoring,
    Weight,
    arrays_of,
)
from mlx_manager.mlx_server.engine.products.forms import Packing, WarpForm, knows

MOST_CHOSEN = 32
# Of an errand: expert, place, rows, nothing.
_ERRAND = 4
# Rows and experts of a router's block, if there is more than one row.
_ROUTED, _ROUTER_TILE = 8, 16
_ROUTER_WARPS = 16
# Of a router's blocks: rows of a launch are at most 8 times as many.
_MOST_GROUPS = 8192
# Rows that are mixed by who comes last to the way down, of whose parts there are at most so many.
# Of more rows few blocks would have too much to do.
_MOST_MIXED, _MOST_PARTS = 64, 1024
_MIX_THREADS = 256
_PIECE = 8
_MIXED = ("done", "residual", "places", "scores")
_ROUTE_SOURCE = Path(__file__).with_name("route.cu")
_EXPERTS_SOURCE = Path(__file__).with_name("experts.cu")


@dataclass(frozen=True, slots=True)
class RouterForm:
    """Constants of the router's kernel: rows of a block, pairs of an errand, and what the router
    is. gated: it has logits of the `shared` experts, too. bias: of logits. corrected, scale,
    least: see `Experts`."""

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
    scoring: Scoring = Scoring.SOFTMAX
    corrected: bool = False
    scale: float = 1.0
    least: float = LEAST

    @property
    def threads(self) -> int:
        return _ROUTER_WARPS * 32

    @property
    def logits(self) -> int:
        """Of a row."""
        return self.experts if self.gated else self.experts - self.shared

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of inputs that not all routers have."""
        there = {"bias": self.bias, "correction": self.corrected}
        return tuple(name for name, is_there in there.items() if is_there)

    @property
    def shared_memory(self) -> int:
        merged = _ROUTER_WARPS * _ROUTER_TILE * 8 * 4
        return max(self.each * 2 * self.width + merged, 4 * (3 * self.experts + 2))

    def groups(self, rows: int) -> int:
        """Of rows that a block has."""
        return -(-rows // self.each)

    def blocks(self, rows: int) -> int:
        return self.groups(rows) * -(-self.logits // _ROUTER_TILE)

    def most_errands(self, rows: int) -> int:
        """How many there may be."""
        pairs = rows * self.chosen
        return min(pairs, self.experts + pairs // self.held)


@dataclass(frozen=True, slots=True)
class ErrandVariant:
    """Constants of a product's kernel. `activation`: of gates and ups; None for the way down.
    `mixes`: experts of a row, if what they give is mixed there, or 0."""

    form: WarpForm
    experts: int
    activation: Activation | None
    bias: bool
    mixes: int = 0

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of what says the rows."""
        return ("gated", "errands") if self.activation is None else ("x", "order", "errands")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the kernel's inputs."""
        bias = ("bias",) if self.bias else ()
        mixed = _MIXED if self.mixes else ()
        return (*self.rows, *self.form.weight_parts, *bias, *mixed)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("out", "mixed") if self.mixes else ("out",)


class ExpertKernels:
    """What a layer's experts make of rows, (rows, width), however many."""

    def __init__(self, dtype: mx.Dtype, device: CudaDevice) -> None:
        self._dtype = dtype
        self._device = device
        self._kernel = CompiledForCuda(dtype)
        # Of a router's blocks, and of those of the way down; launches follow each other, and leave
        # zeros.
        self._routed = mx.zeros((1 + _MOST_GROUPS,), mx.int32)
        self._lowered = mx.zeros((_MOST_PARTS,), mx.int32)
        mx.eval(self._routed, self._lowered)

    def serves(self, experts: Experts) -> bool:
        """Whether the kernels do."""
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

    def __call__(self, hidden: mx.array, norm: Norm, experts: Experts) -> list[mx.array]:
        """`hidden` plus what its rows' experts make of `norm(hidden)`, behind what is launched for
        that."""
        form = self._router_form(experts, hidden.shape[0], norm.epsilon)
        routed = self._route(hidden, norm, experts, form)
        normed, _, _, scores, places, order, errands = routed
        (gated,) = self._multiply(experts, form, experts.activation, [normed, order, errands])
        mixed = [hidden, places, scores]
        given, *out = self._multiply(experts, form, None, [gated, errands], mixed)
        return [*routed, gated, given, *(out or [self._mix(hidden, given, places, scores)])]

    def _router_form(self, experts: Experts, rows: int, epsilon: float) -> RouterForm:
        # As few of an expert's rows at once as most experts have.
        mean = rows * experts.chosen / experts.count
        held = next(held for held in (8, 16, 32) if mean <= held / 2 or held == 32)
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
        )

    def _route(
        self, hidden: mx.array, norm: Norm, experts: Experts, form: RouterForm
    ) -> list[mx.array]:
        rows, width = hidden.shape
        if form.groups(rows) > _MOST_GROUPS:
            raise ValueError(f"{rows} rows: the router takes {_MOST_GROUPS * _ROUTED} at most")
        pairs = rows * form.chosen
        of_pairs = [(rows, form.chosen)] * 2 + [(pairs,)] * 2
        may_be = (experts.router_bias, experts.correction)
        optional = [array for array in may_be if array is not None]
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

    def _multiply(
        self,
        experts: Experts,
        router: RouterForm,
        activation: Activation | None,
        given: list[mx.array],
        mixed: Sequence[mx.array] = (),
    ) -> list[mx.array]:
        """activation: of gates and ups; None for the way down. given: the first has a row for each
        pair, or for each row, and the errands are the last. mixed: what that takes."""
        down = activation is None
        weight, bias = experts.down if down else experts.gate_up, experts.biases
        pairs = given[0].shape[0] * (1 if down else experts.chosen)
        form = errand_form(weight, router.held, self._device, few=pairs < experts.count)
        mixes = experts.chosen if down and pairs <= _MOST_MIXED * experts.chosen else 0
        variant = ErrandVariant(form, experts.count, activation, bias is not None, mixes)
        arrays = [*given, *arrays_of(weight), *([] if bias is None else [bias[down]])]
        shapes = [(pairs, experts.width if down else experts.inner)]
        if mixes:
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

    def _mix(
        self, residual: mx.array, given: mx.array, places: mx.array, scores: mx.array
    ) -> mx.array:
        rows, width = residual.shape
        chosen = scores.shape[1]
        kernel = self._kernel(mix_source, chosen)
        threads = rows * width // _PIECE
        (out,) = kernel(
            inputs=[residual, given, places, scores],
            grid=(threads + -threads % _MIX_THREADS, 1, 1),
            threadgroup=(_MIX_THREADS, 1, 1),
            output_shapes=[(rows, width)],
            output_dtypes=[self._dtype],
        )
        return out


def errand_form(weight: Weight, held: int, device: CudaDevice, *, few: bool = False) -> WarpForm:
    """For up to `held` pairs of an expert; few: most experts have none. As measured on an H200: of
    packed weights 64 bytes of a row at once and two stages, so that many blocks fit, and unless
    pairs are few more tiles share the reading of rows; of floats there is too much to do for that.
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


def route_source(dtype: mx.Dtype, form: RouterForm) -> KernelSource:
    numbers = f"{form.each}, {_ROUTER_WARPS}, {form.experts}, {form.chosen}, {form.shared}"
    constants = f"{TYPES[dtype]}, {numbers}, {flag(form.bias)}, {form.held}"
    rows = "x_shape[0]"
    bias, correction = (
        name if name in form.optional else "nullptr" for name in ("bias", "correction")
    )
    flags = ", ".join(map(flag, (form.gated, form.normalised, form.corrected)))
    scoring = f"kernels::Scoring::{form.scoring.value}"
    figures = f"{real(form.scale)}, {real(form.least)}"
    choice = f"kernels::Choice<{scoring}, {flags}>{{{correction}, {figures}}}"
    pairs = f"{rows} * {form.chosen}"
    bound = f"{form.experts} + {pairs} / {form.held}"
    return KernelSource(
        name="route",
        header=source(DEVICE_SOURCE, _ROUTE_SOURCE) + bounded(form.threads),
        body=(
            f"const int most = {pairs} < {bound} ? {pairs} : {bound};\n"
            f"kernels::route_rows<{constants}>(x, norm, router, {bias}, {choice}, done, "
            f"normed, logits, chosen, scores, places, order, errands, {rows}, x_shape[1], "
            f"{real(form.epsilon)}, most);"
        ),
        inputs=("x", "norm", "router", *form.optional, "done"),
        outputs=("normed", "logits", "chosen", "scores", "places", "order", "errands"),
        shared_memory=form.shared_memory,
    )


def errand_source(dtype: mx.Dtype, variant: ErrandVariant) -> KernelSource:
    element, form, activation = TYPES[dtype], variant.form, variant.activation
    lines, inputs = form.size_of("weight")
    bias = flag(variant.bias)
    if activation is None:
        name, constants = "lower", f"{bias}, {variant.mixes}"
        mixed = f"{', '.join(_MIXED)}, mixed, residual_shape[0]" if variant.mixes else ""
        sizes = f"{inputs}, {lines} / {variant.experts}, {{{mixed}}}"
    else:
        name, constants = "gate", f"kernels::{activation.value}, {bias}"
        sizes = f"{inputs}, {lines} / {2 * variant.experts}, {variant.experts}"
    return KernelSource(
        name=f"{name}_experts",
        header=form.header(_ROUTE_SOURCE, _EXPERTS_SOURCE),
        body=(
            f"kernels::{name}_errand<{element}, {form.constants}, {constants}>("
            f"{', '.join(variant.rows)}, {form.weight(element)}, "
            f"{'bias' if variant.bias else 'nullptr'}, out, {sizes});"
        ),
        inputs=variant.inputs,
        outputs=variant.outputs,
        shared_memory=form.shared_memory,
    )


def mix_source(dtype: mx.Dtype, chosen: int) -> KernelSource:
    place = "blockIdx.x * blockDim.x + threadIdx.x"
    return KernelSource(
        name="mix_experts",
        header=source(DEVICE_SOURCE, _ROUTE_SOURCE),
        body=(
            f"kernels::mix_rows<{TYPES[dtype]}, {chosen}>(residual, given, places, scores, out, "
            f"residual_shape[0], residual_shape[1], {place});"
        ),
        inputs=("residual", "given", "places", "scores"),
        outputs=("out",),
    )

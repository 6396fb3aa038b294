"""The experts' CUDA source against plain arithmetic, on an emulated GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.matmul.devices import H200, RTX4090
from devices.cuda.matmul.halves import bits, gated, in_packs, rounded
from thorough import ALL, every_other, slow

from mlx_manager.mlx_server.devices.cuda.compiler import launch
from mlx_manager.mlx_server.devices.cuda.matmul.factors import (
    LEAST,
    Activation,
    Experts,
    ExpertScoring,
    Packed,
    RowNorm,
)
from mlx_manager.mlx_server.devices.cuda.matmul.forms import GroupForm, Packing, WarpForm, knows
from mlx_manager.mlx_server.devices.cuda.moe.experts import (
    ErrandVariant,
    ExpertKernels,
    Mix,
    RouterForm,
    _kind,
    choose_source,
    errand_form,
    errand_source,
    group_errand_form,
    misrouted,
    mix_source,
    place_source,
    route_source,
)

BF16, F16, F32, I32 = mx.bfloat16, mx.float16, mx.float32, mx.int32
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """held: pairs of an errand. shared: of the chosen, experts that all rows have. gated: the router
    has logits of those, too. apart: the router's norm is another, experts are weighted by numbers
    besides, and rows are not added."""

    name: str
    rows: int
    experts: int
    chosen: int
    held: int = 8
    normalised: bool = True
    width: int = 256
    inner: int = 64
    packing: Packing | None = None
    activation: Activation = Activation.SILU
    bias: bool = False
    dtype: mx.Dtype = BF16
    shared: int = 0
    gated: bool = True
    scoring: ExpertScoring = ExpertScoring.SOFTMAX
    corrected: bool = False
    scale: float = 1.0
    least: float = LEAST
    apart: bool = False
    # Of four warps each, which multiply in the place of warps.
    groups: int = 0
    # The norm and the router's product are launches of their own.
    apart_from_product: bool = False

    @property
    def router(self) -> RouterForm:
        numbers = (self.experts, self.chosen, self.shared)
        of = (*numbers, self.normalised, self.bias, self.width, EPSILON)
        how = (self.gated, self.scoring, self.corrected, self.scale, self.least)
        how = (*how, self.apart, self.apart)
        return RouterForm(1 if self.rows == 1 else 8, self.held, *of, *how)

    @property
    def kind(self) -> tuple:
        """Of those whose sources are the same."""
        return self.packing is not None, self.held if self.groups else 0

    @property
    def own(self) -> int:
        """Of the chosen, experts that are not shared."""
        return self.chosen - self.shared

    def form(self, inputs: int) -> WarpForm | GroupForm:
        if self.groups:
            return GroupForm(self.groups, self.held)
        packing = self.packing
        if packing is not None and packing.floats:
            packing = replace(packing, floats=inputs)
        return WarpForm(2, self.held, 2, 2, packing)

    @property
    def gates(self) -> ErrandVariant:
        return ErrandVariant(self.form(self.width), self.experts, self.activation, self.bias)

    @property
    def mix(self) -> Mix:
        return Mix(self.chosen, self.apart)

    @property
    def down(self) -> ErrandVariant:
        mix = self.mix if self.rows <= 64 and not self.groups else None
        return ErrandVariant(self.form(self.inner), self.experts, None, self.bias, mix)


FLOATS = Packing(4, 32, 64, floats=1)
MANY = {"held": 128, "groups": 4, "inner": 128}
SIGMOID = {"scoring": ExpertScoring.SIGMOID}
CORRECTED = SIGMOID | {"corrected": True}
EVERY = [
    Case("one-row", 1, 16, 4),
    Case("few-rows", 5, 40, 8, normalised=False),
    Case("few-experts", 13, 8, 2, inner=128),
    Case("many-rows", 37, 64, 6, held=16, dtype=F16),
    Case("more-than-an-errand", 75, 8, 3, held=32),
    Case("all-experts", 9, 4, 4),
    Case("shared", 6, 41, 9, shared=1),
    Case("shared-of-one-row", 1, 18, 6, shared=2, normalised=False),
    Case("sigmoid", 9, 64, 4, **SIGMOID),
    Case("sigmoid-as-it-is", 2, 40, 4, normalised=False, scale=0.5, **SIGMOID),
    Case("sigmoid-of-one", 9, 12, 1, normalised=False, bias=True, **SIGMOID),
    Case("corrected", 2, 64, 4, dtype=F16, **CORRECTED),
    Case("corrected-of-one-row", 1, 128, 8, scale=2.5, **CORRECTED),
    Case("corrected-as-it-is", 9, 128, 8, normalised=False, scale=1.8, **CORRECTED),
    Case("corrected-shared", 9, 65, 5, shared=1, gated=False, scale=1.8, **CORRECTED),
    Case("corrected-shared-of-one-row", 1, 130, 10, shared=2, gated=False, **CORRECTED),
    Case("corrected-gated", 2, 66, 10, shared=2, normalised=False, scale=3.0, **CORRECTED),
    Case("corrected-of-a-least-sum", 9, 32, 4, least=0.5, **CORRECTED),
    Case("scaled", 9, 66, 8, normalised=False, shared=2, gated=False, scale=16.0),
    Case("scaled-of-one-row", 1, 34, 4, shared=2, gated=False, scale=0.5),
    Case("chosen-alone", 150, 40, 6, held=32, apart_from_product=True),
    Case("chosen-alone-by-one-block", 33, 8, 2, bias=True, apart_from_product=True),
    Case(
        "chosen-alone-by-blocks",
        1100,
        66,
        10,
        shared=2,
        gated=True,
        scale=3.0,
        held=16,
        apart_from_product=True,
        **CORRECTED,
    ),
    Case(
        "chosen-alone-scaled", 70, 65, 3, shared=1, gated=False, apart=True, apart_from_product=True
    ),
    Case("apart", 6, 40, 8, activation=Activation.GELU, apart=True),
    Case("apart-corrected", 1, 33, 4, shared=1, gated=False, scale=2.0, apart=True, **CORRECTED),
    Case("apart-packed", 70, 8, 3, packing=Packing(4, 64, 64), held=32, apart=True),
    Case("packed", 6, 24, 5, packing=Packing(4, 64, 128), inner=128),
    Case("packed-8-bits", 21, 8, 3, packing=Packing(8, 64, 64), held=16, dtype=F16),
    Case("packed-narrowly", 7, 8, 3, packing=Packing(4, 64, 64), width=192, bias=True),
    Case("clamped", 6, 8, 3, width=320, activation=Activation.CLAMPED_SILU, bias=True),
    Case("floats", 5, 8, 2, packing=FLOATS, width=192, activation=Activation.CLAMPED_SILU),
    Case("floats-bias", 21, 8, 3, packing=FLOATS, held=16, bias=True, dtype=F16),
    Case("floats-wide", 4, 6, 3, packing=replace(FLOATS, width=128), inner=384),
    Case("groups", 150, 4, 2, **MANY),
    Case("groups-bias", 140, 3, 2, bias=True, dtype=F16, activation=Activation.GELU, **MANY),
    Case("groups-of-two", 67, 6, 3, held=64, groups=2, width=384),
    Case("groups-shared", 70, 5, 3, held=128, groups=2, width=128, shared=1, gated=False),
    Case("floats-of-many-rows", 30, 4, 3, packing=FLOATS, held=32, inner=192),
]
# Each way that these go, another case goes, too: to compile all takes as long again as to try them.
ALIKE = {
    *("few-experts", "sigmoid-as-it-is", "corrected", "corrected-shared", "scaled-of-one-row"),
    *("floats-of-many-rows", "groups-shared", "chosen-alone", "chosen-alone-by-one-block"),
}
CASES = [case for case in EVERY if ALL or case.name not in ALIKE]
ALONE = [case for case in CASES if case.apart_from_product]
# Products are the same behind either.
MULTIPLIED = [case for case in CASES if not case.apart_from_product]


@dataclass(frozen=True)
class Kernels:
    """Of a case: its library and its number there, for what routes and for what multiplies."""

    routing: tuple
    products: tuple | None


@pytest.fixture(scope="module")
def kernels(compile_cuda):
    """Of a case."""
    routing = compile_cuda([each for case in CASES for each in routing_entries(case)])
    products = {
        kind: compile_cuda([each for case in _of(kind) for each in product_entries(case)])
        for kind in sorted({case.kind for case in MULTIPLIED})
    }

    def of(case: Case) -> Kernels:
        first = sum(len(routing_entries(each)) for each in CASES[: CASES.index(case)])
        if case.apart_from_product:
            return Kernels((routing, first), None)
        number = _of(case.kind).index(case)
        return Kernels((routing, first), (products[case.kind], 2 * number))

    return of


def _of(kind: tuple) -> list[Case]:
    return [case for case in MULTIPLIED if case.kind == kind]


def routing_entries(case: Case) -> list[tuple]:
    """What mixes, and what routes."""
    of, form = case.dtype, case.router
    mixing = (mix_source(of, case.mix), (of, *mixed_types(case)), (of,))
    choosing = [F32] * case.corrected + [F32] * case.apart
    if case.apart_from_product:
        return [
            mixing,
            (choose_source(of, form), (of, *choosing, I32), (I32, F32, I32, I32)),
            (place_source(of, form), (I32, I32), (I32, I32)),
        ]
    optional = [of] * case.apart + [of] * case.bias + choosing
    outputs = (of, F32, I32, F32, I32, I32, I32)
    return [mixing, (route_source(of, form), (of, of, of, *optional, I32), outputs)]


def mixed_types(case: Case) -> list[mx.Dtype]:
    return [*([] if case.apart else [case.dtype]), I32, F32]


def product_entries(case: Case) -> list[tuple]:
    """Gates and ups, and the way down."""
    of = case.dtype
    weight = [of]
    if case.packing is not None:
        weight = [mx.uint32, mx.uint8] if case.packing.floats else [mx.uint32, of, of]
    weight += [of] if case.bias else []
    mixed = [I32, *mixed_types(case)] if case.down.mix else []
    return [
        (errand_source(of, case.gates), (of, I32, I32, *weight), (of,)),
        (errand_source(of, case.down), (of, I32, *weight, *mixed), [of] * len(case.down.outputs)),
    ]


class Problem:
    """Random weights, and what comes of them."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.rng = np.random.default_rng(seed)
        self.x, self.norm = self.draw(case.rows, case.width), self.draw(case.width)
        self.router = self.draw(case.router.logits, case.width, scale=case.width**-0.5)
        self.router_norm = self.draw(case.width) if case.apart else self.norm
        own = case.experts - case.shared
        self.scales = self.rng.uniform(0.2, 2.0, own * case.apart).astype(np.float32)
        self.correction = self.rng.normal(size=case.experts - case.shared).astype(np.float32)
        self.gate_up, self.gate_up_arrays = self.weight(2 * case.experts * case.inner, case.width)
        self.down, self.down_arrays = self.weight(case.experts * case.width, case.inner)
        sizes = (case.router.logits, 2 * case.experts * case.inner, case.experts * case.width)
        self.biases = [self.draw(size) if case.bias else np.zeros(size) for size in sizes]

    def bias(self, number: int) -> list[np.ndarray]:
        """Of the router, of gates and ups, or of the way down, if there are any."""
        return [bits(self.biases[number].astype(np.float32), self.case.dtype)][: self.case.bias]

    def draw(self, *size: int, scale: float = 1.0) -> np.ndarray:
        return rounded(self.rng.normal(size=size) * scale, self.case.dtype)

    def weight(self, outputs: int, inputs: int) -> tuple[np.ndarray, list[np.ndarray]]:
        weight = self.draw(outputs, inputs, scale=inputs**-0.5)
        if self.case.packing is None:
            return weight, [bits(weight, self.case.dtype)]
        weight, arrays = in_packs(weight, self.case.packing, self.case.dtype)
        return weight, list(arrays.values())

    @property
    def normed(self) -> np.ndarray:
        return self.normed_by(self.norm)

    def normed_by(self, weights: np.ndarray) -> np.ndarray:
        of = self.case.dtype
        by = 1 / np.sqrt((self.x**2).mean(1, keepdims=True) + EPSILON)
        return rounded(rounded(self.x * by, of) * weights, of)

    def logits(self, normed: np.ndarray) -> np.ndarray:
        if self.case.apart:
            normed = self.normed_by(self.router_norm)
        return rounded(normed @ self.router.T + self.biases[0], self.case.dtype)

    def competing(self, normed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the experts that are not shared: what each is chosen by, and what it is weighted by
        before that is normalised or scaled."""
        case = self.case
        logits = self.logits(normed)[:, : case.experts - case.shared]
        if case.scoring is ExpertScoring.SIGMOID:
            scores = sigmoid(logits)
            return scores + self.correction * case.corrected, scores
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return logits, weights / weights.sum(1, keepdims=True)

    def scores(self, chosen: np.ndarray, normed: np.ndarray) -> np.ndarray:
        case = self.case
        _, scores = self.competing(normed)
        own = np.take_along_axis(scores, chosen[:, : case.own], 1)
        if case.normalised:
            least = case.least if case.scoring is ExpertScoring.SIGMOID else 0.0
            own = own / (own.sum(1, keepdims=True) + least)
        if case.apart:
            own = own * self.scales[chosen[:, : case.own]]
        shared = np.ones((case.rows, case.shared))
        if case.gated and case.shared:
            shared = sigmoid(self.logits(normed)[:, -case.shared :])
        return np.concatenate([own * case.scale, shared], axis=1)

    def result(self, chosen: np.ndarray, scores: np.ndarray, normed: np.ndarray) -> np.ndarray:
        of = self.case
        gates, ups = self.gate_up.reshape(2, of.experts, of.inner, of.width)
        downs = self.down.reshape(of.experts, of.width, of.inner)
        of_gates, of_ups = self.biases[1].reshape(2, of.experts, of.inner)
        of_downs = self.biases[2].reshape(of.experts, of.width)
        out = self.x * (not of.apart)
        for row in range(of.rows):
            for expert, score in zip(chosen[row], scores[row], strict=True):
                gate = gates[expert] @ normed[row] + of_gates[expert]
                up = ups[expert] @ normed[row] + of_ups[expert]
                both = np.concatenate([gate, up])[None]
                inner = rounded(gated(both, of.activation)[0], of.dtype)
                out[row] += score * (downs[expert] @ inner + of_downs[expert])
        return out


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def unset(*shape: int, dtype) -> np.ndarray:
    return bits(np.full(shape, np.nan, np.float32), dtype)


def floats(array: np.ndarray, dtype) -> np.ndarray:
    return np.array(mx.array(array).view(dtype).astype(mx.float32))


def routed(problem: Problem, kernels: Kernels) -> list[np.ndarray]:
    case, of = problem.case, problem.case.dtype
    if case.apart_from_product:
        return chosen_alone(problem, kernels)
    pairs, done = case.rows * case.chosen, np.zeros(1 + case.router.groups(case.rows), np.int32)
    out = [
        unset(case.rows, case.width, dtype=of),
        np.full((case.rows, case.router.logits), np.nan, np.float32),
        np.full((case.rows, case.chosen), -1, np.int32),
        np.full((case.rows, case.chosen), np.nan, np.float32),
        np.full(pairs, -1, np.int32),
        np.full(pairs, -1, np.int32),
        np.full((case.router.most_errands(case.rows), 4), -1, np.int32),
    ]
    given = [bits(array, of) for array in (problem.x, problem.norm, problem.router)]
    given += [bits(problem.router_norm, of)] * case.apart + problem.bias(0)
    given += [problem.correction] * case.corrected + [problem.scales] * case.apart
    threads = case.router.threads
    grid = (case.router.blocks(case.rows) * threads, 1, 1)
    library, number = kernels.routing
    library.call(number + 1, [*given, done], out, grid, (threads, 1, 1))
    assert not done.any()
    return out


def chosen_alone(problem: Problem, kernels: Kernels) -> list[np.ndarray]:
    """As `routed`, behind a norm and a product that are not what is tested."""
    case, of = problem.case, problem.case.dtype
    blocks, pairs, done = -(-case.rows // 64), case.rows * case.chosen, np.zeros(1, np.int32)
    normed = problem.normed
    logits = bits(problem.logits(normed), of)
    out = [
        np.full((case.rows, case.chosen), -1, np.int32),
        np.full((case.rows, case.chosen), np.nan, np.float32),
        np.full((blocks + 1, case.experts), -1, np.int32),
        np.full((case.router.most_errands(case.rows), 4), -1, np.int32),
    ]
    placed = [np.full(pairs, -1, np.int32) for _ in range(2)]
    how = (blocks * case.router.threads, 1, 1), (case.router.threads, 1, 1)
    given = [problem.correction] * case.corrected + [problem.scales] * case.apart
    library, number = kernels.routing
    library.call(number + 1, [logits, *given, done], out, *how)
    assert not done.any()
    chosen, scores, counts, errands = out
    library.call(number + 2, [chosen, counts], placed, *how)
    return [bits(normed, of), logits, chosen, scores, *placed, errands]


@pytest.mark.parametrize("case", every_other(CASES), ids=lambda case: case.name)
def test_a_row_gets_the_experts_of_its_largest_scores(kernels, case):
    problem = Problem(case, seed=7)
    normed, _, chosen, scores, places, order, errands = routed(problem, kernels(case))
    np.testing.assert_allclose(floats(normed, case.dtype), problem.normed, rtol=1e-2, atol=1e-6)
    exact = floats(normed, case.dtype)
    own, (competing, _) = case.own, problem.competing(exact)
    kept = np.sort(np.take_along_axis(competing, chosen[:, :own], 1), 1)
    np.testing.assert_allclose(kept, np.sort(competing, 1)[:, -own:], rtol=1e-2, atol=1e-3)
    assert np.all(chosen[:, own:] == np.arange(case.experts - case.shared, case.experts))
    assert all(len(set(row)) == case.chosen for row in chosen)
    np.testing.assert_allclose(scores, problem.scores(chosen, exact), rtol=2e-2)
    # Each pair has a place of its own, among those of its expert.
    assert sorted(places) == list(range(case.rows * case.chosen))
    assert np.array_equal(order[places], np.repeat(np.arange(case.rows), case.chosen))
    experts = np.empty(places.size, int)
    experts[places] = chosen.ravel()
    assert np.count_nonzero(np.diff(experts)) == len(set(experts)) - 1
    there = errands[errands[:, 2] > 0]
    assert there[:, 2].max() <= case.held
    assert np.array_equal(np.repeat(there[:, 0], there[:, 2]), experts)
    firsts = np.concatenate([[0], np.cumsum(there[:, 2])])[:-1]
    assert np.array_equal(there[:, 1], firsts)
    assert np.all(errands[len(there) :, 2] == 0)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_a_load_sees_routes_that_are_wrong(kernels, case):
    problem = Problem(case, seed=5)
    normed, logits, *arrays = routed(problem, kernels(case))
    logits = floats(logits, case.dtype)
    correction = mx.array(problem.correction) if case.corrected else None
    how = {"shared": case.shared, "scoring": case.scoring, "correction": correction}
    of = replace(experts_of(case.experts), chosen=case.chosen, **how)

    def wrong(**changed: np.ndarray) -> str | None:
        names = ("chosen", "scores", "places", "order", "errands")
        made = [changed.get(name, own) for name, own in zip(names, arrays, strict=True)]
        return misrouted(of, [mx.array(each) for each in (normed, logits, *made)])

    chosen, _, places, order, errands = arrays
    assert wrong() is None
    other = chosen.copy()
    other[-1, 0] = next(e for e in range(case.experts) if e not in chosen[-1])
    assert wrong(chosen=other) == "others than the largest are chosen"
    assert (
        wrong(places=np.where(places == 1, 0, places)) == "pairs of rows and experts share places"
    )
    assert wrong(order=np.roll(order, 1)) == "pairs are in others' places"
    other = errands.copy()
    other[0, 2] -= 1
    assert wrong(errands=other) == "experts are given others' rows"


SIGMOIDS = [case for case in CASES if case.scoring is ExpertScoring.SIGMOID]


@pytest.mark.parametrize("case", SIGMOIDS, ids=lambda case: case.name)
def test_of_equal_scores_those_of_the_first_experts_are_chosen(kernels, case):
    problem = Problem(case, seed=3)
    problem.router[:] = 0
    problem.biases[0][:] = 0
    count = problem.correction.size
    # A quarter of the experts, which are not the first.
    problem.correction[:] = np.arange(count) % 4 == 3
    chosen = routed(problem, kernels(case))[2]
    by = problem.correction * case.corrected
    first = np.argsort(-by, kind="stable")[: case.own]
    assert np.array_equal(chosen[:, : case.own], np.tile(first, (case.rows, 1)))


@pytest.mark.parametrize("case", every_other(MULTIPLIED), ids=lambda case: case.name)
def test_what_experts_make_of_rows_is_the_reference(kernels, case):
    of, problem = case.dtype, Problem(case, seed=CASES.index(case))
    normed, _, chosen, scores, places, order, errands = routed(problem, kernels(case))
    library, number = kernels(case).products
    threads = (case.gates.form.threads, 1, 1)
    between = unset(order.size, case.inner, dtype=of)
    blocks = len(errands) * case.inner // (case.gates.form.outputs // 2)
    arrays = [normed, order, errands, *problem.gate_up_arrays, *problem.bias(1)]
    library.call(number, arrays, [between], (blocks * threads[0], 1, 1), threads)
    given, out = unset(order.size, case.width, dtype=of), unset(case.rows, case.width, dtype=of)
    parts = case.width // case.down.form.outputs
    arrays = [between, errands, *problem.down_arrays, *problem.bias(2)]
    results = [given]
    mixed = [*([] if case.apart else [bits(problem.x, of)]), places, scores]
    if case.down.mix:
        done = np.zeros(parts, np.int32)
        arrays += [done, *mixed]
        results.append(out)
    library.call(number + 1, arrays, results, (len(errands) * parts * threads[0], 1, 1), threads)
    if case.down.mix:
        assert not done.any()
    else:
        pieces = case.rows * case.width // 8
        library, number = kernels(case).routing
        library.call(number, [given, *mixed], [out], (pieces + -pieces % 256, 1, 1), (256, 1, 1))
    wanted = problem.result(chosen, scores, floats(normed, of))
    error = np.linalg.norm(floats(out, of) - wanted) / np.linalg.norm(wanted)
    assert error <= 1e-2


KINDS = {"affine-4": (64, 4, "affine"), "affine-8": (32, 8, "affine"), "mxfp4": (32, 4, "mxfp4")}


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("held", [8, 16, 32])
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("inputs", [704, 2048, 2880, 4096])
@pytest.mark.parametrize("device", [H200, RTX4090], ids=["H200", "RTX4090"])
def test_forms_of_errands_fit_the_multiprocessor(device, inputs, kind, held, few):
    weight = mx.zeros((128, inputs))
    if kind is not None:
        group, each, mode = KINDS[kind]
        weight = Packed(*mx.quantize(weight, group, each, mode=mode)[:2], None, group, each, mode)
    assert knows(weight)
    form = errand_form(weight, held, device, few=few)
    assert form.rows == held
    assert form.shared_memory <= device.block_memory
    assert 128 % form.outputs == 0


@pytest.mark.parametrize(
    "name",
    [
        "one-row",
        "corrected-shared-of-one-row",
        "apart",
        "packed",
        "floats-bias",
        "groups",
        "chosen-alone-by-blocks",
        *(
            pytest.param(name, marks=slow)
            for name in ("many-rows", "shared", "corrected-shared", "groups-of-two")
        ),
    ],
)
def test_nvidia_s_compiler_takes_experts(nvidia_accepts, name):
    (case,) = (case for case in EVERY if case.name == name)
    nvidia_accepts([*routing_entries(case), *product_entries(case)])


class Timed(ExpertKernels):
    """Kernels whose results and times are given: by warps, and by warpgroups."""

    def __init__(self, device, seconds, off=0.0) -> None:
        super().__init__(BF16, device)
        self.seconds, self.off, self.held = seconds, off, []

    def __call__(self, hidden, norm, experts, *, alone=False):
        self.held.append(self._router_form(experts, hidden.shape[0], norm.epsilon).held)
        made = mx.ones_like(hidden)
        return [hidden + made * (1 + self.off if self.held[-1] > 32 else 1)]

    def _seconds(self, hidden, norm, experts):
        return self.seconds[self.held[-1] > 32]


@pytest.mark.parametrize("rows", [1, 8, 200, 600])
@pytest.mark.parametrize("alone", [False, True])
def test_kernels_of_experts_are_given_what_their_sources_name(monkeypatch, rows, alone):
    given = {}

    def compiled(source):
        def launch(**how):
            given[source.name] = dict(zip(source.inputs, how["inputs"], strict=True))
            shapes = zip(how["output_shapes"], how["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return launch

    monkeypatch.setattr(launch, "CudaKernel", compiled)
    numbers = mx.ones(16)
    own = {"router_norm": mx.ones(256, BF16), "router_bias": numbers, "scales": numbers + 1}
    experts = replace(experts_of(), correction=numbers + 2, scoring=ExpertScoring.SIGMOID, **own)
    hidden, norm = mx.ones((rows, 256), BF16), RowNorm(mx.ones(256, BF16), EPSILON)
    launching = ExpertKernels(BF16, H200)
    launching._routes_many[launching._router_kind(experts)] = True
    made = launching(hidden, norm, experts, alone=alone)
    assert made[-1].shape == hidden.shape
    mix = given["mix_experts" if rows > 64 else "lower_experts"]
    if rows <= 512:
        assert given["route"]["router_norm"] is experts.router_norm
        assert given["route"]["bias"] is experts.router_bias
    choosing = given["route" if rows <= 512 else "choose_experts"]
    assert choosing["correction"] is experts.correction
    assert choosing["scales"] is experts.scales
    assert mix["places"] is made[4]
    assert mix["scores"] is made[3]
    assert mix.get("residual") is (None if alone else hidden)


def experts_of(count=16, width=256, inner=128, dtype=BF16) -> Experts:
    shapes = ((count, width), (2 * count * inner, width), (count * width, inner))
    return Experts(*(mx.zeros(shape, dtype) for shape in shapes), 2, True)


@pytest.mark.parametrize(
    ("device", "seconds", "off", "grouped"),
    [
        (H200, (3.0, 1.0), 0.0, True),
        (H200, (3.0, 1.0), 1e-3, True),
        (H200, (1.0, 3.0), 0.0, False),
        (H200, (3.0, 1.0), 0.1, False),
        (H200, (3.0, 1.0), float("nan"), False),
        (RTX4090, (3.0, 1.0), 0.0, False),
    ],
)
def test_prompts_experts_are_multiplied_by_what_is_sooner_and_right(device, seconds, off, grouped):
    kernels, experts = Timed(device, seconds, off), experts_of()
    kernels.compare(experts)
    assert kernels.held == ([32, 128] if device is H200 else [])
    # Once for all layers of that kind.
    kernels.compare(experts)
    assert len(kernels.held) <= 2
    of = {rows: kernels._router_form(experts, rows, EPSILON).held for rows in (8, 256, 264, 4096)}
    assert of == {8: 8, 256: 32, 264: 64 if grouped else 32, 4096: 128 if grouped else 32}


def test_warps_go_on_where_a_kernel_of_groups_cannot_be_launched(monkeypatch, caplog):
    kernels, experts = Timed(H200, (3.0, 1.0)), experts_of()
    call = Timed.__call__

    def failing(self, *args):
        made = call(self, *args)
        if self.held[-1] > 32:
            raise RuntimeError("too many resources requested for launch")
        return made

    monkeypatch.setattr(Timed, "__call__", failing)
    kernels.compare(experts)
    assert kernels._router_form(experts, 4096, EPSILON).held == 32
    assert "too many resources" in caplog.text


def test_routes_are_tried_once_whatever_multiplies_the_rows():
    # Many rows of each expert, so that groups are given more of them at once.
    kernels, experts = ExpertKernels(BF16, H200), experts_of(count=4)
    kind = kernels._router_kind(experts)
    kernels._grouped[_kind(experts)] = True
    assert kernels._router_form(experts, 512, 0.0).held > 32
    assert kernels._router_kind(experts) == kind


@pytest.mark.parametrize("changes", [{"inner": 96}, {"width": 320}])
def test_experts_that_groups_can_t_share_are_not_compared(changes):
    kernels = Timed(H200, (3.0, 1.0))
    kernels.compare(experts_of(**changes))
    assert not kernels.held


@pytest.mark.parametrize("outputs", [64, 128, 768, 1536, 2048, 2880, 4096])
@pytest.mark.parametrize("held", [64, 128])
@pytest.mark.parametrize("down", [False, True])
def test_group_forms_of_errands_fit_the_multiprocessor(outputs, held, down):
    form = group_errand_form(outputs, held, down=down)
    each = form.outputs if down else form.outputs // 2
    assert outputs % each == 0 or (down and outputs % 128)
    assert form.shared_memory <= H200.block_memory
    assert form.held == held

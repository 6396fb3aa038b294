"""Four products in one launch against plain arithmetic, on an emulated GPU."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.matmul.devices import H200
from devices.cuda.matmul.halves import bits, gated, in_packs, rounded
from thorough import slow

from mlx_manager.mlx_server.devices.cuda.compiler import launch
from mlx_manager.mlx_server.devices.cuda.matmul.chain import (
    PRODUCTS,
    ChainForm,
    ChainVariant,
    chain_source,
)
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Activation, Link, Packed, RowNorm
from mlx_manager.mlx_server.devices.cuda.matmul.forms import Packing, RowForm, WarpForm
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels

BF16, F16 = mx.bfloat16, mx.float16
WIDTH, ATTENDED, INNER, HEADS = 256, 128, 384, 512
FOUR, EIGHT = Packing(4, 64, 128), Packing(8, 64, 128)
SIZES = [(WIDTH, ATTENDED), (2 * INNER, WIDTH), (WIDTH, INNER), (HEADS, WIDTH)]
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    form: ChainForm
    biased: bool = False
    count: int = 4
    dtype: mx.Dtype = BF16
    activation: Activation = Activation.SILU

    @property
    def kind(self) -> tuple:
        """Of those whose sources are the same."""
        return type(self.form.any), self.form.any.packing is None

    @property
    def variant(self) -> ChainVariant:
        count = self.count
        epsilons = (EPSILON,) * (count // 2)
        biases = (self.biased,) * count
        return ChainVariant(self.form, tuple(SIZES[:count]), biases, epsilons, self.activation)


def alike(form: WarpForm, count: int = 4) -> ChainForm:
    return ChainForm((form,) * count)


def row_forms(splits: tuple[int, ...], packing: Packing) -> ChainForm:
    return ChainForm(
        tuple(
            RowForm(split, 8, 2, packing, size) for split, size in zip(splits, SIZES, strict=False)
        )
    )


CASES = [
    Case("one-row", 1, alike(WarpForm(1, 8, 4, 3))),
    Case("several-tiles", 5, alike(WarpForm(2, 8, 4, 2))),
    Case("last-layer", 3, alike(WarpForm(1, 8, 4, 3), 3), count=3),
    Case("biases", 13, alike(WarpForm(2, 16, 2, 4)), biased=True, dtype=F16),
    Case("more-warps-than-columns", 8, alike(WarpForm(1, 8, 8, 3))),
    Case("gelu", 2, alike(WarpForm(1, 8, 4, 3)), activation=Activation.GELU),
    Case("packed", 3, alike(WarpForm(2, 8, 4, 3, FOUR))),
    Case(
        "packed-last-layer",
        8,
        alike(WarpForm(2, 8, 4, 3, FOUR), 3),
        biased=True,
        count=3,
        dtype=F16,
    ),
    Case("packed-one-row", 1, row_forms((4, 1, 8, 2), Packing(4, 64, 128))),
    Case("packed-8-bits", 1, alike(WarpForm(1, 8, 2, 2, EIGHT)), biased=True),
]


def normed(x, weight):
    return x / np.sqrt((x**2).mean(1, keepdims=True) + EPSILON) * weight


def entry(case):
    source = chain_source(case.dtype, case.variant)
    of = dict.fromkeys(source.inputs, case.dtype) | {"made": mx.int32}
    if case.form.any.packing is not None:
        of |= {f"{name}_weight": mx.uint32 for name in PRODUCTS}
    return source, tuple(of[name] for name in source.inputs), (case.dtype,) * len(source.outputs)


@pytest.fixture(scope="module")
def libraries(compile_cuda):
    """For each kind of source, with its cases."""
    kinds = {case.kind: [each for each in CASES if each.kind == case.kind] for case in CASES}
    return [(own, compile_cuda([entry(case) for case in own])) for own in kinds.values()]


@pytest.mark.parametrize(
    "name",
    [
        "one-row",
        "packed-last-layer",
        "packed-one-row",
        *(pytest.param(name, marks=slow) for name in ("last-layer", "packed", "packed-8-bits")),
    ],
)
def test_nvidia_s_compiler_takes_chains(nvidia_accepts, name):
    nvidia_accepts([entry(case) for case in CASES if case.name == name])


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_chain_is_the_reference_and_leaves_its_counters_at_zero(libraries, case):
    cases, library = next(each for each in libraries if case in each[0])
    rng = np.random.default_rng(case.rows)
    dtype, packing = case.dtype, case.form.any.packing

    def draw(*size, scale=1.0):
        return rounded(rng.normal(size=size) * scale, dtype)

    attended, residual = draw(case.rows, ATTENDED), draw(case.rows, WIDTH)
    sizes = SIZES
    weights = [draw(*size, scale=size[1] ** -0.5) for size in sizes]
    stored = [{"weight": bits(weight, dtype)} for weight in weights]
    if packing is not None:
        weights, stored = zip(*(in_packs(each, packing, dtype) for each in weights), strict=True)
    biases = [draw(size[0]) * case.biased for size in sizes]
    norms = [draw(size[1]) for size in sizes]

    hidden = residual + attended @ weights[0].T + biases[0]
    inner = gated(normed(hidden, norms[1]) @ weights[1].T + biases[1], case.activation)
    result = hidden + inner @ weights[2].T + biases[2]
    # One array has all rows of the first product, and then all of the second.
    between = np.concatenate([hidden, inner], axis=None)
    wanted = [between, result, normed(result, norms[3]) @ weights[3].T + biases[3]]

    outs = [bits(np.full_like(a, np.nan, np.float32), dtype) for a in wanted[: case.count - 1]]
    counters = np.zeros(4, np.int32)
    given = {"attended": bits(attended, dtype), "residual": bits(residual, dtype), "made": counters}
    for name, *own in zip(PRODUCTS, stored, biases, norms, strict=True):
        given |= {f"{name}_{part}": array for part, array in own[0].items()}
        given |= {f"{name}_bias": bits(own[1], dtype), f"{name}_norm": bits(own[2], dtype)}
    blocks = case.form.blocks([size[0] for size in sizes[: case.count]])
    threads = case.form.any.threads
    names = chain_source(dtype, case.variant).inputs
    arrays = [given[name] for name in names]
    library.call(cases.index(case), arrays, outs, (blocks * threads, 1, 1), (threads, 1, 1))
    for out, expected in zip(outs, wanted, strict=False):
        got = np.array(mx.array(out).view(dtype).astype(mx.float32))
        assert np.linalg.norm(got - expected) <= 2e-2 * np.linalg.norm(expected)
    assert not counters.any()


def test_weights_that_are_stored_in_different_ways_make_no_chain():
    plain = Link(mx.zeros((WIDTH, 256)))
    groups = mx.zeros((WIDTH, 4))
    packed = Link(Packed(mx.zeros((WIDTH, 32)), groups, groups, 64, 4))
    packings = {variant.form.any.packing for variant in ChainVariant.all_of([packed] * 3, H200)}
    assert packings == {Packing(4, 64, 256)}
    assert ChainVariant.all_of([plain, packed, plain], H200) == []


def test_chains_alike_share_a_kernel_and_hand_it_what_its_source_names(monkeypatch):
    made, given = [], []

    def compiled(source):
        made.append(source)
        return lambda **options: given.append(options)

    monkeypatch.setattr(launch, "CudaKernel", compiled)
    norms = [RowNorm(mx.ones((WIDTH,)), EPSILON) for _ in range(2)]
    output, gate_up = (
        Link(mx.zeros((WIDTH, ATTENDED))),
        Link(mx.zeros((768, WIDTH)), None, norms[0]),
    )
    down = Link(mx.zeros((WIDTH, INNER)))
    qkv = Link(mx.zeros((HEADS, WIDTH)), mx.zeros((HEADS,)), norms[1])
    kernels = ProductKernels(BF16, H200)
    links = [output, gate_up, down, qkv]
    attended, residual = mx.zeros((3, ATTENDED), BF16), mx.zeros((3, WIDTH), BF16)
    for chain in (kernels.chain(links), kernels.chain(links), kernels.chain(links[:3])):
        chain(attended, residual)
    made = [source for source in made if source.name == "chain"]
    assert len(made) == 2
    named = dict(zip(made[0].inputs, given[1]["inputs"], strict=True))
    assert named["attended"] is attended
    assert named["residual"] is residual
    assert named["gate_up_weight"] is gate_up.weight
    assert named["gate_up_norm"] is norms[0].weight
    assert named["qkv_bias"] is qkv.bias
    assert named["qkv_norm"] is norms[1].weight
    assert given[1]["output_shapes"] == [(3, WIDTH + INNER), (3, WIDTH), (3, HEADS)]
    threads = given[1]["threadgroup"][0]
    assert given[1]["grid"][0] == (2 * WIDTH + 768 + HEADS) // 16 * threads
    assert len(given[2]["inputs"]) == len(made[1].inputs)
    assert given[2]["output_shapes"] == [(3, WIDTH + INNER), (3, WIDTH)]

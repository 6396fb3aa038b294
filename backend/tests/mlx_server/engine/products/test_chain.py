"""Four products in one launch against plain arithmetic, on an emulated GPU."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from engine.products.halves import bits, rounded

from mlx_manager.mlx_server.engine import products
from mlx_manager.mlx_server.engine.kernels.cuda import CudaDevice
from mlx_manager.mlx_server.engine.products import ProductKernels
from mlx_manager.mlx_server.engine.products.chain import ChainVariant, chain_source
from mlx_manager.mlx_server.engine.products.factors import Link, Norm
from mlx_manager.mlx_server.engine.products.forms import WarpForm

BF16, F16 = mx.bfloat16, mx.float16
WIDTH, ATTENDED, INNER, HEADS = 256, 128, 384, 512
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    form: WarpForm
    biased: bool = False
    count: int = 4
    dtype: mx.Dtype = BF16

    @property
    def variant(self) -> ChainVariant:
        return ChainVariant(self.form, (self.biased,) * self.count, (EPSILON,) * (self.count // 2))


CASES = [
    Case("one-row", 1, WarpForm(1, 1, 4, 3)),
    Case("several-tiles", 5, WarpForm(2, 1, 4, 2)),
    Case("last-layer", 3, WarpForm(1, 1, 4, 3), count=3),
    Case("biases", 13, WarpForm(2, 2, 2, 4), biased=True, dtype=F16),
    Case("more-warps-than-columns", 8, WarpForm(1, 1, 8, 3)),
]


def normed(x, weight):
    return x / np.sqrt((x**2).mean(1, keepdims=True) + EPSILON) * weight


def entry(case):
    source = chain_source(case.dtype, case.variant)
    inputs = (*(case.dtype,) * (len(source.inputs) - 1), mx.int32)
    return source, inputs, (case.dtype,) * len(source.outputs)


@pytest.fixture(scope="module")
def library(compile_cuda):
    return compile_cuda([entry(case) for case in CASES])


def test_nvidia_s_compiler_takes_chains(nvidia_accepts):
    nvidia_accepts([entry(CASES[0]), entry(CASES[2])])


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_chain_is_the_reference_and_leaves_its_counters_at_zero(library, index):
    case = CASES[index]
    rng = np.random.default_rng(index)
    dtype = case.dtype

    def draw(*size, scale=1.0):
        return rounded(rng.normal(size=size) * scale, dtype)

    attended, residual = draw(case.rows, ATTENDED), draw(case.rows, WIDTH)
    sizes = [(WIDTH, ATTENDED), (2 * INNER, WIDTH), (WIDTH, INNER), (HEADS, WIDTH)]
    weights = [draw(*size, scale=size[1] ** -0.5) for size in sizes]
    biases = [draw(size[0]) * case.biased for size in sizes]
    norms = [draw(size[1]) for size in sizes]

    hidden = residual + attended @ weights[0].T + biases[0]
    gate, up = np.split(normed(hidden, norms[1]) @ weights[1].T + biases[1], 2, axis=1)
    gated = gate / (1 + np.exp(-gate)) * up
    result = hidden + gated @ weights[2].T + biases[2]
    wanted = [hidden, gated, result, normed(result, norms[3]) @ weights[3].T + biases[3]]

    outs = [bits(np.full_like(a, np.nan, np.float32), dtype) for a in wanted[: case.count]]
    parts = zip(weights, biases, norms, strict=True)
    arrays = [bits(a, dtype) for own in list(parts)[: case.count] for a in own]
    counters = np.zeros(4, np.int32)
    blocks = sum(size[0] // case.form.outputs for size in sizes[: case.count])
    threads = case.form.threads
    given = [bits(attended, dtype), bits(residual, dtype), *arrays, counters]
    library.call(index, given, outs, (blocks * threads, 1, 1), (threads, 1, 1))
    for out, expected in zip(outs, wanted, strict=False):
        got = np.array(mx.array(out).view(dtype).astype(mx.float32))
        assert np.linalg.norm(got - expected) <= 2e-2 * np.linalg.norm(expected)
    assert not counters.any()


def test_chains_alike_share_a_kernel_and_hand_it_what_its_source_names(monkeypatch):
    made, given = [], []

    def compiled(source):
        made.append(source)
        return lambda **options: given.append(options)

    monkeypatch.setattr(products, "compiled_for_cuda", compiled)
    norms = [Norm(mx.ones((WIDTH,)), EPSILON) for _ in range(2)]
    output, gate_up = (
        Link(mx.zeros((WIDTH, ATTENDED))),
        Link(mx.zeros((768, WIDTH)), None, norms[0]),
    )
    down = Link(mx.zeros((WIDTH, INNER)))
    qkv = Link(mx.zeros((HEADS, WIDTH)), mx.zeros((HEADS,)), norms[1])
    kernels = ProductKernels(BF16, CudaDevice(132, 227 * 1024, 228 * 1024))
    links = [output, gate_up, down, qkv]
    attended, residual = mx.zeros((3, ATTENDED), BF16), mx.zeros((3, WIDTH), BF16)
    for chain in (kernels.chain(links), kernels.chain(links), kernels.chain(links[:3])):
        chain(attended, residual)
    made = [source for source in made if source.name == "chain"]
    assert len(made) == 2
    named = dict(zip(made[0].inputs, given[1]["inputs"], strict=True))
    assert named["attended"] is attended
    assert named["residual"] is residual
    assert named["gate_up"] is gate_up.weight
    assert named["gate_up_norm"] is norms[0].weight
    assert named["qkv_bias"] is qkv.bias
    assert named["qkv_norm"] is norms[1].weight
    assert given[1]["output_shapes"] == [(3, WIDTH), (3, INNER), (3, WIDTH), (3, HEADS)]
    threads = given[1]["threadgroup"][0]
    assert given[1]["grid"][0] == (2 * WIDTH + 768 + HEADS) // 16 * threads
    assert len(given[2]["inputs"]) == len(made[1].inputs)
    assert given[2]["output_shapes"] == [(3, WIDTH), (3, INNER), (3, WIDTH)]

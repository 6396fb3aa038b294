"""Norms and sums behind products: the CUDA source against plain arithmetic, on an emulated GPU."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.matmul.halves import bits, rounded

from mlx_manager.mlx_server.devices.cuda.compiler import launch
from mlx_manager.mlx_server.devices.cuda.matmul.factors import RowNorm
from mlx_manager.mlx_server.devices.cuda.matmul.sums import SumForm, SumKernels, Two, sum_source

BF16, F16 = mx.bfloat16, mx.float16
EPSILON, FOLLOWING = 1e-6, 1e-3


@dataclass(frozen=True)
class Case:
    width: int
    rows: int = 3
    followed: bool = True
    dtype: mx.Dtype = BF16
    scaled: bool = False
    two: bool = False

    @property
    def form(self) -> SumForm:
        following = FOLLOWING if self.followed else None
        return SumForm.of(self.width, EPSILON, following, scaled=self.scaled, two=self.two)


# The widths of Gemma 3, one that leaves most of a warp without work, and a wide one; two results,
# as in Gemma 4 26B A4B.
CASES = [
    *(Case(width) for width in (640, 1152, 2560, 3840, 5376)),
    Case(8, rows=1),
    Case(16384, rows=2, dtype=F16),
    Case(1152, rows=1, followed=False, dtype=F16),
    Case(5376, followed=False, scaled=True),
    Case(1536, scaled=True),
    Case(2816, scaled=True, two=True),
    Case(12384, rows=2, followed=False, dtype=F16, two=True),
]


def entry(case):
    source = sum_source(case.dtype, case.form)
    return source, (case.dtype,) * len(source.inputs), (case.dtype,) * len(source.outputs)


@pytest.fixture(scope="module")
def library(compile_cuda):
    return compile_cuda([entry(case) for case in CASES])


def normed(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(1, keepdims=True) + epsilon) * weight


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(str, CASES))
def test_sums_of_normed_rows_are_the_reference(library, index):
    case = CASES[index]
    rng = np.random.default_rng(index)
    size = (case.rows, case.width)
    # Rows of sizes that differ: with small ones the epsilons count.
    scales = 10.0 ** np.arange(-3, case.rows - 3)[:, None]
    draws = [rounded(rng.normal(size=size) * scales, case.dtype) for _ in range(3)]
    residual, x, other = draws
    norms = [rounded(rng.normal(size=case.width), case.dtype) for _ in range(4)]
    norm, following, *of_two = norms
    times = np.array([0.37 if case.scaled else 1.0], np.float32)
    others = [other, *of_two] if case.two else []
    given = [bits(each, case.dtype) for each in (residual, x, *others, norm)]
    given += [bits(following, case.dtype)] if case.followed else []
    given += [bits(times, case.dtype)] if case.scaled else []
    outs = [bits(np.full(size, np.nan, np.float32), case.dtype) for _ in range(2)]
    count, threads = 2 if case.followed else 1, case.form.threads
    grid = (case.rows * threads, 1, 1)
    library.call(index, given, outs[:count], grid, (threads, 1, 1))
    out, ahead = (np.array(mx.array(each).view(case.dtype).astype(mx.float32)) for each in outs)
    if case.two:
        x = normed(x, of_two[0], EPSILON) + normed(other, of_two[1], EPSILON)
    wanted = (residual + normed(x, norm, EPSILON)) * times
    np.testing.assert_allclose(out, wanted, rtol=1e-2, atol=1e-2)
    if case.followed:
        wanted = normed(out, following, FOLLOWING)
        np.testing.assert_allclose(ahead, wanted, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("index", [0, 4, 7, 9, 10, 11])
def test_nvidia_s_compiler_takes_sums(nvidia_accepts, index):
    nvidia_accepts([entry(CASES[index])])


@pytest.mark.parametrize("width", [8, 640, 1152, 2560, 3840, 4096, 5376, 16384])
def test_a_block_has_the_whole_row_and_no_more_threads_than_it_may(width):
    form = SumForm.of(width, EPSILON, None)
    assert SumKernels.serves(width)
    assert (form.warps - 1) * 32 * 8 * form.pieces < width <= form.threads * 8 * form.pieces
    assert form.threads <= 512


def test_rows_of_odd_or_great_widths_are_not_served():
    assert not SumKernels.serves(644)
    assert not SumKernels.serves(16392)


def test_a_kernel_is_compiled_once_and_given_what_its_source_names(monkeypatch):
    made, given = [], []

    def compiled(source):
        made.append(source)
        return lambda **options: given.append(options) or options["output_shapes"]

    monkeypatch.setattr(launch, "CudaKernel", compiled)
    kernels = SumKernels(BF16)
    rows, norm, following = (
        mx.zeros((5, 640)),
        RowNorm(mx.ones(640), 1e-6),
        RowNorm(mx.zeros(640), 1e-5),
    )
    assert kernels(rows, rows, norm, following) == kernels(rows, rows, norm, following)
    assert kernels(rows, rows, norm, None) == [(5, 640)]
    assert kernels(rows, rows, norm, None, mx.zeros(1)) == [(5, 640)]
    two = Two(rows, rows + 1, mx.ones(640), mx.zeros(640))
    assert kernels(rows, two, norm, None) == [(5, 640)]
    assert [source.inputs for source in made] == [
        ("residual", "x", "norm", "following"),
        ("residual", "x", "norm"),
        ("residual", "x", "norm", "times"),
        ("residual", "x", "other", "norm_of_first", "norm_of_other", "norm"),
    ]
    assert given[-1]["inputs"] == [rows, *two.arrays, norm.weight]
    assert given[0]["inputs"][2] is norm.weight
    assert given[0]["inputs"][3] is following.weight
    assert given[0]["grid"] == (5 * given[0]["threadgroup"][0], 1, 1)

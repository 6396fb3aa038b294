"""The warpgroup matrix instructions by themselves: their emulation against plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from devices.attention.test_kernels import BF16, F16, F32, stored

from mlx_manager.mlx_server.devices.cuda.compiler import hopper
from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, TYPES
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaSource

ROWS, TOKENS = 64, 32
# The scores of 64 queries and 32 tokens, K 64, and of the tokens' values as many sums as WIDTH; in
# shared memory a tile of queries, one of keys, and the values, 64 columns to a tile.
BODY = """
using namespace kernels;
constexpr int WIDTH = {width}, COUNT = 16;
unsigned char* queries = tiles_in_shared_memory();
unsigned char *keys = queries + 64 * 128, *values = keys + 32 * 128;
const {type}* type = nullptr;
const int thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
for (int p = thread; p < 64 * 8; p += 128)
  copy_async(queries + swizzled(p / 8, p % 8), q + p * 8, 16);
for (int p = thread; p < 32 * 8; p += 128)
  copy_async(keys + swizzled(p / 8, p % 8), k + p * 8, 16);
for (int p = thread; p < 32 * WIDTH / 8; p += 128) {{
  const int token = p / (WIDTH / 8), piece = p % (WIDTH / 8);
  copy_async(values + piece / 8 * 32 * 128 + swizzled(token, piece % 8), v + p * 8, 16);
}}
commit_copies();
wait_copies<0>();
{show}
__syncthreads();
float s[COUNT], o[WIDTH / 2];
begin_products();
for (int step = 0; step < 4; step++)
  multiply_group(s, describe_tile(queries + step * 32), describe_tile(keys + step * 32), step > 0,
                 type);
commit_products();
{wait}
settle(s);
for (int i = 0; i < COUNT; i++)
  scores[(row + i % 4 / 2 * 8) * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2] = s[i];
begin_products();
for (int step = 0; step < 2; step++) {{
  const unsigned a[4] = {{pack(s[step * 8], s[step * 8 + 1], type),
                         pack(s[step * 8 + 2], s[step * 8 + 3], type),
                         pack(s[step * 8 + 4], s[step * 8 + 5], type),
                         pack(s[step * 8 + 6], s[step * 8 + 7], type)}};
  multiply_group_across(o, a, describe_tile(values + step * 2048, 32 * 128), step > 0, type);
}}
commit_products();
{after}
wait_products<0>();
settle(o);
for (int i = 0; i < WIDTH / 2; i++)
  sums[(row + i % 4 / 2 * 8) * WIDTH + i / 4 * 8 + lane % 4 * 2 + i % 2] = o[i];
"""
SOUND = {"show": "show_to_products();", "wait": "wait_products<0>();", "after": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements(CudaSource):
    """A kernel whose text is no call."""

    text: str

    @property
    def body(self) -> str:
        return self.text


def scores_and_sums(dtype: mx.Dtype, width: int, parts: dict[str, str]) -> CudaSource:
    products = [hopper.GroupProduct(TOKENS), hopper.GroupProduct(width, True, across=True)]
    return Statements(
        name="micro",
        files=(DEVICE_SOURCE, hopper.instructions(products), hopper.HOPPER_SOURCE),
        function="",
        arguments=(),
        text=BODY.format(type=TYPES[dtype], width=width, **parts),
        inputs=("q", "k", "v"),
        outputs=("scores", "sums"),
        shared_memory=1024 + (64 + 32 + 2 * 32) * 128,
    )


def entry(dtype: mx.Dtype, width: int, parts: dict[str, str]):
    return scores_and_sums(dtype, width, SOUND | parts), (dtype,) * 3, (F32, F32)


def run(library, number: int, dtype: mx.Dtype, width: int):
    """What the kernel made of small whole numbers, and what it should have."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.integers(-2, 3, size=shape).astype(np.float32)
        for shape in ((ROWS, 64), (TOKENS, 64), (TOKENS, width))
    )
    scores, sums = np.zeros((ROWS, TOKENS), np.float32), np.zeros((ROWS, width), np.float32)
    given = [stored(x, dtype) for x in (q, k, v)]
    library.call(number, given, [scores, sums], (128, 1, 1), (128, 1, 1))
    return (scores, sums), (q @ k.T, q @ k.T @ v)


@pytest.mark.parametrize(("dtype", "width"), [(BF16, 128), (F16, 80)])
def test_products_of_tiles_and_of_registers_are_exact(compile_cuda, dtype, width):
    found, expected = run(compile_cuda([entry(dtype, width, {})]), 0, dtype, width)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


SLIPS = {
    "copies not shown": {"show": ""},
    "results not waited for": {"wait": ""},
    "a tile changed too early": {"after": "if (thread == 0) values[0] = ~values[0];"},
}


@pytest.fixture(scope="module")
def careless(compile_cuda):
    return compile_cuda([entry(BF16, 64, parts) for parts in SLIPS.values()])


@pytest.mark.parametrize("slip", SLIPS)
def test_a_careless_kernel_shows(careless, slip):
    (_, sums), _ = run(careless, list(SLIPS).index(slip), BF16, 64)
    assert np.isnan(sums).any()

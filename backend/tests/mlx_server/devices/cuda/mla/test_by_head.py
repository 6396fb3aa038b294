"""Products with a matrix of each head: the CUDA source against plain arithmetic, on an emulated
GPU."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.matmul.devices import H200, RTX4090
from devices.cuda.matmul.halves import bits, in_packs, rounded

from mlx_manager.mlx_server.devices.cuda.matmul.factors import Packed
from mlx_manager.mlx_server.devices.cuda.matmul.forms import Packing, WarpForm
from mlx_manager.mlx_server.devices.cuda.mla.by_head import (
    HeadKernels,
    HeadVariant,
    head_form,
    head_source,
)

BF16, F16 = mx.bfloat16, mx.float16


@dataclass(frozen=True)
class Case:
    name: str
    form: WarpForm
    rows: int
    rows_first: bool
    heads: int = 3
    inputs: int = 192
    outputs: int = 128
    # Numbers of a head that are not multiplied.
    beside: int = 64
    dtype: mx.Dtype = BF16

    @property
    def variant(self) -> HeadVariant:
        return HeadVariant(self.form, self.heads, self.rows_first)


CASES = [
    Case("one", WarpForm(2, 8, 4, 4), 1, rows_first=True),
    Case("few", WarpForm(1, 8, 2, 3), 7, rows_first=True, beside=8),
    Case("many", WarpForm(4, 32, 4, 2), 29, rows_first=True),
    Case("turns", WarpForm(2, 8, 4, 2), 19, rows_first=True, dtype=F16),
    Case("one-back", WarpForm(2, 8, 8, 4), 1, rows_first=False, inputs=512),
    Case("few-back", WarpForm(1, 8, 4, 3), 6, rows_first=False, inputs=512, outputs=64),
    Case("many-back", WarpForm(4, 32, 8, 2), 32, rows_first=False, inputs=512, dtype=F16),
    Case("turns-back", WarpForm(2, 16, 4, 3), 37, rows_first=False),
    Case("packed", WarpForm(2, 8, 2, 3, Packing(4, 64, 64)), 5, rows_first=True),
    Case("packed-back", WarpForm(4, 16, 4, 2, Packing(4, 64, 256)), 9, False, inputs=512),
]


def entry(case):
    source = head_source(case.dtype, case.variant)
    packed = case.form.packing is not None
    of = {"weight": mx.uint32} if packed else {}
    return source, tuple(of.get(name, case.dtype) for name in source.inputs), (case.dtype,)


@pytest.fixture(scope="module")
def libraries(compile_cuda):
    """One for each header, with the cases that are in it."""
    found = {}
    for packed in (False, True):
        own = [i for i, case in enumerate(CASES) if (case.form.packing is not None) == packed]
        found[packed] = (compile_cuda([entry(CASES[i]) for i in own]), own)
    return found


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_heads_meet_their_own_matrices(libraries, index):
    case = CASES[index]
    packing = case.form.packing
    library, own = libraries[packing is not None]
    rng = np.random.default_rng(index)
    each = case.inputs + (case.beside if case.rows_first else 0)
    x = rounded(rng.normal(size=(case.rows, case.heads, each)), case.dtype)
    size = (case.heads * case.outputs, case.inputs)
    weight = rounded(rng.normal(size=size) * case.inputs**-0.5, case.dtype)
    arrays = {"weight": bits(weight, case.dtype)}
    if packing is not None:
        weight, arrays = in_packs(weight, packing, case.dtype)
    matrices = weight.reshape(case.heads, case.outputs, case.inputs)
    wanted = np.einsum("rhi,hoi->hro", x[..., : case.inputs], matrices)
    wanted = wanted if case.rows_first else wanted.swapaxes(0, 1)
    given = x if case.rows_first else np.ascontiguousarray(x.swapaxes(0, 1))
    arrays["x"] = bits(given, case.dtype)
    if case.rows_first:
        arrays["x"] = arrays["x"].reshape(case.rows, -1)
    shape = wanted.shape if case.rows_first else (case.rows, case.heads * case.outputs)
    out = bits(np.full(shape, np.nan, np.float32), case.dtype)
    blocks = size[0] // case.form.outputs * -(-case.rows // case.form.held)
    threads = case.form.threads
    names = head_source(case.dtype, case.variant).inputs
    grid = (blocks * threads, 1, 1)
    library.call(own.index(index), [arrays[n] for n in names], [out], grid, (threads, 1, 1))
    got = np.array(mx.array(out).view(case.dtype).astype(mx.float32)).reshape(wanted.shape)
    assert np.linalg.norm(got - wanted) <= 1e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("index", [0, 2, 6, 8])
def test_nvidia_s_compiler_takes_heads_products(nvidia_accepts, index):
    nvidia_accepts([entry(CASES[index])])


# GLM 4.7 Flash, DeepSeek V3 and what Kimi has.
@pytest.mark.parametrize(
    ("heads", "outputs", "inputs"),
    [(20, 512, 192), (20, 256, 512), (128, 512, 128), (128, 128, 512), (64, 512, 128)],
)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("device", [H200, RTX4090], ids=["H200", "RTX4090"])
def test_chosen_forms_have_whole_tiles_of_each_head(heads, outputs, inputs, rows, packed, device):
    weight = mx.zeros((heads * outputs, inputs), BF16)
    if packed:
        weight = Packed(*mx.quantize(weight, 64, 4), 64, 4)
    assert HeadKernels.serves(weight, heads)
    form = head_form(weight, heads, rows, device)
    assert outputs % form.outputs == 0
    assert form.shared_memory <= device.block_memory
    # No warp is without a stage of its own, but for what makes them a power of two.
    width = 64 if form.packing is None else form.packing.width
    assert form.warps < 2 * inputs // width or form.warps == 1


def test_outputs_that_are_no_whole_tiles_are_not_served():
    assert not HeadKernels.serves(mx.zeros((3 * 96, 64), BF16), 3)
    assert not HeadKernels.serves(mx.zeros((3 * 128, 96), BF16), 3)

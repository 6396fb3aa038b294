"""The products' CUDA source against plain arithmetic, on an emulated GPU."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.matmul.devices import H200, RTX4090
from devices.cuda.matmul.halves import bits, gated, in_packs, rounded
from mlx import nn
from thorough import every_other, slow

from mlx_manager.mlx_server.devices.cuda.matmul import products
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Activation, Packed
from mlx_manager.mlx_server.devices.cuda.matmul.forms import (
    Form,
    GroupForm,
    Packing,
    RowForm,
    WarpForm,
)
from mlx_manager.mlx_server.devices.cuda.matmul.products import (
    MatmulVariant,
    ProductKernels,
    gated_form,
)

BF16, F16 = mx.bfloat16, mx.float16
GELU = Activation.GELU
NAMES = (
    *("x", "norm", "squares", "weight", "scales", "biases", "bias", "residual", "next_norm"),
    *("out", "scaled_out", "squares_out"),
)


@dataclass(frozen=True)
class Case:
    name: str
    form: Form
    rows: int
    inputs: int = 256
    outputs: int = 128
    gated: bool = False
    norm: bool = False
    # Blocks that have made the rows and did the norm's part, if they did.
    makers: int = 0
    bias: bool = False
    residual: bool = False
    ahead: bool = False
    dtype: mx.Dtype = BF16
    activation: Activation = Activation.SILU

    @property
    def packing(self) -> Packing | None:
        return None if isinstance(self.form, GroupForm) else self.form.packing

    @property
    def kind(self) -> tuple:
        """Of those whose sources are the same."""
        return type(self.form), self.packing is not None

    @property
    def variant(self) -> MatmulVariant:
        epsilon = 1e-5 if self.norm else None
        return MatmulVariant(
            self.form,
            self.activation if self.gated else None,
            epsilon,
            self.makers,
            self.bias,
            self.residual,
            self.ahead,
        )


FOUR, EIGHT = Packing(4, 64, 256), Packing(8, 64, 128)
PACKED_CASES = [
    Case("packed", WarpForm(2, 8, 4, 3, FOUR), 1, inputs=512),
    Case("packed-norm", WarpForm(4, 8, 4, 2, FOUR), 3, inputs=768, norm=True, bias=True),
    Case("packed-f16", WarpForm(1, 16, 2, 3, FOUR), 11, inputs=512, norm=True, dtype=F16),
    Case("packed-residual", WarpForm(4, 32, 4, 2, FOUR), 29, inputs=1024, residual=True),
    Case("packed-gated", WarpForm(4, 16, 4, 3, FOUR), 13, inputs=512, gated=True, norm=True),
    Case("packed-turns", WarpForm(2, 32, 4, 2, FOUR), 75, inputs=256, norm=True, residual=True),
    Case("packed-made", WarpForm(2, 8, 4, 2, FOUR), 19, inputs=512, norm=True, makers=38),
    Case("packed-ahead", WarpForm(2, 8, 4, 2, FOUR), 18, inputs=512, residual=True, ahead=True),
    Case("packed-narrow", WarpForm(2, 8, 4, 3, Packing(4, 64, 128)), 3, inputs=384, norm=True),
    Case("packed-by-32", WarpForm(2, 8, 2, 3, Packing(4, 32, 256)), 8, inputs=512),
    Case("packed-by-128", WarpForm(2, 32, 2, 3, Packing(4, 128, 256)), 31, inputs=512, norm=True),
    Case("packed-8-bits", WarpForm(2, 8, 4, 3, EIGHT), 1, inputs=512, norm=True, bias=True),
    Case(
        "packed-8-bits-gated", WarpForm(4, 32, 4, 2, EIGHT), 40, inputs=384, gated=True, dtype=F16
    ),
    Case("packed-8-bits-by-128", WarpForm(2, 8, 2, 2, Packing(8, 128, 128)), 5, inputs=384),
    Case("packed-odd-groups", WarpForm(4, 16, 2, 2, Packing(4, 128, 128)), 12, inputs=640),
    Case("packed-8-bits-by-32", WarpForm(1, 16, 4, 3, Packing(8, 32, 64)), 9, inputs=192),
    Case("packed-in-short-stages", WarpForm(1, 8, 2, 3, Packing(4, 64, 64)), 3, inputs=320),
    Case("packed-by-32-in-short-stages", WarpForm(2, 16, 2, 3, Packing(4, 32, 64)), 9, inputs=192),
]
ROW_CASES = [
    Case("row", RowForm(8, 8, 2, FOUR, (32, 4096)), 1, inputs=4096, outputs=32),
    Case("row-norm", RowForm(1, 8, 3, Packing(4, 64, 512), (128, 1024)), 1, inputs=1024, norm=True),
    Case(
        "row-bias",
        RowForm(4, 8, 2, FOUR, (128, 768)),
        1,
        inputs=768,
        norm=True,
        bias=True,
        dtype=F16,
    ),
    Case("row-residual", RowForm(2, 4, 2, FOUR, (128, 1280)), 1, inputs=1280, residual=True),
    Case("row-gated", RowForm(1, 8, 2, FOUR, (256, 512)), 1, inputs=512, gated=True, norm=True),
    Case(
        "row-gated-bias", RowForm(2, 8, 2, FOUR, (256, 768)), 1, inputs=768, gated=True, bias=True
    ),
    Case("row-narrow", RowForm(4, 8, 2, Packing(4, 64, 128), (128, 384)), 1, inputs=384, norm=True),
    Case("row-by-32", RowForm(2, 8, 2, Packing(4, 32, 256), (128, 768)), 1, inputs=768, norm=True),
    Case(
        "row-by-128", RowForm(2, 8, 2, Packing(4, 128, 512), (128, 1536)), 1, inputs=1536, norm=True
    ),
    Case("row-of-odd-groups", RowForm(2, 8, 2, Packing(4, 128, 128), (128, 640)), 1, inputs=640),
    Case(
        "row-gelu",
        RowForm(1, 8, 2, FOUR, (256, 768)),
        1,
        inputs=768,
        gated=True,
        norm=True,
        activation=GELU,
    ),
    Case("row-8-bits", RowForm(4, 8, 2, Packing(8, 64, 256), (128, 768)), 1, inputs=768, norm=True),
    Case(
        "row-8-bits-narrow",
        RowForm(2, 8, 2, Packing(8, 32, 64), (256, 192)),
        1,
        inputs=192,
        gated=True,
    ),
    Case(
        "row-in-short-stages",
        RowForm(2, 8, 2, Packing(4, 64, 64), (64, 320)),
        1,
        inputs=320,
        outputs=64,
    ),
    Case("row-without-inputs", RowForm(8, 8, 2, FOUR, (128, 256)), 1, residual=True, dtype=F16),
]
CASES = [
    *PACKED_CASES,
    *ROW_CASES,
    Case("one-row", WarpForm(1, 8, 4, 3), 1),
    Case("norm", WarpForm(2, 8, 4, 2), 5, norm=True),
    Case("norm-and-bias", WarpForm(1, 16, 2, 4), 13, norm=True, bias=True, dtype=F16),
    Case("residual", WarpForm(4, 32, 4, 3), 32, residual=True),
    Case("residual-and-bias", WarpForm(2, 32, 8, 2), 27, residual=True, bias=True),
    Case("three-tiles", WarpForm(3, 32, 4, 3), 21, outputs=384, norm=True, dtype=F16),
    Case("tile-of-many-rows", WarpForm(1, 32, 8, 4), 32, inputs=1024, norm=True, residual=True),
    Case("gated", WarpForm(2, 8, 4, 3), 8, gated=True, norm=True),
    Case("gated-tile", WarpForm(1, 16, 4, 3), 11, gated=True, norm=True, bias=True),
    Case("gated-bias", WarpForm(4, 32, 4, 2), 30, gated=True, norm=True, bias=True, dtype=F16),
    Case("more-stages-than-inputs", WarpForm(2, 8, 4, 6), 3, inputs=192, norm=True),
    Case("in-groups", GroupForm(2, 32), 27, outputs=256, gated=True, norm=True),
    Case("in-groups-bias", GroupForm(4, 64), 41, outputs=256, gated=True, bias=True, dtype=F16),
    Case("in-groups-long", GroupForm(2, 64), 64, inputs=640, gated=True, norm=True),
    Case("gelu", WarpForm(2, 16, 4, 3), 11, gated=True, bias=True, activation=GELU),
    Case("gelu-in-groups", GroupForm(2, 32), 27, outputs=256, gated=True, activation=GELU),
    Case("many-turns", WarpForm(1, 8, 2, 2), 2, inputs=1024, residual=True),
    Case("made", WarpForm(2, 16, 4, 3), 13, norm=True, makers=38, bias=True),
    Case("made-of-few", WarpForm(1, 8, 8, 3), 5, norm=True, makers=2, dtype=F16),
    Case("made-gated", WarpForm(4, 32, 4, 4), 30, gated=True, norm=True, makers=128),
    Case("made-in-groups", GroupForm(2, 32), 29, outputs=256, gated=True, norm=True, makers=66),
    Case(
        "made-in-larger-groups", GroupForm(4, 64), 61, outputs=256, gated=True, norm=True, makers=10
    ),
    Case("ahead", WarpForm(1, 32, 8, 4), 29, residual=True, ahead=True),
    Case("ahead-of-few", WarpForm(2, 8, 4, 3), 7, bias=True, residual=True, ahead=True, dtype=F16),
    Case("ahead-of-three-tiles", WarpForm(3, 16, 4, 3), 16, outputs=384, residual=True, ahead=True),
]

NAMED = {
    *("norm-and-bias", "three-tiles", "in-groups-bias", "made", "made-in-groups", "ahead"),
    *("gelu", "row-gelu", "row-norm", "row-gated-bias", "row-8-bits", "packed-8-bits"),
    *("packed-norm", "packed-gated", "packed-ahead"),
}
# What is in others of those, in other company.
MORE = {
    *("gated-tile", "made-gated", "ahead-of-three-tiles", "gelu-in-groups"),
    *("row-residual", "packed-made", "packed-8-bits-gated"),
}


def expected(case, x, norm, weight, bias, residual):
    y = x
    if case.norm:
        y = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * norm
    y = y @ weight.T
    if case.bias:
        y = y + bias
    if case.gated:
        y = gated(y, case.activation)
    return y + residual if case.residual else y


@pytest.fixture(scope="module")
def libraries(compile_cuda):
    """A library for each kind of case, with the numbers of those."""
    kinds = {case.kind for case in CASES}
    numbers = {kind: [i for i, case in enumerate(CASES) if case.kind == kind] for kind in kinds}
    return {
        kind: (compile_cuda([entry(CASES[i]) for i in own]), own) for kind, own in numbers.items()
    }


def entry(case):
    source = products.product_source(case.dtype, case.variant)
    of = {name: mx.float32 if name.startswith("squares") else case.dtype for name in NAMES}
    if case.packing is not None:
        of["weight"] = mx.uint32
    return source, *(tuple(of[name] for name in names) for names in (source.inputs, source.outputs))


GATES = [(dtype, activation) for dtype in (BF16, F16) for activation in Activation]


@pytest.mark.parametrize(("dtype", "activation"), GATES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (65, 320), (130, 64)])
def test_gates_of_many_rows_are_the_reference(gates, dtype, activation, rows, width):
    # With gates that are large in either direction.
    both = rounded(np.random.default_rng(rows).normal(size=(rows, 2 * width)) * 30, dtype)
    got = gated_rows(gates, both, dtype, activation)
    np.testing.assert_allclose(got, rounded(gated(both, activation), dtype), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_a_gelu_is_mlx_s_own_for_any_gate(gates, dtype):
    most = 65504 if dtype is F16 else 3e38
    gate = np.concatenate([np.linspace(-12, 12, 497), most * np.float32(10.0) ** np.arange(-30, 1)])
    gate = rounded(np.concatenate([gate, -gate]), dtype)[None]
    both = np.concatenate([gate, np.ones_like(gate)], axis=1)
    got = gated_rows(gates, both, dtype, GELU)
    wanted = np.array(nn.gelu_approx(mx.array(gate)))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-6)


def gated_rows(gates, both, dtype, activation):
    rows, width = both.shape[0], both.shape[1] // 2
    out = bits(np.full((rows, width), np.nan, np.float32), dtype)
    blocks = -(-rows * width // 8 // 256)
    number = GATES.index((dtype, activation))
    gates.call(number, [bits(both, dtype)], [out], (blocks * 256, 1, 1), (256, 1, 1))
    return np.array(mx.array(out).view(dtype).astype(mx.float32))


@pytest.fixture(scope="module")
def gates(compile_cuda):
    return compile_cuda([gate_entry(*each) for each in GATES])


def gate_entry(dtype, activation):
    return products.gate_source(dtype, activation), (dtype,), (dtype,)


def test_nvidia_s_compiler_takes_gates(nvidia_accepts):
    nvidia_accepts([gate_entry(*each) for each in GATES])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=slow if c.name in MORE else [])
        for c in CASES
        if c.name in NAMED | MORE
    ],
)
def test_nvidia_s_compiler_takes_products(nvidia_accepts, case):
    nvidia_accepts([entry(case)])


@pytest.mark.parametrize("index", every_other(range(len(CASES))), ids=[case.name for case in CASES])
def test_product_is_the_reference(libraries, index):
    case = CASES[index]
    assert case.form.shared_memory <= H200.block_memory
    library, own = libraries[case.kind]
    rng = np.random.default_rng(index)
    weights = case.outputs * (2 if case.gated else 1)
    blocks = weights // case.form.outputs
    turns = -(-case.rows // case.form.held)

    def draw(*size, scale=1.0):
        return rounded(rng.normal(size=size) * scale, case.dtype)

    x, norm = draw(case.rows, case.inputs), draw(case.inputs)
    weight = draw(weights, case.inputs, scale=case.inputs**-0.5)
    packed = {}
    if case.packing is not None:
        weight, packed = in_packs(weight, case.packing, case.dtype)
    bias, residual, next_norm = draw(weights), draw(case.rows, case.outputs), draw(case.outputs)
    wanted = expected(case, x, norm, weight, bias, residual)
    # In parts that are not alike, and some of which give nothing.
    shares = rng.dirichlet(np.full(case.makers or 1, 0.3), size=case.rows)
    of = {
        "x": x * norm if case.makers else x,
        "norm": norm,
        "squares": np.float32(shares * (x**2).sum(1, keepdims=True)),
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "next_norm": next_norm,
        "out": np.full((case.rows, case.outputs), np.nan, np.float32),
        "scaled_out": np.full((case.rows, case.outputs), np.nan, np.float32),
        "squares_out": np.full((case.rows, blocks), np.nan, np.float32),
    }
    arrays = {
        name: values if name.startswith("squares") else bits(values, case.dtype)
        for name, values in of.items()
    } | packed
    threads = case.form.threads
    library.call(
        own.index(index),
        [arrays[name] for name in case.variant.inputs],
        [arrays[name] for name in case.variant.outputs],
        (blocks * turns * threads, 1, 1),
        (threads, 1, 1),
    )

    def read(name):
        return np.array(mx.array(arrays[name]).view(case.dtype).astype(mx.float32))

    got = read("out")
    assert np.linalg.norm(got - wanted) <= 1e-2 * np.linalg.norm(wanted)
    if case.ahead:
        np.testing.assert_array_equal(read("scaled_out"), rounded(got * next_norm, case.dtype))
        parts = (got**2).reshape(case.rows, blocks, -1).sum(2)
        np.testing.assert_allclose(arrays["squares_out"], parts, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("outputs", [128, 2048, 3072, 4096, 6144, 16384, 28672, 128256, 262208])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("device", [H200, RTX4090], ids=["H200", "RTX4090"])
def test_chosen_forms_fit_the_multiprocessor(rows, outputs, gated, device):
    form = WarpForm.choose(outputs, rows, device, gated=gated)
    assert outputs % form.outputs == 0
    assert not (gated and form.tiles % 2)
    assert form.rows >= rows
    assert form.shared_memory <= device.block_memory
    assert form.stages >= 2


@pytest.mark.parametrize("rows", [9, 16, 17, 32])
@pytest.mark.parametrize("outputs", [2048, 3072, 4096, 6144, 8192])
def test_no_block_of_a_product_waits_for_another(rows, outputs):
    assert outputs / WarpForm.choose(outputs, rows, H200).outputs <= H200.multiprocessors


@pytest.mark.parametrize("rows", [1, 9, 16, 17, 32])
@pytest.mark.parametrize("outputs", [128, 384, 1920, 3072, 4096, 6144, 8192])
@pytest.mark.parametrize("device", [H200, RTX4090], ids=["H200", "RTX4090"])
def test_makers_are_an_even_number(rows, outputs, device):
    assert outputs // WarpForm.choose(outputs, rows, device).outputs % 2 == 0


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("outputs", [256, 2816, 16384, 28672, 57344])
def test_gates_and_ups_are_shared_out_evenly(rows, outputs):
    form = gated_form(mx.zeros((outputs, 256)), rows, H200)
    assert outputs % form.outputs == 0
    assert form.shared_memory <= H200.block_memory
    assert isinstance(form, WarpForm) or form.rows >= rows


@pytest.mark.parametrize("rows", [1, 9, 17, 32])
def test_gates_that_groups_can_t_share_are_multiplied_by_warps(rows):
    weight = mx.zeros((43200, 256))
    form = gated_form(weight, rows, H200)
    assert isinstance(form, WarpForm)
    assert weight.shape[0] % form.outputs == 0
    assert GroupForm.serves(mx.zeros((43264, 256)), H200)
    assert not GroupForm.serves(weight, H200)


def test_matrices_of_odd_sizes_are_not_served():
    assert ProductKernels.serves(mx.zeros((256, 896)))
    assert ProductKernels.serves(mx.zeros((320, 896)))
    assert not ProductKernels.serves_ahead(mx.zeros((320, 896)))
    assert not ProductKernels.serves(mx.zeros((200, 896)))
    assert not ProductKernels.serves(mx.zeros((256, 900)))


def packed(outputs, inputs, group, bits):
    """Of no content."""
    groups = mx.zeros((outputs, inputs // group))
    return Packed(mx.zeros((outputs, inputs * bits // 32)), groups, groups, group, bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("inputs", [896, 1536, 2048, 2880, 3584])
def test_packed_matrices_that_are_served_are_cut_into_whole_stages(bits, group, inputs):
    weight = packed(256, inputs, group, bits)
    assert weight.shape == (256, inputs)
    served = ProductKernels.serves(weight)
    assert served == (bits in (4, 8) and group > 16 and inputs % max(group, 64) == 0)
    if served:
        packing = Packing.of(weight)
        assert inputs % packing.width == 0
        assert packing.width % group == 0
        for rows in (1, 9, 32, 128):
            for device in (H200, RTX4090):
                form = WarpForm.choose(256, rows, device, packing)
                assert form.shared_memory <= device.block_memory
                assert 256 % form.outputs == 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("device", [H200, RTX4090], ids=["H200", "RTX4090"])
@pytest.mark.parametrize(
    "sizes",
    [
        [(4096, 4096), (28672, 4096), (4096, 14336), (6144, 4096)],
        [(2048, 2048), (16384, 2048), (2048, 8192)],
        [(896, 896), (9728, 896), (896, 4864)],
        [(128256, 2048)],
        [(262208, 2560)],
        [(960, 1024), (5184, 1024), (2880, 2560), (64, 1024)],
    ],
)
def test_one_row_is_shared_out_among_warps_that_all_have_weights(bits, group, device, sizes):
    weights = [packed(*size, group, bits) for size in sizes]
    forms = RowForm.choose(weights, device, Packing.of(weights[0]))
    assert len({form.packing for form in forms}) == 1
    for form, (outputs, inputs) in zip(forms, sizes, strict=True):
        assert form.size == (outputs, inputs)
        assert outputs % form.outputs == 0
        assert inputs % form.packing.width == 0
        assert form.packing.width <= 8 * group
        assert form.is_whole or form.packing == Packing.of(weights[0])
        assert form.shared_memory <= device.block_memory


def test_a_row_that_does_not_fit_goes_by_the_kernel_for_few():
    weight = packed(256, 65536, 64, 4)
    assert RowForm.choose([weight], RTX4090, Packing.of(weight)) is None
    assert isinstance(gated_form(weight, 1, RTX4090), WarpForm)
    assert isinstance(gated_form(packed(256, 4096, 64, 4), 1, RTX4090), RowForm)


def test_packed_matrices_of_odd_sizes_are_not_served():
    assert not ProductKernels.serves(packed(200, 1024, 64, 4))

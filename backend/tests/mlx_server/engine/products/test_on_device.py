"""Products by the kernels of the device at hand."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_manager.mlx_server.engine import products
from mlx_manager.mlx_server.engine.products.factors import (
    Activation,
    Experts,
    Link,
    Norm,
    Packed,
    Weight,
)

pytestmark = pytest.mark.skipif(
    mx.default_device().type != mx.gpu or mx.metal.is_available(), reason="needs an NVIDIA GPU"
)
BF16 = mx.bfloat16
EPSILON = 1e-5
ROWS = (1, 3, 8, 13, 32, 75)


def weight(outputs: int, inputs: int, bits: int | str | None) -> tuple[Weight, np.ndarray]:
    """And what it stands for."""
    dense = (mx.random.normal((outputs, inputs)) * inputs**-0.5).astype(BF16)
    if bits is None:
        return dense, np.array(dense.astype(mx.float32))
    if isinstance(bits, str):
        words, scales = mx.quantize(dense, mode=bits)
        packed = Packed(words, scales, None, 32, 4, bits)
        return packed, np.array(packed.dense.astype(mx.float32))
    words, scales, biases = mx.quantize(dense, 64, bits)
    wide = scales.astype(mx.float32), biases.astype(mx.float32)
    stands_for = np.array(mx.dequantize(words, *wide, 64, bits))
    return Packed(words, scales, biases, 64, bits), stands_for


def random(*shape: int) -> tuple[mx.array, np.ndarray]:
    x = mx.random.normal(shape).astype(BF16)
    return x, np.array(x.astype(mx.float32))


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(1, keepdims=True) + EPSILON)


def gated(both: np.ndarray) -> np.ndarray:
    gate, up = np.split(both, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def assert_close(got: mx.array, wanted: np.ndarray) -> None:
    got = np.array(got.astype(mx.float32))
    assert np.linalg.norm(got - wanted) <= 1e-2 * np.linalg.norm(wanted)


@pytest.fixture(scope="module")
def kernels() -> products.ProductKernels:
    built = products.build(BF16)
    assert isinstance(built, products.ProductKernels), built
    return built


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", ROWS)
def test_packed_products_are_the_reference(kernels, rows, bits):
    (x, exact), (residual, added) = random(rows, 768), random(rows, 512)
    of, stands_for = weight(512, 768, bits)
    ones = Norm(mx.ones((768,), BF16), EPSILON)
    assert_close(kernels.multiply(x, of, residual=residual), exact @ stands_for.T + added)
    assert_close(kernels.multiply(x, of, norm=ones), normed(exact) @ stands_for.T)
    assert_close(kernels.gated(x, of, norm=ones), gated(normed(exact) @ stands_for.T))


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [rows for rows in ROWS if rows <= 8])
def test_a_chain_is_the_reference(kernels, rows, bits):
    (attended, exact), (residual, added) = random(rows, 512), random(rows, 512)
    sizes = [(512, 512), (2048, 512), (512, 1024), (768, 512)]
    weights, of = zip(*(weight(*size, bits) for size in sizes), strict=True)
    norms = [None, Norm(mx.ones((512,), BF16), EPSILON)] * 2
    links = [Link(each, None, norm) for each, norm in zip(weights, norms, strict=True)]
    hidden = added + exact @ of[0].T
    inner = gated(normed(hidden) @ of[1].T)
    result = hidden + inner @ of[2].T
    wanted = [hidden, inner, result, normed(result) @ of[3].T]
    for _ in range(2):
        # The second time the counters must be back at 0.
        for mine, theirs in zip(kernels.chain(links)(attended, residual), wanted, strict=True):
            assert_close(mine, theirs)


def clamped(both: np.ndarray) -> np.ndarray:
    gate, up = np.split(both, 2, axis=1)
    gate = np.minimum(gate, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)


@pytest.mark.parametrize("is_gpt_oss", [False, True])
@pytest.mark.parametrize("bits", [None, 4, 8, "mxfp4"])
@pytest.mark.parametrize("rows", [*ROWS, 130, 700])
def test_experts_are_the_reference(kernels, rows, bits, is_gpt_oss):
    count, chosen, width, inner = 12, 3, 576 if is_gpt_oss else 512, 320 if is_gpt_oss else 256
    x, exact = random(rows, width)
    router, _ = random(count, width)
    gate_up, both = weight(2 * count * inner, width, bits)
    down, lower = weight(count * width, inner, bits)
    drawn = [random(size) for size in (2 * count * inner, count * width, count)]
    of_gates, of_down, of_router = (each if is_gpt_oss else (None, 0 * each[1]) for each in drawn)
    experts = Experts(
        router * width**-0.5,
        gate_up,
        down,
        chosen,
        normalised=True,
        activation=Activation.CLAMPED_SILU if is_gpt_oss else Activation.SILU,
        router_bias=of_router[0],
        biases=(of_gates[0], of_down[0]) if is_gpt_oss else None,
    )
    assert kernels.experts.serves(experts)
    norm = Norm(mx.ones((width,), BF16), EPSILON)
    made = kernels.experts(x, norm, experts)
    of_rows, scores = np.array(made[2]), np.array(made[3])
    gates, ups = both.reshape(2, count, inner, width)
    gate_biases, up_biases = of_gates[1].reshape(2, count, inner)
    wanted = exact.copy()
    for row, own in enumerate(normed(exact)):
        for expert, score in zip(of_rows[row], scores[row], strict=True):
            gate = gates[expert] @ own + gate_biases[expert]
            up = ups[expert] @ own + up_biases[expert]
            between = (clamped if is_gpt_oss else gated)(np.concatenate([gate, up])[None])[0]
            bias = of_down[1].reshape(count, width)[expert]
            below = lower.reshape(count, width, inner)[expert] @ between + bias
            wanted[row] += score * below
    assert_close(made[-1], wanted)


def test_a_row_goes_to_its_largest_logits_biases_included(kernels):
    count, chosen, width, inner = 32, 4, 576, 320
    (x, exact), (router, _) = random(40, width), random(count, width)
    router = router * width**-0.5
    bias, added = random(count)
    gate_up, _ = weight(2 * count * inner, width, None)
    down, _ = weight(count * width, inner, None)
    experts = Experts(router, gate_up, down, chosen, normalised=True, router_bias=bias)
    made = kernels.experts(x, Norm(mx.ones((width,), BF16), EPSILON), experts)
    logits = normed(exact) @ np.array(router.astype(mx.float32)).T + added
    kept = np.sort(np.take_along_axis(logits, np.array(made[2]), 1), 1)
    np.testing.assert_allclose(kept, np.sort(logits, 1)[:, -chosen:], rtol=2e-2, atol=2e-2)

"""Products by the kernels of the device at hand."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.matmul.halves import gated
from execution.decoder.common_decoders import DIMENSIONS, EXPERTS, GEMMA3, GEMMA4S, make
from mlx_lm.models import gemma2, gemma3_text

from mlx_manager.mlx_server.devices.cuda.compiler.device import cuda_device
from mlx_manager.mlx_server.devices.cuda.matmul import products
from mlx_manager.mlx_server.devices.cuda.matmul.factors import (
    Activation,
    Experts,
    ExpertScoring,
    Link,
    Packed,
    RowNorm,
    Weight,
)
from mlx_manager.mlx_server.devices.cuda.matmul.sums import Two
from mlx_manager.mlx_server.devices.cuda.moe.experts import _kind
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.execution.select import choose

pytestmark = pytest.mark.skipif(
    mx.default_device().type != mx.gpu or mx.metal.is_available(), reason="needs an NVIDIA GPU"
)
BF16 = mx.bfloat16


def multiplies_in_groups() -> bool:
    device = cuda_device()
    return not isinstance(device, Unsupported) and device.multiplies_in_groups


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


def assert_close(got: mx.array, wanted: np.ndarray) -> None:
    got = np.array(got.astype(mx.float32))
    assert np.linalg.norm(got - wanted) <= 1e-2 * np.linalg.norm(wanted)


@pytest.fixture(scope="module")
def kernels() -> products.ProductKernels:
    built = products.build(BF16)
    assert isinstance(built, products.ProductKernels), built
    return built


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 32])
def test_heads_meet_their_own_matrices(kernels, rows, bits):
    heads, inputs, outputs, beside = 20, 192, 512, 64
    of, stands_for = weight(heads * outputs, inputs, bits)
    matrices = stands_for.reshape(heads, outputs, inputs)
    x, exact = random(rows, heads * (inputs + beside))
    each = exact.reshape(rows, heads, -1)[..., :inputs]
    got = kernels.heads.of_rows(x, of, heads)
    assert_close(got, np.einsum("rhi,hoi->hro", each, matrices))
    of, stands_for = weight(heads * 256, 512, bits)
    exact = np.array(got.astype(mx.float32))
    wanted = np.einsum("hri,hoi->rho", exact, stands_for.reshape(heads, 256, 512))
    assert_close(kernels.heads.to_rows(got, of), wanted.reshape(rows, -1))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", ROWS)
def test_packed_products_are_the_reference(kernels, rows, bits):
    (x, exact), (residual, added) = random(rows, 768), random(rows, 512)
    of, stands_for = weight(512, 768, bits)
    ones = RowNorm(mx.ones((768,), BF16), EPSILON)
    assert_close(kernels.multiply(x, of, residual=residual), exact @ stands_for.T + added)
    assert_close(kernels.multiply(x, of, norm=ones), normed(exact) @ stands_for.T)
    for how in Activation:
        got = kernels.gated(x, of, norm=ones, activation=how)
        assert_close(got, gated(normed(exact) @ stands_for.T, how))


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_vocabulary_of_half_blocks_is_multiplied_by(kernels, rows, bits):
    (x, exact), (of, stands_for) = random(rows, 768), weight(65 * 64, 768, bits)
    assert kernels.serves(of)
    ones = RowNorm(mx.ones((768,), BF16), EPSILON)
    assert_close(kernels.multiply(x, of, norm=ones), normed(exact) @ stands_for.T)


@pytest.mark.parametrize("how", Activation)
@pytest.mark.parametrize("rows", [*ROWS, 64])
def test_gated_products_are_the_reference(kernels, rows, how):
    (x, exact), (of, stands_for) = random(rows, 768), weight(2048, 768, None)
    wanted = gated(exact @ stands_for.T, how)
    if rows <= kernels.most_gated_rows(of):
        assert_close(kernels.gated(x, of, activation=how), wanted)
    assert_close(kernels.gate(x @ of.T, how), wanted)


@pytest.mark.parametrize("rows", [*ROWS, 700])
@pytest.mark.parametrize("width", [640, 1152, 2560, 3840, 5376])
def test_sums_of_normed_rows_are_the_reference(kernels, rows, width):
    (residual, before), (x, exact) = random(rows, width), random(rows, width)
    (norm, by), (following, next_by) = random(width), random(width)
    norms = RowNorm(norm, EPSILON), RowNorm(following, EPSILON)
    out, ahead = kernels.sums(residual, x, *norms)
    assert_close(out, before + normed(exact) * by)
    assert_close(ahead, normed(np.array(out.astype(mx.float32))) * next_by)
    (alone,) = kernels.sums(residual, x, norms[0], None)
    assert mx.array_equal(alone, out)


@pytest.mark.parametrize("rows", [*ROWS, 700])
@pytest.mark.parametrize("width", [2816, 12384])
def test_sums_of_two_results_are_the_reference(kernels, rows, width):
    (residual, before), (norm, by) = random(rows, width), random(width)
    (first, exact), (other, other_exact) = random(rows, width), random(rows, width)
    (of_first, first_by), (of_other, other_by) = random(width), random(width)
    two = Two(first, other, of_first, of_other)
    (out,) = kernels.sums(residual, two, RowNorm(norm, EPSILON), None)
    both = normed(exact) * first_by + normed(other_exact) * other_by
    assert_close(out, before + normed(both) * by)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("width", [640, 1152])
def test_a_gemma_is_fused(width, family):
    of = DIMENSIONS | GEMMA3 | {"hidden_size": width, "intermediate_size": 2 * width}
    of |= {"head_dim": 256, "query_pre_attn_scalar": 256, "vocab_size": 512}
    model = make(family, of | {"tie_word_embeddings": family == "gemma3_text"})
    # As trained ones are, whose norms multiply by 1 or so.
    model.apply_to_modules(lambda _, part: part.update(_by_one(part)))
    model.set_dtype(BF16)
    assert choose(model, 16).kind == "fused"


@pytest.mark.parametrize("name", [*GEMMA4S, "gemma4-experts"])
def test_a_gemma4_is_fused(name):
    family, own = {**GEMMA4S, "gemma4-experts": ("gemma4_text", EXPERTS["gemma4_text"])}[name]
    of = DIMENSIONS | own | {"hidden_size": 640, "intermediate_size": 1280, "vocab_size": 512}
    of |= {"head_dim": 256, "global_head_dim": 512, "vocab_size_per_layer_input": 512}
    if of["hidden_size_per_layer_input"]:
        of |= {"hidden_size_per_layer_input": 128}
    model = make(family, of)
    for layer in model.layers:
        # As trained ones are, whose scores are small.
        attention = layer.self_attn
        attention.q_norm.weight = attention.q_norm.weight * attention.head_dim**-0.5
    model.set_dtype(BF16)
    assert choose(model, 16).kind == "fused"


def _by_one(part):
    """Of a norm that multiplies by 1 + weight."""
    is_norm = isinstance(part, gemma2.RMSNorm | gemma3_text.RMSNorm)
    return {"weight": part.weight - 1} if is_norm else {}


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [rows for rows in ROWS if rows <= 8])
def test_a_chain_is_the_reference(kernels, rows, bits):
    (attended, exact), (residual, added) = random(rows, 512), random(rows, 512)
    sizes = [(512, 512), (2048, 512), (512, 1024), (768, 512)]
    weights, of = zip(*(weight(*size, bits) for size in sizes), strict=True)
    norms = [None, RowNorm(mx.ones((512,), BF16), EPSILON)] * 2
    links = [Link(each, None, norm) for each, norm in zip(weights, norms, strict=True)]
    hidden = added + exact @ of[0].T
    inner = gated(normed(hidden) @ of[1].T, Activation.SILU)
    result = hidden + inner @ of[2].T
    wanted = [result, normed(result) @ of[3].T]
    for _ in range(2):
        # The second time the counters must be back at 0.
        between, *made = kernels.chain(links)(attended, residual)
        assert_close(between.flatten()[: hidden.size].reshape(hidden.shape), hidden)
        assert_close(between.flatten()[hidden.size :].reshape(inner.shape), inner)
        for mine, theirs in zip(made, wanted, strict=True):
            assert_close(mine, theirs)


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
    norm = RowNorm(mx.ones((width,), BF16), EPSILON)
    kernels.experts.check(experts)
    made = kernels.experts(x, norm, experts)
    of_rows, scores = np.array(made[2]), np.array(made[3])
    gates, ups = both.reshape(2, count, inner, width)
    gate_biases, up_biases = of_gates[1].reshape(2, count, inner)
    wanted = exact.copy()
    for row, own in enumerate(normed(exact)):
        for expert, score in zip(of_rows[row], scores[row], strict=True):
            gate = gates[expert] @ own + gate_biases[expert]
            up = ups[expert] @ own + up_biases[expert]
            how = Activation.CLAMPED_SILU if is_gpt_oss else Activation.SILU
            between = gated(np.concatenate([gate, up])[None], how)[0]
            bias = of_down[1].reshape(count, width)[expert]
            below = lower.reshape(count, width, inner)[expert] @ between + bias
            wanted[row] += score * below
    assert_close(made[-1], wanted)


@pytest.mark.skipif(not multiplies_in_groups(), reason="needs compute capability 9.0")
@pytest.mark.parametrize("rows", [200, 1000])
@pytest.mark.parametrize("inner", [192, 256])
def test_experts_of_many_rows_are_the_same_by_warpgroups(kernels, rows, inner):
    count, chosen, width = 12, 3, 512
    (x, _), (router, _) = random(rows, width), random(count, width)
    gate_up, down = weight(2 * count * inner, width, None)[0], weight(count * width, inner, None)[0]
    experts = Experts(router * width**-0.5, gate_up, down, chosen, normalised=True)
    norm = RowNorm(mx.ones((width,), BF16), EPSILON)
    made = {}
    for grouped in (False, True):
        kernels.experts._grouped[_kind(experts)] = grouped
        made[grouped] = kernels.experts(x, norm, experts)[-1] - x
    assert_close(made[True], np.array(made[False].astype(mx.float32)))


@pytest.mark.parametrize("rows", [1, 5, 40, 700])
def test_experts_that_rows_share_are_weighted_by_their_own_gates(kernels, rows):
    count, chosen, shared, width, inner = 21, 6, 2, 512, 256
    (x, exact), (router, _) = random(rows, width), random(count, width)
    gate_up, _ = weight(2 * count * inner, width, None)
    down, _ = weight(count * width, inner, None)
    router = router * width**-0.5
    experts = Experts(router, gate_up, down, chosen, normalised=True, shared=shared)
    kernels.experts.check(experts)
    made = kernels.experts(x, RowNorm(mx.ones((width,), BF16), EPSILON), experts)
    logits = normed(exact) @ np.array(router.astype(mx.float32)).T
    of_rows, scores = np.array(made[2]), np.array(made[3])
    assert np.all(of_rows[:, -shared:] == [count - 2, count - 1])
    gates = 1 / (1 + np.exp(-logits[:, -shared:]))
    np.testing.assert_allclose(scores[:, -shared:], gates, rtol=2e-2)
    np.testing.assert_allclose(scores[:, :-shared].sum(1), 1, rtol=1e-3)
    kept = np.sort(np.take_along_axis(logits, of_rows[:, :-shared], 1), 1)
    largest = np.sort(logits[:, :-shared], 1)[:, shared - chosen :]
    np.testing.assert_allclose(kept, largest, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 5, 40, 700])
@pytest.mark.parametrize(("count", "chosen"), [(64, 4), (128, 8)])
def test_a_row_goes_to_its_largest_corrected_sigmoids(kernels, rows, count, chosen):
    shared, width, inner = 1, 512, 256
    (x, exact), (router, _) = random(rows, width), random(count, width)
    gate_up, _ = weight(2 * (count + shared) * inner, width, None)
    down, _ = weight((count + shared) * width, inner, None)
    router, correction = router * width**-0.5, mx.random.normal((count,))
    experts = Experts(
        router,
        gate_up,
        down,
        chosen + shared,
        normalised=True,
        shared=shared,
        scoring=ExpertScoring.SIGMOID,
        correction=correction,
        scale=1.8,
    )
    assert kernels.experts.serves(experts)
    kernels.experts.check(experts)
    made = kernels.experts(x, RowNorm(mx.ones((width,), BF16), EPSILON), experts)
    logits = normed(exact) @ np.array(router.astype(mx.float32)).T
    plain = 1 / (1 + np.exp(-logits))
    corrected = plain + np.array(correction)
    of_rows, scores = np.array(made[2]), np.array(made[3])
    assert np.all(of_rows[:, -1] == count)
    assert np.all(scores[:, -1] == 1)
    of_rows = of_rows[:, :-1]
    kept = np.sort(np.take_along_axis(corrected, of_rows, 1), 1)
    np.testing.assert_allclose(kept, np.sort(corrected, 1)[:, -chosen:], rtol=2e-2, atol=2e-2)
    own = np.take_along_axis(plain, of_rows, 1)
    wanted = 1.8 * own / own.sum(1, keepdims=True)
    np.testing.assert_allclose(scores[:, :-1], wanted, rtol=2e-2)


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [1, 5, 40, 130, 700])
def test_experts_alone_behind_a_router_s_own_norm_are_the_reference(kernels, rows, bits):
    count, chosen, width, inner = 128, 8, 704, 192
    (x, exact), (router, by_router) = random(rows, width), random(count, width)
    (norm, by), (router_norm, by_own) = random(width), random(width)
    gate_up, both = weight(2 * count * inner, width, bits)
    down, lower = weight(count * width, inner, bits)
    experts = Experts(
        router * width**-0.5,
        gate_up,
        down,
        chosen,
        normalised=True,
        activation=Activation.GELU,
        router_norm=router_norm,
        scales=mx.random.uniform(0.2, 2.0, (count,)),
    )
    assert kernels.experts.serves(experts)
    kernels.experts.check(experts)
    made = kernels.experts(x, RowNorm(norm, EPSILON), experts, alone=True)
    logits = (normed(exact) * by_own) @ (by_router * width**-0.5).T
    of_rows, scores = np.array(made[2]), np.array(made[3])
    kept = np.take_along_axis(logits, of_rows, 1)
    np.testing.assert_allclose(
        np.sort(kept, 1), np.sort(logits, 1)[:, -chosen:], rtol=2e-2, atol=3e-2
    )
    own = np.exp(kept) / np.exp(kept).sum(1, keepdims=True) * np.array(experts.scales)[of_rows]
    np.testing.assert_allclose(scores, own, rtol=5e-2)
    gates, ups = both.reshape(2, count, inner, width)
    wanted = np.zeros_like(exact)
    for row, own in enumerate(normed(exact) * by):
        for expert, score in zip(of_rows[row], scores[row], strict=True):
            halves = np.concatenate([gates[expert] @ own, ups[expert] @ own])
            between = gated(halves[None], Activation.GELU)[0]
            wanted[row] += score * (lower.reshape(count, width, inner)[expert] @ between)
    assert_close(made[-1], wanted)


def test_a_row_goes_to_its_largest_logits_biases_included(kernels):
    count, chosen, width, inner = 32, 4, 576, 320
    (x, exact), (router, _) = random(40, width), random(count, width)
    router = router * width**-0.5
    bias, added = random(count)
    gate_up, _ = weight(2 * count * inner, width, None)
    down, _ = weight(count * width, inner, None)
    experts = Experts(router, gate_up, down, chosen, normalised=True, router_bias=bias)
    kernels.experts.check(experts)
    made = kernels.experts(x, RowNorm(mx.ones((width,), BF16), EPSILON), experts)
    logits = normed(exact) @ np.array(router.astype(mx.float32)).T + added
    kept = np.sort(np.take_along_axis(logits, np.array(made[2]), 1), 1)
    np.testing.assert_allclose(kept, np.sort(logits, 1)[:, -chosen:], rtol=2e-2, atol=2e-2)

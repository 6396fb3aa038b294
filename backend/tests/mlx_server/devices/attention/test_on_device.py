"""The kernels on the device at hand, or why there are none."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.devices.attention.check import (
    AttentionFeatures,
    check_chunks,
    self_check,
)
from mlx_manager.mlx_server.devices.attention.codes import group_of
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, CodedShape, Rotary
from mlx_manager.mlx_server.devices.attention.kinds import (
    CODED,
    HEAD_DIMS,
    build,
    build_chunks,
    build_expansion,
)
from mlx_manager.mlx_server.devices.cuda.mla import latent
from mlx_manager.mlx_server.devices.cuda.mla.check import (
    check_expansion,
    check_latent,
)
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.metal import attention as metal


def shape(head_dim=128, page_size=16, dtype=mx.bfloat16) -> AttentionShape:
    return AttentionShape(8, 2, head_dim, page_size, dtype)


def on_gpu() -> bool:
    return mx.default_device().type == mx.gpu


@pytest.mark.parametrize(
    ("of", "reason"),
    [(shape(head_dim=72), "head size 72"), (shape(page_size=24), "page size 24")],
)
def test_shapes_that_are_not_served_are_named(of, reason):
    kernels = build(of)
    assert isinstance(kernels, Unsupported)
    assert reason in kernels.reason


@pytest.mark.skipif(on_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("head_dim", [128, 512])
def test_without_a_gpu_that_is_the_reason(head_dim):
    assert build(shape(head_dim)) == Unsupported("the default device is no GPU")


@pytest.mark.skipif(on_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("head_dim", [72, 112, 160, 192])
def test_heads_of_some_sizes_are_served_on_a_mac_alone(head_dim, monkeypatch):
    assert build(shape(head_dim)) == Unsupported(
        f"head size {head_dim}: the kernels serve {HEAD_DIMS}"
    )
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert build(shape(head_dim)) == Unsupported("the default device is no GPU")


@pytest.mark.skipif(not on_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", metal.HEAD_DIMS if mx.metal.is_available() else HEAD_DIMS)
@pytest.mark.parametrize(
    "features",
    [
        AttentionFeatures(),
        AttentionFeatures(window=100, softcap=30.0),
        AttentionFeatures(sinks=True),
    ],
)
def test_kernels_pass_their_self_check(head_dim, features):
    kernels = build(shape(head_dim))
    assert not isinstance(kernels, Unsupported)
    assert self_check(kernels, features, Rotary(head_dim, False, 1e-6)) is None


@pytest.mark.skipif(not on_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_kernels_over_keys_and_values_in_8_bits_pass_their_check(head_dim, dtype):
    group = group_of(head_dim)
    assert group
    assert CODED.outcome(CodedShape(shape(head_dim, dtype=dtype), group)) is None


@pytest.mark.skipif(not on_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (32, 4), (16, 1)])
def test_kernels_for_wide_heads_in_groups_of_any_size_pass_their_self_check(
    q_heads, kv_heads, dtype
):
    kernels = build(AttentionShape(q_heads, kv_heads, 512, 16, dtype))
    assert not isinstance(kernels, Unsupported)
    assert self_check(kernels, rotary=Rotary(128, False, 1e-6)) is None


@pytest.mark.skipif(not on_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [256, 512])
@pytest.mark.parametrize("how", [{"values": True}, {"alone": True}])
def test_values_that_are_normed_and_queries_alone_pass_the_self_check(head_dim, how):
    kernels = build(shape(head_dim))
    assert not isinstance(kernels, Unsupported)
    assert self_check(kernels, rotary=Rotary(head_dim, False, 1e-6, **how)) is None


@pytest.mark.skipif(not on_gpu() or mx.metal.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    "features",
    [
        AttentionFeatures(),
        AttentionFeatures(window=100, softcap=30.0),
        AttentionFeatures(sinks=True),
    ],
)
def test_kernels_for_chunks_pass_their_check(head_dim, features):
    kernels = build_chunks(shape(head_dim))
    assert not isinstance(kernels, Unsupported)
    assert check_chunks(kernels, features) is None


@pytest.mark.skipif(not on_gpu() or mx.metal.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize(
    "of",
    [
        LatentShape(2, 128, 32, 64, 192, 16, mx.float16, 64),
        LatentShape(16, 512, 64, 128, 3072, 16, mx.bfloat16, 128),
        LatentShape(20, 512, 64, 192, 768, 16, mx.bfloat16, 256),
        LatentShape(40, 256, 32, 64, 768, 32, mx.bfloat16, 64),
        LatentShape(128, 512, 64, 128, 1536, 16, mx.float16, 128),
    ],
    ids=lambda of: f"{of.q_heads}-heads",
)
def test_kernels_for_latent_attention_pass_their_check(of, traditional):
    kernels = latent.build(of)
    assert not isinstance(kernels, Unsupported)
    assert check_latent(kernels, traditional=traditional) is None


@pytest.mark.skipif(not on_gpu() or mx.metal.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize(
    "of",
    [
        LatentShape(2, 128, 32, 64, 192, 16, mx.float16, 48),
        LatentShape(16, 512, 64, 128, 3072, 16, mx.bfloat16, 128),
        LatentShape(20, 512, 64, 192, 768, 32, mx.bfloat16, 256),
    ],
    ids=lambda of: f"{of.expanded.head_dim}-wide",
)
def test_expanded_latents_pass_their_check(of, traditional):
    expansion = build_expansion(of, traditional=traditional)
    assert not isinstance(expansion, Unsupported), expansion
    assert check_expansion(expansion, traditional=traditional) is None

"""The Metal sources through clang's front end: types, templates and address spaces, without a
Mac."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import mlx.core as mx
import pytest
from devices.front_end import PYTHON, Kernel, judged

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, AttentionVariant, Rotary
from mlx_manager.mlx_server.devices.attention.writer import Pools
from mlx_manager.mlx_server.devices.draws import kernel as draws
from mlx_manager.mlx_server.devices.kernel import KernelSource
from mlx_manager.mlx_server.devices.metal import attention as metal
from mlx_manager.mlx_server.devices.metal.launch import TYPES

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="clang is not in .venv-clients; `make clients` installs it"
)
INTEGERS = {"table", "lengths", "items", "slots", "written"}
FLOATS = {"sinks", "rotation", "partial", "partial_figures", "parameters"}
CODES = {"codes": "int8_t", "scales": "bfloat16_t"}
UNSIGNED = {"seeds", "drawn", "tokens", "following"}


def kernel(source: KernelSource, dtype: mx.Dtype, few: Sequence[str]) -> Kernel:
    """few: inputs of fewer than 8 elements."""

    def element(name: str) -> str:
        if name in INTEGERS:
            return "int32_t"
        if name in UNSIGNED:
            return "uint32_t"
        if name in CODES:
            return CODES[name]
        return "float" if name in FLOATS else TYPES[dtype]

    inputs = [(name, element(name), name in few) for name in source.inputs]
    outputs = [(name, element(name)) for name in source.outputs]
    return Kernel(source.unique_name, source.body, inputs, outputs)


def attention(dim: int, dtype: mx.Dtype) -> list[KernelSource]:
    of = AttentionShape(14, 2, dim, 16, dtype)
    rotaries = [
        Rotary(dim, False, None),
        Rotary(dim // 2, True, 1e-6, gated=True),
        Rotary(dim, False, 1e-6, values=True),
    ]
    variants = [
        variant
        for rotary in (None, *rotaries)
        for variant in (
            AttentionVariant(0.1, None, None, sinks=False, divided=False, rotary=rotary),
            AttentionVariant(0.1, 64, 30.0, sinks=True, divided=True, rotary=rotary),
        )
    ]
    return [
        *(metal.attend_source(of, variant) for variant in variants),
        *(metal.attend_source(of, replace(variant, coded=dim // 2)) for variant in variants[:2]),
        *(metal.merge_source(of, sinks=sinks) for sinks in (False, True)),
        *(metal.rotate_source(of, rotary) for rotary in rotaries),
        metal.rotate_source(of, Rotary(dim, False, 1e-6, alone=True)),
        metal.write_source(of.pools),
    ]


@pytest.mark.parametrize("few", [(), ("lengths", "sinks", "slots", "rotation", "table", "drawn")])
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
def test_clang_takes_every_kernel_whatever_the_address_space_of_what_it_is_given(dtype, few):
    """Metal hands small arrays over in another address space than large ones."""
    sources = [source for dim in metal.HEAD_DIMS for source in attention(dim, dtype)]
    sources += [metal.write_source(Pools(1, 192, 128, dtype)), draws.metal_source(dtype)]
    for header, alike in groupby(sources, key=lambda source: source.header):
        verdict = judged(header, *(kernel(source, dtype, few) for source in alike))
        assert not verdict.said


def test_arrays_are_indexed_by_what_the_compiler_knows():
    """Or else they are not kept in registers."""
    [source, *_] = attention(128, mx.float16)
    assert not judged(source.header).loops
    assert not judged(draws.metal_source(mx.float16).header).loops


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("const float* p = q;", "cannot initialize"),
        ("const threadgroup float* p = q;", "cannot initialize"),
        ("out[0] = metal::max(q[0], 1);", "ambiguous"),
        ("q[0] = 2.0f;", "not assignable"),
    ],
)
def test_clang_refuses_what_metal_would(body, complaint):
    verdict = judged("", Kernel("k", body, [("q", "float", False)], [("out", "float")]))
    assert any(complaint in said for said in verdict.said), verdict


def test_a_loop_whose_end_is_known_only_when_it_runs_is_found():
    body = "float a[4]; int n = q[0]; for (int i = 0; i < n; i++) a[i] = 1.0f; out[0] = a[0];"
    verdict = judged("", Kernel("k", body, [("q", "int32_t", False)], [("out", "float")]))
    assert verdict.loops == ["3: a"]

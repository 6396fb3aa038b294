from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_manager.mlx_server.devices.cpu import blas, elf

LIBMLX = blas._libmlx_with_reference_blas()
needs_reference_blas = pytest.mark.skipif(LIBMLX is None, reason="needs the mlx-cpu wheel")

REPORT = """
import dataclasses, json
from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas
report = load_fast_blas()
import mlx.core as mx
x, w = mx.arange(12.0).reshape(3, 4), mx.arange(20.0).reshape(5, 4)
print(json.dumps(dataclasses.asdict(report) | {"sum": (x @ w.T).sum().item()}))
"""


def report_of_new_process(**environment: str) -> dict[str, str | float]:
    outcome = subprocess.run(
        [sys.executable, "-c", REPORT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert outcome.stderr == ""
    return json.loads(outcome.stdout)


@needs_reference_blas
def test_products_of_every_routed_kind_are_right():
    report = blas.load_fast_blas()
    assert "x the reference BLAS" in report.reason
    generator = np.random.default_rng(0)
    for dtype, tolerance in ((mx.float32, 1e-3), (mx.float64, 1e-10), (mx.complex64, 1e-3)):
        with mx.stream(mx.cpu):
            x, w = (mx.array(generator.normal(size=(33, 65)), dtype=dtype) for _ in range(2))
            got = np.array(x @ w.T)
        assert np.allclose(got, np.array(x) @ np.array(w).T, atol=tolerance)


@needs_reference_blas
def test_imports_of_libmlx_point_into_the_chosen_library():
    chosen = blas.BlasLibrary.open(blas.load_fast_blas().source)
    slots = elf.imported_slots(LIBMLX, blas.FUNCTIONS)
    assert {slot.name for slot in slots} == set(blas.FUNCTIONS)
    for slot in slots:
        assert ctypes.c_uint64.from_address(slot.address).value == chosen.address(slot.name)


@needs_reference_blas
def test_owner_can_switch_it_off():
    report = report_of_new_process(MLX_SERVER_BLAS="off")
    assert report["name"] == "reference BLAS"
    assert report["reason"] == "MLX_SERVER_BLAS is off"
    assert report["sum"] == 3210


@needs_reference_blas
@pytest.mark.parametrize(
    ("library", "reason"),
    [("/nowhere/libblas.so", "cannot open shared object"), ("libm.so.6", "has no cblas_sgemm")],
)
def test_unfit_library_is_named_and_the_next_one_serves(library: str, reason: str):
    report = report_of_new_process(MLX_SERVER_BLAS=library)
    assert library in report["reason"]
    assert reason in report["reason"]
    assert report["source"] != library
    assert report["sum"] == 3210


@needs_reference_blas
def test_owner_can_name_a_library_and_a_number_of_threads():
    wheel = blas.file_of_package("scipy_openblas32", "lib/libscipy_openblas.so")
    if wheel is None:
        pytest.skip("needs scipy-openblas32")
    report = report_of_new_process(MLX_SERVER_BLAS=str(wheel), OPENBLAS_NUM_THREADS="3")
    assert report["source"] == str(wheel)
    assert report["name"].startswith("OpenBLAS")
    assert report["reason"].endswith("uses 3")


def test_other_builds_of_mlx_are_left_alone_and_say_so():
    if LIBMLX is not None:
        pytest.skip("needs a Metal or CUDA build of MLX")
    assert blas.load_fast_blas().source == ""


def test_at_least_one_core_is_available():
    assert blas.available_cores() >= 1

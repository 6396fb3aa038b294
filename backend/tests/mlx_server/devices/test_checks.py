"""Which kernels are checked, and how a check is told."""

from __future__ import annotations

from itertools import chain, repeat

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.devices.attention.check import check_writer
from mlx_manager.mlx_server.devices.attention.kinds import HEAD_DIMS
from mlx_manager.mlx_server.devices.attention.writer import Pools
from mlx_manager.mlx_server.devices.checks import KINDS, KernelCheck, kernel_checks, reported
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.kinds import DTYPES, Outcome

POOLS = Pools(2, 24, 16, mx.bfloat16)
PAGE = 16


def told(*outcomes: Outcome) -> dict[str, object]:
    """Return the report of a check with these outcomes, of which the last repeats for ever."""
    coming = chain(outcomes, repeat(outcomes[-1]))
    return reported(KernelCheck("attention", 64, mx.bfloat16, lambda: next(coming)))


def test_attention_is_checked_for_every_head_size_and_dtype() -> None:
    checked = {(c.head_size, c.dtype) for c in kernel_checks() if c.kernel == "attention"}
    assert checked >= {(size, dtype) for size in HEAD_DIMS for dtype in DTYPES}


def test_every_kind_is_checked_for_every_dtype() -> None:
    checked = {(c.kernel, c.dtype) for c in kernel_checks()}
    assert checked == {(kind.name, dtype) for kind in KINDS for dtype in DTYPES}


def test_no_two_checks_are_the_same() -> None:
    named = [(check.kernel, check.head_size, check.dtype) for check in kernel_checks()]
    assert len(named) == len(set(named))


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="there are kernels here")
def test_where_there_is_no_gpu_every_check_says_that_there_is_no_kernel() -> None:
    for check in kernel_checks():
        assert isinstance(check.run(), Unsupported), check


@pytest.mark.skipif(mx.default_device().type != mx.gpu, reason="there is no GPU here")
def test_kernels_of_this_gpu_pass() -> None:
    outcomes = {(c.kernel, c.head_size, c.dtype): c.run() for c in kernel_checks()}
    assert {check: wrong for check, wrong in outcomes.items() if isinstance(wrong, str)} == {}


def test_a_kernel_that_is_right_is_told_with_its_seconds() -> None:
    entry = told(None)
    assert entry.keys() == {
        "kernel",
        "head_size",
        "dtype",
        "result",
        "seconds",
        "seconds_to_compile",
    }
    assert (entry["result"], entry["dtype"]) == ("right", "bfloat16")


def test_a_kernel_that_is_wrong_is_told_with_what_is_wrong() -> None:
    entry = told("attention differs")
    assert (entry["result"], entry["reason"]) == ("wrong", "attention differs")


def test_a_kernel_that_fails_only_when_it_runs_again_is_wrong() -> None:
    entry = told(None, "attention differs")
    assert (entry["result"], entry["reason"]) == ("wrong", "attention differs")


def test_a_shape_without_a_kernel_is_told_with_the_reason() -> None:
    entry = told(Unsupported("head size 64"))
    assert (entry["result"], entry["reason"]) == ("no kernel", "head size 64")


def written(k_pool: mx.array, v_pool: mx.array, k: mx.array, v: mx.array, slots: mx.array):
    """As a kernel writes: in place."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_pool[:, slot], v_pool[:, slot] = k[row, :, 0], v[row, :, 0]
    return slots


def test_a_write_that_arrives_passes() -> None:
    assert check_writer(written, POOLS, PAGE) is None


def test_a_write_one_slot_too_far_is_found() -> None:
    def beside(k_pool, v_pool, k, v, slots):
        return written(k_pool, v_pool, k, v, mx.where(slots >= 0, (slots + 1) % (2 * PAGE), slots))

    assert "arrived elsewhere" in str(check_writer(beside, POOLS, PAGE))


def test_a_write_of_padding_is_found() -> None:
    def padding_too(k_pool, v_pool, k, v, slots):
        return written(k_pool, v_pool, k, v, mx.maximum(slots, 5))

    assert "arrived elsewhere" in str(check_writer(padding_too, POOLS, PAGE))

"""A GPU's errors, in the words that MLX has for them."""

from __future__ import annotations

import pytest

from mlx_manager.mlx_server.devices.metal.faults import WITHIN, GPUFaults

METAL = "[METAL] Command buffer execution failed: "
TIMEOUT = f"{METAL}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
MEMORY = f"{METAL}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."
IGNORED = (
    f"{METAL}Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_process_that_is_ignored_is_lost_at_once(clock: Clock) -> None:
    faults = GPUFaults(clock)
    faults.note(RuntimeError(IGNORED))
    assert faults.fatal is not None
    assert IGNORED in faults.fatal


def test_three_errors_in_a_minute_are_too_many(clock: Clock) -> None:
    faults = GPUFaults(clock)
    for text, seconds in ((TIMEOUT, WITHIN / 2), (MEMORY, WITHIN / 2), (TIMEOUT, 0)):
        assert faults.fatal is None
        faults.note(RuntimeError(text))
        clock.now += seconds
    assert faults.fatal is not None
    assert TIMEOUT in faults.fatal


def test_errors_now_and_then_are_not(clock: Clock) -> None:
    faults = GPUFaults(clock)
    for _ in range(10):
        faults.note(RuntimeError(TIMEOUT))
        clock.now += WITHIN / 2 + 1
    assert faults.fatal is None


@pytest.mark.parametrize(
    "text", ["no such token", "[malloc] Unable to allocate 4096 bytes.", "SubmissionsIgnored"]
)
def test_other_errors_say_nothing_of_the_gpu(clock: Clock, text: str) -> None:
    faults = GPUFaults(clock)
    for _ in range(5):
        faults.note(RuntimeError(text))
    assert faults.fatal is None

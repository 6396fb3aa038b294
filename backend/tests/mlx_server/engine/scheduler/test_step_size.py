"""How much of prompts a step takes on. What memory that leaves is tested where forwards are."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.devices.table import CPU, CUDA, METAL, Device
from mlx_manager.mlx_server.engine.scheduler.pace import StepLimits
from mlx_manager.mlx_server.engine.scheduler.step_size import MOST_LAUNCHES, StepSize, limits_of

SIZE = StepSize(2048, ample=8192)


@given(costs=st.floats(0.3, 3), tokens=st.integers(4096, 60_000))
def test_prompts_of_a_burst_get_their_first_tokens_as_soon_as_of_any_one_size(costs, tokens):
    """costs: what a step costs besides its tokens, in those of half a usual step."""

    def mean(sizes: list[int]) -> float:
        """Of the times until each token has been processed, in tokens."""
        left, total = tokens, 0.0
        for size in sizes:
            total += (costs * SIZE.tokens / 2 + size) * left
            left -= size
        assert not left
        return total / tokens

    def by(each: int) -> list[int]:
        return [each] * (tokens // each) + [tokens % each]

    own, left = [], tokens
    while left:
        own.append(min(SIZE.wanted(left, 1), left))
        left -= own[-1]
    best = min(mean(by(each)) for each in (2048, 4096, 8192, 16_384))
    assert mean(own) <= 1.1 * best


@pytest.mark.parametrize(
    ("layers", "launches", "buffers"),
    [(1, None, 1), (32, None, 5), (64, "40", 12), (32, "1000", 1)],
)
def test_a_macs_step_takes_as_long_as_its_command_buffers_may(
    monkeypatch: pytest.MonkeyPatch, layers: int, launches: str | None, buffers: int
) -> None:
    monkeypatch.delenv(MOST_LAUNCHES, raising=False)
    if launches is not None:
        monkeypatch.setenv(MOST_LAUNCHES, launches)
    limits = limits_of(METAL, layers)
    assert limits.seconds == pytest.approx(0.3 * buffers)
    assert (limits.first, limits.seen, limits.least_by_host) == (256, inf, True)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
def test_other_devices_bear_everything(device: Device) -> None:
    assert limits_of(device, 32, 32) == StepLimits()


def test_chunks_of_modules_that_attend_by_themselves_are_cut_by_their_scores_on_a_mac() -> None:
    assert limits_of(METAL, 32, 128).seen * 128 == METAL.scores


@pytest.mark.parametrize(("tokens", "shortest", "wanted"), [(6000, 6000, 6000), (6000, 1, 3505)])
def test_a_prompt_is_not_cut_for_others_sake(tokens: int, shortest: int, wanted: int) -> None:
    assert SIZE.wanted(tokens, shortest) == wanted

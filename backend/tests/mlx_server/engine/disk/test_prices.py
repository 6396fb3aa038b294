"""Prices of computing and reading, and what is chosen by them."""

from __future__ import annotations

import pytest

from mlx_manager.mlx_server.engine.disk.prices import LOOKS, Prices


def prices(computed: float | None, read: float | None) -> Prices:
    """Prices of tokens of a byte each, so many a second."""
    found = Prices(1)
    if computed is not None:
        found.observe_step(1000, 1000 / computed)
    if read is not None:
        found.read.observe(1000, 1000 / read)
    return found


@pytest.mark.parametrize(("computed", "read"), [(None, None), (100, None), (None, 100)])
def test_all_is_read_until_prices_are_known(computed: float | None, read: float | None) -> None:
    assert prices(computed, read).computed_meanwhile(1000) == 0


def test_both_take_as_long_where_reading_is_faster() -> None:
    meanwhile = prices(100, 300).computed_meanwhile(1000)
    assert meanwhile == 250
    assert meanwhile / 100 == pytest.approx((1000 - meanwhile) / 300)
    assert prices(100, 1e9).computed_meanwhile(1000) == 0


def test_nothing_is_read_where_computing_is_faster_but_now_and_then() -> None:
    dear = prices(1000, 100)
    chosen = [dear.computed_meanwhile(500) for _ in range(3 * LOOKS)]
    assert chosen.count(None) == 3 * (LOOKS - 1)
    # The disk has become fast.
    for _ in range(20):
        dear.read.observe(1e6, 1.0)
    assert dear.computed_meanwhile(500) is not None


def test_steps_with_few_prompt_tokens_tell_nothing() -> None:
    found = Prices(1)
    found.observe_step(8, 1.0)
    found.observe_step(1000, -0.1)
    assert found.prefill.value is None

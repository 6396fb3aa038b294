from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_manager.mlx_server.engine.pace import STRETCH, Pace

MOST, PAGE = 512, 16


def taught(decode: float, token: float, rows: int = 4) -> Pace:
    """A pace that has seen steps of `decode` seconds, and prompt tokens that add `token` each."""
    pace = Pace(MOST, PAGE, PAGE)
    for _ in range(60):
        pace.observe(decode, rows, 0)
        pace.observe(decode + 64 * token, rows, 64)
    return pace


def test_with_nobody_waiting_for_a_token_a_prompt_gets_all_there_is() -> None:
    assert Pace(MOST, PAGE, PAGE).budget(0, 1) == MOST
    assert taught(0.01, 1.0).budget(0, 3) == MOST


def test_before_anything_is_known_running_rows_come_first() -> None:
    assert Pace(MOST, PAGE, PAGE).budget(4, 1) == PAGE


@pytest.mark.parametrize("decode", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("token", [1e-5, 1e-4, 1e-3])
def test_a_step_with_prompt_tokens_takes_as_much_longer_as_is_promised(
    decode: float, token: float
) -> None:
    budget = taught(decode, token, rows=1).budget(1, 1)
    assert PAGE <= budget <= MOST
    assert budget % PAGE == 0
    affordable = (STRETCH - 1) * max(decode, token) / token
    assert budget == PAGE or budget <= affordable * 1.01
    # And no much less than that.
    assert budget == MOST or budget + PAGE >= affordable * 0.99


def test_a_page_of_a_prompt_is_processed_however_slow_that_is() -> None:
    assert taught(0.001, 1.0, rows=1).budget(1, 1) == PAGE


def test_a_slower_device_gives_prompts_less() -> None:
    budgets = [taught(0.01, token).budget(1, 1) for token in (1e-5, 5e-5, 1e-4, 3e-4)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[-1]


def test_prompts_that_outnumber_the_rows_are_not_made_to_wait_behind_them() -> None:
    pace = taught(0.01, 1e-3, rows=1)
    assert pace.budget(4, 8) > pace.budget(4, 1)


def test_it_follows_a_device_that_changes() -> None:
    pace = taught(0.01, 1e-5)
    before = pace.budget(1, 1)
    for _ in range(60):
        pace.observe(0.01 + 64 * 1e-3, 4, 64)
        pace.observe(0.01, 4, 0)
    assert pace.budget(1, 1) < before


def test_one_odd_step_does_not_undo_what_was_learnt() -> None:
    pace = taught(0.01, 1e-4)
    before = pace.budget(1, 1)
    pace.observe(1.0, 4, 0)
    pace.observe(0.01, 4, 0)
    for _ in range(20):
        pace.observe(0.01, 4, 0)
    assert abs(pace.budget(1, 1) - before) <= 0.3 * before


@settings(max_examples=200)
@example(steps=[(0.0, 4, 64)], rows=4, prompts=1)
@given(
    steps=st.lists(
        # A coarse clock says that a step took no time at all.
        st.tuples(
            st.one_of(st.just(0.0), st.floats(1e-9, 10)), st.integers(0, 128), st.integers(0, 512)
        ),
        max_size=30,
    ),
    rows=st.integers(0, 128),
    prompts=st.integers(0, 500),
)
def test_the_budget_is_always_whole_pages_within_its_limits(
    steps: list[tuple[float, int, int]], rows: int, prompts: int
) -> None:
    pace = Pace(MOST, PAGE, PAGE)
    for seconds, running, tokens in steps:
        pace.observe(seconds, running, tokens)
    budget = pace.budget(rows, prompts)
    assert PAGE <= budget <= MOST
    assert budget % PAGE == 0

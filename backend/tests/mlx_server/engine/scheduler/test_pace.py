from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.scheduler.pace import (
    BOLDNESS,
    BUSY,
    FEWEST,
    LIKE,
    LONG,
    SHORT,
    STRETCH,
    Pace,
    StepLimits,
)

MOST, PAGE = 512, 16
EIGHT = StepLoad(rows=8)


@dataclass
class Machine:
    """Takes time by a law: so much a step, a row, a prompt token, a token that one of those sees,
    a chunk, and a token before it. Now and then a step takes several times as long."""

    step: float = 4e-3
    row: float = 3e-4
    token: float = 1.5e-4
    seen: float = 1.5e-7
    chunk: float = 5e-4
    context: float = 5e-7
    noise: float = 0.0
    odd: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def law(self, load: StepLoad) -> float:
        seconds = self.step + self.row * load.rows if load.rows else 0.0
        if load.tokens:
            seconds += self.chunk + self.token * load.tokens
            seconds += self.seen * load.seen + self.context * load.context
        return seconds

    def run(self, pace: Pace, load: StepLoad) -> float:
        """The step's length as a multiple of what it would be without prompts."""
        seconds = self.law(load) * self.rng.uniform(1 - self.noise, 1 + self.noise)
        pace.observe(seconds * (5 if self.rng.random() < self.odd else 1), load)
        return self.law(load) / self.law(StepLoad(load.rows)) if load.rows else 1.0

    def idle(self, pace: Pace, rows: int, steps: int = 60) -> None:
        for _ in range(steps):
            self.run(pace, StepLoad(rows))

    def prompt(self, pace: Pace, rows: int, length: int, begin: int = 0) -> list[Chunk]:
        chunks = []
        while begin < length:
            given = pace.budget(1)(StepLoad(rows), begin) // PAGE * PAGE
            assert PAGE <= given <= MOST
            load = StepLoad(rows).with_chunk(begin, min(given, length - begin))
            chunks.append(Chunk(begin, load.tokens, self.run(pace, load)))
            begin += load.tokens
        return chunks


@dataclass(frozen=True)
class Chunk:
    before: int
    tokens: int
    stretch: float


def taught(machine: Machine, rows: int = 8) -> Pace:
    """A pace that has seen rows run, and a prompt beside them."""
    pace = Pace(MOST, PAGE)
    machine.idle(pace, rows)
    machine.prompt(pace, rows, 2000)
    machine.idle(pace, rows)
    return pace


def test_with_nobody_waiting_for_a_token_a_prompt_gets_all_there_is() -> None:
    assert Pace(MOST, PAGE).budget(1)(StepLoad(), 0) == MOST
    assert taught(Machine(token=1e-4)).budget(3)(StepLoad(), 0) == MOST


def alone(machine: Machine, length: int) -> tuple[list[StepLoad], float]:
    """A prompt's steps while nothing else is there, and the seconds of large ones."""
    pace = Pace(MOST, PAGE)
    machine.prompt(pace, 0, length)
    chunks = machine.prompt(pace, 0, length)
    whole = (
        StepLoad().with_chunk(begin, min(MOST, length - begin)) for begin in range(0, length, MOST)
    )
    return [StepLoad().with_chunk(c.before, c.tokens) for c in chunks], sum(map(machine.law, whole))


@pytest.mark.parametrize("token", [1e-4, 3e-4, 7e-4])
@pytest.mark.parametrize("seen", [0, 2e-8, 1.5e-7])
def test_who_comes_while_a_prompt_is_processed_alone_does_not_wait_long(
    token: float, seen: float
) -> None:
    machine = Machine(token=token, seen=seen)
    steps, whole = alone(machine, 6000)
    assert all(machine.law(step) <= 1.1 * LONG or step.tokens <= BUSY for step in steps)
    assert sum(map(machine.law, steps)) <= 1.05 * whole


def test_where_steps_are_short_a_prompt_has_them_as_large_as_they_may_be() -> None:
    steps, _ = alone(Machine(token=5e-5, seen=0, chunk=0.05), 8192)
    assert {step.tokens for step in steps} == {MOST}


def test_steps_of_a_slow_device_keep_it_busy() -> None:
    steps, _ = alone(Machine(token=0.1), 4096)
    assert {step.tokens for step in steps} == {BUSY}


@pytest.mark.parametrize(
    ("chunk", "context"), [(0.03, 0), (0.1, 0), (1.0, 0), (0.01, 1e-5), (0.01, 5e-5), (0.01, 1e-4)]
)
def test_steps_that_cost_much_besides_their_tokens_are_not_made_many(
    chunk: float, context: float
) -> None:
    machine = Machine(token=2e-3, seen=0, chunk=chunk, context=context)
    steps, whole = alone(machine, 4096)
    assert sum(map(machine.law, steps)) <= 1.15 * whole


def test_before_anything_is_known_running_rows_have_a_step_alone_and_come_first() -> None:
    pace, machine = Pace(MOST, PAGE), Machine()
    assert pace.budget(1)(EIGHT, 0) == 0
    machine.run(pace, EIGHT)
    assert pace.budget(1)(EIGHT, 0) == PAGE


def test_a_crowd_that_came_at_once_does_not_make_later_prompts_crawl() -> None:
    pace, machine = Pace(MOST, PAGE), Machine()
    # A burst begins: its steps are all with prompts, the rows that have begun beside them.
    for rows in range(0, 40, 8):
        machine.run(pace, StepLoad(rows).with_chunk(0, MOST))
    given = []
    for _ in range(60):
        tokens = pace.budget(1)(StepLoad(40), 0)
        given.append(tokens)
        machine.run(pace, StepLoad(40).with_chunk(0, tokens) if tokens else StepLoad(40))
    assert given[0] == 0
    # What a step of 40 rows leaves room for.
    fair = (STRETCH - 1) * machine.law(StepLoad(40)) / machine.token
    assert given[-1] >= fair / 2


def test_steps_of_many_more_rows_than_ever_have_one_alone_now_and_then() -> None:
    pace, machine = Pace(MOST, PAGE), Machine()
    machine.idle(pace, 8)
    assert [pace.budget(1)(StepLoad(rows), 0) > 0 for rows in (8, 16, 17)] == [True, True, False]
    machine.run(pace, StepLoad(17))
    assert pace.budget(1)(StepLoad(34), 0) > 0


def test_from_the_first_prompt_on_steps_hardly_exceed_what_they_may_take() -> None:
    pace, machine = Pace(MOST, PAGE), Machine(seen=2e-8)
    machine.idle(pace, 8)
    for _ in range(3):
        steps = machine.prompt(pace, 8, 4000)
        assert max(s.stretch for s in steps) <= 1.2 * STRETCH
        machine.idle(pace, 8)


@pytest.mark.parametrize("token", [1e-5, 1e-4, 3e-4])
@pytest.mark.parametrize("seen", [1e-9, 2e-8, 5e-8])
def test_a_step_takes_what_it_may_however_far_its_prompt_has_come(
    token: float, seen: float
) -> None:
    machine = Machine(token=token, seen=seen, context=0)
    pace = taught(machine)
    for step in machine.prompt(pace, 8, 6000)[4:-1]:
        bounded = step.tokens == MOST
        longer = StepLoad(8).with_chunk(step.before, step.tokens + 2 * PAGE)
        assert step.stretch <= STRETCH * 1.1 or step.tokens == PAGE
        assert bounded or machine.law(longer) / machine.law(EIGHT) >= STRETCH * 0.9


def test_the_further_a_prompt_has_come_the_less_of_it_is_processed() -> None:
    pace = taught(Machine(seen=5e-8))
    given = [pace.budget(1)(EIGHT, before) for before in (0, 500, 1000, 2000, 4000, 8000)]
    assert given == sorted(given, reverse=True)
    assert given[0] >= 2 * given[-1]


def test_two_prompts_in_a_step_take_no_longer_than_one() -> None:
    machine = Machine(seen=2e-8)
    pace = taught(machine)
    budget = pace.budget(2)
    half = budget(EIGHT, 0) // 2
    load = EIGHT.with_chunk(0, half)
    load = load.with_chunk(1000, budget(load, 1000))
    assert load.tokens < 2 * half
    assert machine.law(load) / machine.law(EIGHT) <= STRETCH * 1.1


@settings(max_examples=25)
@given(
    noise=st.floats(0, 0.3),
    odd=st.floats(0, 0.03),
    seed=st.integers(0, 1000),
    token=st.floats(2e-5, 2e-4),
    seen=st.floats(1e-9, 4e-8),
)
def test_noise_and_odd_steps_neither_hold_prompts_up_nor_streams(
    noise: float, odd: float, seed: int, token: float, seen: float
) -> None:
    machine = Machine(noise=noise, odd=odd, token=token, seen=seen, rng=random.Random(seed))
    pace = taught(machine)
    steps = [s for s in machine.prompt(pace, 8, 4000) if s.tokens > PAGE]
    if len(steps) > 10:
        assert fmean(s.stretch for s in steps) <= 1.2 * STRETCH
        assert fmean(s.stretch for s in steps) >= 0.6 * STRETCH or steps[1].tokens == MOST
        late = sorted(s.stretch for s in steps)[int(0.95 * len(steps))]
        assert late <= 1.6 * STRETCH


def test_rows_that_join_and_leave_are_allowed_for() -> None:
    machine = Machine(row=1e-3, seen=1e-8)
    pace = taught(machine, rows=2)
    for rows in (8, 16, 4, 8, 1, 16, 2):
        machine.idle(pace, rows, 20)
        machine.prompt(pace, rows, 1000)
    for rows in (2, 4, 8, 16):
        steps = machine.prompt(pace, rows, 1000)[:-1]
        assert max(s.stretch for s in steps) <= 1.25 * STRETCH
        assert max(s.stretch for s in steps) >= 0.7 * STRETCH


def test_prompts_processed_alone_do_not_mislead() -> None:
    machine = Machine(seen=2e-8)
    pace = Pace(MOST, PAGE)
    for _ in range(3):
        machine.prompt(pace, 0, 4000)
        machine.idle(pace, 8)
    steps = machine.prompt(pace, 8, 4000)
    assert max(s.stretch for s in steps) <= 1.3 * STRETCH


def test_a_little_is_not_taken_for_a_measure_of_much() -> None:
    pace = Pace(MOST, PAGE)
    for _ in range(20):
        pace.observe(0.01, EIGHT)
    pace.observe(0.0100001, EIGHT.with_chunk(0, PAGE))
    assert pace.budget(1)(EIGHT, 0) <= BOLDNESS * PAGE


def test_a_page_of_a_prompt_is_processed_however_slow_that_is() -> None:
    assert taught(Machine(token=1.0)).budget(1)(EIGHT, 100_000) == PAGE


def test_a_slower_device_gives_prompts_less() -> None:
    tokens = (1e-5, 5e-5, 1e-4, 3e-4)
    budgets = [taught(Machine(token=token)).budget(1)(EIGHT, 0) for token in tokens]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[-1]


def test_prompts_that_outnumber_the_rows_are_not_made_to_wait_behind_them() -> None:
    pace = taught(Machine(token=1e-3))
    assert pace.budget(9)(EIGHT, 0) == MOST > pace.budget(1)(EIGHT, 0)


def test_it_follows_a_device_that_changes() -> None:
    pace = taught(Machine(token=3e-5))
    before = pace.budget(1)(EIGHT, 0)
    slower = Machine(token=3e-4)
    for _ in range(3):
        slower.prompt(pace, 8, 2000)
        slower.idle(pace, 8)
    assert pace.budget(1)(EIGHT, 0) < before / 2
    assert max(s.stretch for s in slower.prompt(pace, 8, 500)) <= 1.3 * STRETCH


def test_one_odd_step_does_not_undo_what_was_learnt() -> None:
    pace = taught(Machine())
    before = pace.budget(1)(EIGHT, 0)
    pace.observe(1.0, EIGHT)
    pace.observe(5.0, EIGHT.with_chunk(1000, PAGE))
    assert abs(pace.budget(1)(EIGHT, 0) - before) <= 0.3 * before


MAC = StepLimits(first=256, seconds=0.3, least_by_host=True)


def macs(machine: Machine, rows: int = 0, limits: StepLimits = MAC) -> tuple[Pace, list[StepLoad]]:
    """A Mac's pace after a long prompt beside so many rows, and the prompt's steps."""
    pace = Pace(2048, 256, 1, limits)
    machine.idle(pace, rows)
    steps, begun = [], 0
    while begun < 20_000:
        # As many prompts as rows, or more, so that these give way.
        load = StepLoad(rows)
        tokens = pace.budget(rows + 1)(load, begun)
        load = load.with_chunk(begun, tokens)
        steps.append(load)
        machine.run(pace, load)
        begun += tokens
    return pace, steps


@pytest.mark.parametrize("token", [1e-5, 1e-4, 1e-3, 6.6e-3, 0.02])
@pytest.mark.parametrize("seen", [0, 1e-8, 1e-6])
@pytest.mark.parametrize("rows", [0, 8])
def test_a_prompt_begins_with_few_tokens_and_no_step_takes_longer_than_a_mac_bears(
    token: float, seen: float, rows: int
) -> None:
    machine = Machine(token=token, seen=seen)
    _, steps = macs(machine, rows)
    assert steps[0].tokens <= 256
    for step in steps[1:]:
        # What is not known yet may take a little longer than expected.
        assert machine.law(step) <= 0.3 * 1.25 or step.tokens <= FEWEST


def test_a_mac_that_is_fast_has_whole_steps() -> None:
    _, steps = macs(Machine(token=1e-5, seen=0))
    assert [step.tokens for step in steps[:5]] == [256, 512, 1024, 2048, 2048]


@pytest.mark.parametrize(
    ("token", "host", "least"), [(6.6e-3, 0.02, FEWEST), (4e-4, 0.02, 50), (1e-5, 0.02, 256)]
)
def test_beside_streams_a_prompt_has_what_takes_no_longer_than_the_host_does(
    token: float, host: float, least: int
) -> None:
    """An M1 takes 1.7 s for 256 tokens of an 8B."""
    machine = Machine(step=1e-3, row=1e-5, token=token, seen=0, chunk=0, context=0)
    pace = Pace(2048, 256, 1, MAC)
    machine.idle(pace, 8)
    pace.observe_host(host)
    for begun in range(4):
        machine.run(pace, EIGHT.with_chunk(128 * begun, 128))
    # Rows leave a prompt hardly any time.
    assert pace.budget(1)(EIGHT, 64) == pytest.approx(least, rel=0.1)


def test_before_it_is_known_what_a_token_costs_a_stream_waits_for_few_of_them() -> None:
    pace = Pace(2048, 256, 1, MAC)
    Machine().idle(pace, 8)
    assert pace.budget(1)(EIGHT, 0) == FEWEST


@given(before=st.integers(0, 200_000), tokens=st.integers(1, 2048))
def test_a_chunk_sees_no_more_than_there_is_memory_for(before: int, tokens: int) -> None:
    pace = Pace(2048, 16, 1, StepLimits(seen=1e6))
    pace.observe(0.01, StepLoad().with_chunk(0, tokens))
    given = pace.budget(1)(StepLoad(), before)
    assert given * (before + given) <= 1e6 or given == FEWEST
    assert given >= FEWEST


def burst(machine: Machine, pace: Pace, wanted: int) -> list[int]:
    """The tokens of steps that have nothing but prompts of 512 tokens to do."""
    given = []
    for _ in range(8):
        load, budget = StepLoad(), pace.budget(1, wanted)
        while (tokens := min(budget(load, 0), 512)) > 0:
            load = load.with_chunk(0, tokens)
        given.append(load.tokens)
        machine.run(pace, load)
    return given


def test_where_steps_are_short_a_burst_has_longer_ones_each_twice_as_long_at_most() -> None:
    given = burst(Machine(token=5e-6, seen=0), Pace(2048, 256, grain=128), 8192)
    assert given[:4] == [2048, 4096, 8192, 8192]


@pytest.mark.parametrize("token", [1e-5, 1.5e-5, 2e-5, 3e-5, 1e-4])
def test_longer_steps_of_a_burst_are_short(token: float) -> None:
    machine, pace = Machine(token=token, seen=0), Pace(2048, 256, grain=128)
    longest = max(burst(machine, pace, 8192))
    load = StepLoad().with_chunk(0, longest)
    assert longest == 2048 or machine.law(load) <= SHORT * 1.05
    assert longest == 8192 or machine.law(load.with_chunk(0, 2048)) > SHORT
    assert pace.is_short(longest) or longest == 2048


def test_one_long_prompt_alone_has_longer_steps_as_well() -> None:
    machine, pace = Machine(token=5e-6, seen=0), Pace(2048, 256, grain=128)
    given = []
    for _ in range(4):
        given.append(pace.budget(1, 8192)(StepLoad(), 0))
        machine.run(pace, StepLoad().with_chunk(0, given[-1]))
    assert given == [2048, 4096, 8192, 8192]


def test_a_step_takes_all_that_is_wanted_of_it_and_no_more() -> None:
    given = burst(Machine(token=1e-6, seen=0), Pace(2048, 256, grain=128), 5000)
    assert max(given) == 5000
    assert max(burst(Machine(token=1e-6, seen=0), Pace(2048, 256), 0)) == 2048


def test_rows_in_their_course_have_no_longer_steps_beside_a_prompt_that_wants_them() -> None:
    pace = taught(Machine(token=1e-6))
    assert pace.budget(1, 8192)(EIGHT, 0) == pace.budget(1)(EIGHT, 0)


@settings(max_examples=200)
@example(steps=[(0.0, 4, 64, 0)], rows=4, prompts=1, taken=0, before=0)
@given(
    steps=st.lists(
        # A coarse clock says that a step took no time at all.
        st.tuples(
            st.one_of(st.just(0.0), st.floats(1e-9, 10)),
            st.integers(0, 128),
            st.integers(0, 512),
            st.integers(0, 100_000),
        ),
        max_size=30,
    ),
    rows=st.integers(0, 128),
    prompts=st.integers(0, 500),
    taken=st.integers(0, MOST),
    before=st.integers(0, 100_000),
)
def test_the_budget_is_always_within_its_limits(
    steps: list[tuple[float, int, int, int]], rows: int, prompts: int, taken: int, before: int
) -> None:
    pace = Pace(MOST, PAGE)
    for seconds, running, tokens, start in steps:
        load = StepLoad(running)
        pace.observe(seconds, load.with_chunk(start, tokens) if tokens else load)
    known = max([running for _, running, tokens, _ in steps if not tokens], default=0)
    budget = pace.budget(prompts)
    least = 0 if prompts <= rows and rows > LIKE * known else PAGE
    assert least <= budget(StepLoad(rows), before) <= MOST
    besides = budget(StepLoad(rows).with_chunk(0, taken) if taken else StepLoad(rows), before)
    assert besides <= MOST - taken
    assert besides >= 0 or taken > PAGE


@given(rows=st.integers(0, 200), before=st.integers(0, 8000), seconds=st.floats(1e-3, 0.1))
def test_steps_come_in_few_sizes(rows, before, seconds):
    pace = Pace(2048, 256, grain=128)
    load = StepLoad(rows=rows)
    pace.observe(seconds, StepLoad(rows=rows))
    pace.observe(2 * seconds, load.with_chunk(before, 512))
    tokens = pace.budget(0)(load, before)
    # Beside very many rows there may be no such size.
    assert rows + tokens in {256, 512, 1024, 2048} or rows > 128
    assert 128 <= tokens <= 2048
    # What is left of it, once a chunk has been taken, is the rest.
    assert pace.budget(0)(load.with_chunk(before, 100), before) <= tokens - 100

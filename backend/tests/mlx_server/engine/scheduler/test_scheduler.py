"""The scheduler by itself: sequences, pages and budgets, no arrays and no clock.

`World` plays the engine: it draws tokens for what is scheduled, and remembers which tokens every
place of every page would hold, so that a row that would read another's keys is noticed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_manager.mlx_server.core import Sampling
from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.sampling import SamplerState
from mlx_manager.mlx_server.engine.scheduler.fairness import LATELY
from mlx_manager.mlx_server.engine.scheduler.load import Budget, StepLoad
from mlx_manager.mlx_server.engine.scheduler.prefixes import PagePrefixes
from mlx_manager.mlx_server.engine.scheduler.schedule import Schedule
from mlx_manager.mlx_server.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from mlx_manager.mlx_server.engine.scheduler.snapshots import SnapshotPrefixes
from mlx_manager.mlx_server.engine.sequence import Sequence

NOBODY: Any = None
GREEDY = Sampling(temperature=0.0)


def row(prompt: list[int], limit: int, owner: str = "", priority: int = 0) -> Sequence:
    return Sequence(
        prompt,
        limit=limit,
        stop_ids=frozenset(),
        min_tokens=0,
        sampler=SamplerState.of(GREEDY, ()),
        parser=NOBODY,
        stream=NOBODY,
        owner=owner,
        priority=priority,
    )


def at_most(tokens: int, alone: int = 0) -> Budget:
    """So many prompt tokens a step, or `alone` where no rows run beside them."""
    return lambda load, _: (tokens if load.rows else max(tokens, alone)) - load.tokens


@dataclass
class World:
    """An engine without a model. `most` pages may exist; `states`: pages alone are no prefix.
    `copies`: who goes on from a state has a copy of all there was."""

    most: int
    page_size: int = 4
    max_rows: int = 4
    reuse: bool = True
    states: bool = False
    worth: int = 0
    copies: bool = False
    horizon: int = 0
    abreast: int = 0
    memory: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    prompt_tokens: int = 0
    forgotten: list[Sequence] = field(default_factory=list)
    restored: dict[int, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.page_size, prefix_cache=self.reuse)
        prefixes = PagePrefixes(self.pool, reuse=self.reuse)
        if self.states and self.reuse:
            prefixes = SnapshotPrefixes(
                self.pool, self.restore, worth=self.worth, copies=self.copies
            )
        limits = SchedulerLimits(self.max_rows, self.horizon, self.abreast)
        self.scheduler = Scheduler(self.pool, self, prefixes, limits)

    def grow(self, lacking: int, *, urgent: bool) -> bool:
        if self.pool.size + lacking > self.most:
            return False
        self.pool.grow(lacking)
        return True

    def enter(self, sequence: Sequence) -> bool:
        return True

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    def restore(self, sequence: Sequence, attachment: object) -> None:
        """A state is the tokens it was made from: it must be those the row begins with."""
        assert attachment == tuple(sequence.tokens[: sequence.computed])
        if self.copies:
            self.write(sequence, sequence.computed)
        self.restored[sequence.key] = attachment

    def submit(
        self, prompt: list[int], limit: int = 1, owner: str = "", priority: int = 0
    ) -> Sequence:
        sequence = row(prompt, limit, owner, priority)
        self.scheduler.submit(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        sequence.ended = True
        self.scheduler.share(sequence)
        self.scheduler.remove(sequence)

    def step(self, budget: int = 1000) -> Schedule:
        schedule = self.scheduler.schedule(at_most(budget))
        self.check(schedule, budget)
        spans = [(r, 1) for r in schedule.rows]
        spans += [(p.sequence, p.tokens) for p in schedule.prefills]
        for sequence, tokens in spans:
            self.write(sequence, tokens)
        for sequence, _ in spans:
            self.read(sequence)
        self.prompt_tokens += sum(p.tokens for p in schedule.prefills)
        if self.states:
            self.keep_states()
        for sequence in [*schedule.rows, *(p.sequence for p in schedule.prefills if p.final)]:
            sequence.append(hash(tuple(sequence.tokens)) % 50)
            self.scheduler.share(sequence)
            if sequence.drawn >= sequence.limit:
                sequence.ended = True
                self.scheduler.remove(sequence)
        return schedule

    def check(self, schedule: Schedule, budget: int) -> None:
        s = self.scheduler.queues
        assert len(s.running) + len(s.prefilling) <= self.max_rows
        everyone = [*s.running, *s.prefilling, *s.waiting]
        assert len(everyone) == len({sequence.key for sequence in everyone})
        scheduled = [*schedule.rows, *(p.sequence for p in schedule.prefills)]
        assert len(scheduled) == len({sequence.key for sequence in scheduled})
        assert {r.key for r in schedule.rows} <= {r.key for r in s.running}
        for sequence in scheduled:
            assert not sequence.ended
            assert len(sequence.table) * self.page_size >= sequence.computed
        for p in schedule.prefills:
            assert p.tokens > 0
            assert p.final == (p.sequence.computed == len(p.sequence.tokens))
            assert p.final or p.sequence.computed % self.page_size == 0 or p.tokens == budget
        spent = sum(p.tokens for p in schedule.prefills)
        assert spent <= budget
        load = StepLoad(len(schedule.rows))
        for p in schedule.prefills:
            load = load.with_chunk(p.sequence.computed - p.tokens, p.tokens)
        assert schedule.load == load
        for sequence in s.waiting:
            assert (sequence.computed, len(sequence.table)) == (0, 0)

    def write(self, sequence: Sequence, tokens: int) -> None:
        for place in range(sequence.computed - tokens, sequence.computed):
            page = int(sequence.table.pages[place // self.page_size])
            assert self.pool.references(page) == 1
            self.memory[page, place % self.page_size] = tuple(sequence.tokens[: place + 1])

    def read(self, sequence: Sequence) -> None:
        for place in range(sequence.computed):
            page = int(sequence.table.pages[place // self.page_size])
            held = self.memory[page, place % self.page_size]
            assert held == tuple(sequence.tokens[: place + 1])

    def keep_states(self) -> None:
        for sequence in self.scheduler.queues.prefilling:
            if sequence.computed in self.scheduler.prefixes.borders(sequence):
                self.scheduler.share(sequence)
                count = sequence.computed // self.page_size
                known = self.pool.match(sequence.tokens)[:count]
                if len(known) == count:
                    self.pool.attach(known[-1], tuple(sequence.tokens[: sequence.computed]))

    def run(self, budget: int = 1000, most: int = 5000) -> int:
        """Step until nothing is left; returns the number of steps."""
        for steps in range(most):
            if not self.scheduler.queues.has_work:
                return steps
            assert self.step(budget)
        raise AssertionError("it never ends")


class Days(RuleBasedStateMachine):
    """Anything may come, grow, be cancelled and be paused, in any order."""

    @initialize(
        max_rows=st.integers(1, 5),
        reuse=st.booleans(),
        states=st.booleans(),
        copies=st.booleans(),
        page_size=st.sampled_from([1, 3, 4]),
        abreast=st.sampled_from([0, 1, 2]),
    )
    def begin(
        self,
        max_rows: int,
        reuse: bool,
        states: bool,
        copies: bool,
        page_size: int,
        abreast: int,
    ) -> None:
        # Room for the longest row of all by itself, and for little else.
        self.world = World(
            most=-(-60 // page_size) + 2,
            page_size=page_size,
            max_rows=max_rows,
            reuse=reuse,
            states=states and reuse,
            copies=copies and states and reuse,
            abreast=abreast,
        )
        self.rows: list[Sequence] = []

    @rule(
        prompt=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=25),
        limit=st.integers(1, 12),
        like=st.integers(0, 99),
        owner=st.sampled_from("aab"),
        priority=st.sampled_from([0, 0, 1]),
    )
    def submit(self, prompt: list[int], limit: int, like: int, owner: str, priority: int) -> None:
        if self.rows and like % 3 == 0:
            prompt = (self.rows[like % len(self.rows)].tokens + prompt)[:45]
        self.rows.append(self.world.submit(prompt, limit, owner, priority))

    @rule(budget=st.sampled_from([1, 4, 9, 1000]), times=st.integers(1, 4))
    def step(self, budget: int, times: int) -> None:
        for _ in range(times):
            working = self.world.scheduler.queues.has_work
            # Whoever is there fits by himself, so there is always something to do.
            assert bool(self.world.step(budget)) == working

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        sequence = self.rows[which % len(self.rows)]
        if not sequence.ended:
            self.world.cancel(sequence)

    @precondition(lambda self: self.rows)
    @rule()
    def finish(self) -> None:
        self.world.run(budget=8)
        assert self.world.pool.held == 0
        for sequence in self.rows:
            assert sequence.ended
        self.rows.clear()

    @invariant()
    def pages_are_held_by_tables_alone(self) -> None:
        if not hasattr(self, "world"):
            return
        tables = [sequence.table.pages.tolist() for sequence in self.world.scheduler.queues]
        held = {page for pages in tables for page in pages}
        assert self.world.pool.held == len(held)
        for page in held:
            assert self.world.pool.references(page) == sum(page in pages for pages in tables)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run(budget=8)
            assert self.world.pool.held == 0


TestDays = Days.TestCase
TestDays.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)


# ---------------------------------------------------------------------------------------------
# Order
# ---------------------------------------------------------------------------------------------


def distinct(length: int, salt: int) -> list[int]:
    """Prompts that begin differently for different salts."""
    return [1000 + salt, *range(length - 1)]


def test_a_step_is_full_of_short_prompts() -> None:
    world = World(most=1000, max_rows=100)
    for i in range(100):
        world.submit([i, i, i], limit=2)
    assert len(world.step().prefills) == 100


def test_the_shortest_prompt_goes_first() -> None:
    world = World(most=100)
    prompts = [world.submit(distinct(n, n)) for n in (30, 8, 20)]
    schedule = world.step(budget=30)
    assert [(p.sequence, p.tokens) for p in schedule.prefills] == [
        (prompts[1], 8),
        (prompts[2], 20),
    ]
    assert [p.sequence for p in world.step(budget=30).prefills] == [prompts[0]]


def test_several_prompts_share_a_budget_and_end_on_page_borders() -> None:
    world = World(most=100)
    short, long = world.submit(distinct(10, 1)), world.submit(distinct(50, 2))
    schedule = world.step(budget=24)
    assert [(p.sequence, p.tokens, p.final) for p in schedule.prefills] == [
        (short, 10, True),
        (long, 12, False),
    ]


def test_a_budget_below_a_page_gets_somewhere_and_back_to_page_borders() -> None:
    world = World(most=100)
    world.submit(distinct(23, 1))
    chunks = [world.step(budget=n).prefills[0].tokens for n in (1, 3, 2, 7, 3, 9)]
    assert chunks == [1, 3, 2, 6, 3, 8]


def test_a_long_prompt_is_not_overtaken_for_ever_by_short_ones() -> None:
    world = World(most=1000, max_rows=8)
    long = world.submit(distinct(400, 0))
    for step in range(200):
        # Every step brings as much as it can take.
        world.submit(distinct(16, step + 1))
        world.step(budget=16)
        if long.ended:
            break
    assert long.ended
    assert len(world.scheduler.queues.waiting) < 60


@pytest.mark.parametrize("short", [8, 30])
def test_a_prompt_that_needs_much_room_is_not_overtaken_for_ever_by_those_that_need_little(
    short: int,
) -> None:
    world = World(most=30, max_rows=8, reuse=False)
    world.submit(distinct(short, 999), 20)
    long = world.submit(distinct(100, 0))
    for step in range(300):
        world.submit(distinct(short, step + 1), 20)
        world.step()
        if long.ended:
            break
    assert long.ended


def test_rows_beyond_the_limit_wait_for_one_to_end() -> None:
    world = World(most=100, max_rows=2)
    rows = [world.submit(distinct(4 + n, n), 5) for n in range(4)]
    assert [p.sequence for p in world.step().prefills] == rows[:2]
    world.step()
    assert world.scheduler.queues.waiting == rows[2:]
    world.run()
    assert all(r.ended for r in rows)


# ---------------------------------------------------------------------------------------------
# Keys
# ---------------------------------------------------------------------------------------------


def test_who_comes_late_goes_before_the_queue_of_another_key() -> None:
    world = World(most=1000, max_rows=100)
    for n in range(50):
        world.submit(distinct(20, n), owner="flood")
    world.step(budget=20)
    single = world.submit(distinct(40, 99), owner="single")
    assert [p.sequence for p in world.step(budget=40).prefills] == [single]


def test_who_comes_goes_first_also_where_nobody_has_been_counted_yet() -> None:
    world = World(most=1000, max_rows=4)
    for key in ("single", "flood", "single"):
        world.submit(distinct(8, 90), owner=key)
        world.run()
    for n in range(20):
        world.submit(distinct(8, n), 100, "flood")
    world.step()
    single = world.submit(distinct(8, 99), 100, "single")
    assert [p.sequence for p in world.step().prefills] == [single]


def test_a_keys_first_prompt_does_not_wait_until_pages_are_added() -> None:
    world = World(most=1000, max_rows=4, reuse=False)
    for n in range(20):
        world.submit(distinct(8, n), 100, "flood")
    for _ in range(5):
        world.step()
    size = world.pool.size
    single = world.submit(distinct(4, 99), 100, "single")
    assert [p.sequence for p in world.step().prefills] == [single]
    assert world.pool.size == size


def test_the_rows_of_others_wait_one_step_for_a_keys_first_prompt_and_never_two() -> None:
    world = World(most=1000, max_rows=100)
    flood = [world.submit(distinct(8, n), 100, "flood") for n in range(4)]
    world.step()
    single = world.submit(distinct(40, 99), 100, "single")
    drawn = [row.drawn for row in flood]
    first = world.scheduler.schedule(at_most(4, alone=16))
    assert [(p.sequence, p.tokens) for p in first.prefills] == [(single, 16)]
    assert first.rows == []
    assert [row.drawn for row in flood] == drawn
    second = world.scheduler.schedule(at_most(4, alone=16))
    assert second.rows == flood
    assert [(p.sequence, p.tokens) for p in second.prefills] == [(single, 4)]
    assert world.scheduler.schedule(at_most(4, alone=16)).rows == []


def test_rows_begin_together_with_the_prompts_that_came_with_them() -> None:
    world = World(most=1000, max_rows=8)
    for n in range(4):
        world.submit(distinct(8, n), 100)
    assert world.scheduler.beginning == 4
    world.step(budget=16)
    assert len(world.scheduler.queues.running) == 2
    # Two rows that have drawn a token, and two prompts.
    assert world.scheduler.beginning == 4
    for _ in range(2):
        world.scheduler.queues.waiting, waiting = [], world.scheduler.queues.waiting
        world.step(budget=16)
        world.scheduler.queues.waiting = waiting
    # The rows are in their course.
    assert world.scheduler.beginning == 2
    world.step(budget=16)
    assert len(world.scheduler.queues.running) == 4
    assert world.scheduler.beginning == 0


@pytest.mark.parametrize(("horizon", "steps"), [(0, 2), (16, 16)])
def test_rows_of_a_burst_begin_for_longer_where_steps_are_short(horizon: int, steps: int) -> None:
    world = World(most=1000, max_rows=8, horizon=horizon)
    for n in range(3):
        world.submit(distinct(8, n), 100)
    world.step(budget=8)
    world.scheduler.queues.waiting, waiting = [], world.scheduler.queues.waiting
    begun = 0
    while world.scheduler.queues.running[0].drawn < 30:
        world.scheduler.queues.waiting = waiting
        begun += world.scheduler.beginning == 3
        world.scheduler.queues.waiting = []
        world.step()
    assert begun == steps


def test_a_row_that_has_just_begun_is_in_its_course_for_prompts_that_come_later() -> None:
    world = World(most=1000, max_rows=8)
    world.submit(distinct(8, 1), 100)
    world.step()
    world.step()
    world.submit(distinct(8, 2), 100)
    assert world.scheduler.beginning == 1


def test_prompts_that_have_no_row_to_come_into_hold_nobody_up() -> None:
    world = World(most=1000, max_rows=3)
    for n in range(20):
        world.submit(distinct(8, n), 100)
    assert world.scheduler.beginning == 3
    for _ in range(4):
        world.step()
    assert len(world.scheduler.queues.waiting) == 17
    assert world.scheduler.beginning == 0


def test_what_is_ahead_is_counted_of_all_prompts_and_of_the_shortest() -> None:
    world = World(most=1000, max_rows=2)
    assert world.scheduler.queues.ahead == (0, 0)
    world.submit(distinct(40, 0), 100)
    for n in range(3):
        world.submit(distinct(24, n + 1), 100)
    assert world.scheduler.queues.ahead == (40 + 3 * 24, 24)
    world.step(budget=32)
    assert world.scheduler.queues.ahead == (40 + 2 * 24 - 8, 16)


def test_a_prompt_gets_what_is_left_at_the_place_it_has_come_to() -> None:
    asked: list[tuple[int, int, int]] = []

    def budget(load: StepLoad, before: int) -> int:
        asked.append((load.tokens, load.seen, before))
        return 12 - load.tokens if before < 16 else 4

    world = World(most=1000, max_rows=100)
    long = world.submit(distinct(60, 1))
    world.step(budget=16)
    short = world.submit(distinct(6, 2))
    first = world.scheduler.schedule(budget)
    assert [(p.sequence, p.tokens) for p in first.prefills] == [(short, 6), (long, 4)]
    assert asked[:2] == [(0, 0, 0)] * 2
    assert asked[-1] == (6, 21, 16)


def test_more_urgent_rows_wait_for_nobody() -> None:
    world = World(most=1000, max_rows=100)
    urgent = world.submit(distinct(8, 1), 100, "urgent", priority=-1)
    world.step()
    world.submit(distinct(8, 2), 100, "plain")
    assert world.step().rows == [urgent]


def test_a_key_without_a_row_gets_one_of_another_keys_rows() -> None:
    world = World(most=1000, max_rows=4)
    flood = [world.submit(distinct(8, n), 200, "flood") for n in range(20)]
    for _ in range(5):
        world.step()
    first = world.submit(distinct(8, 98), 200, "single")
    second = world.submit(distinct(8, 99), 200, "single")
    third = world.submit(distinct(8, 97), 200, "single")
    for _ in range(5):
        world.step()
    # Half of the rows each, and the newest gave way.
    assert {first.key, second.key} < {row.key for row in world.scheduler.queues.running}
    assert third in world.scheduler.queues.waiting
    assert flood[3] in world.scheduler.queues.waiting
    paused = world.scheduler.pauses
    for _ in range(50):
        world.step()
    assert world.scheduler.pauses == paused
    world.run()


def test_a_key_gets_pages_that_another_has_all_of() -> None:
    world = World(most=40, max_rows=50, reuse=False)
    for n in range(8):
        world.submit(distinct(12, n), 60, "flood")
    for _ in range(8):
        world.step()
    single = world.submit(distinct(30, 99), 4, "single")
    steps = 0
    while not single.ended:
        world.step()
        steps += 1
    # Their own ends are fifty steps away.
    assert steps < 15
    world.run()


def test_more_urgent_rows_of_another_key_stay() -> None:
    world = World(most=1000, max_rows=2)
    urgent = [world.submit(distinct(8, n), 50, "urgent", priority=-1) for n in range(4)]
    world.step()
    plain = world.submit(distinct(8, 99), 50, "plain")
    for _ in range(10):
        world.step()
    assert plain in world.scheduler.queues.waiting
    assert world.scheduler.queues.running == urgent[:2]


@pytest.mark.parametrize("weights", [(30, 30), (100, 10), (10, 100)])
def test_keys_that_both_want_everything_are_served_alike(weights: tuple[int, int]) -> None:
    world = World(most=2000, max_rows=8, reuse=False)
    served = {"a": 0, "b": 0}
    numbers = iter(range(10_000))
    queued = {"a": 0, "b": 0}
    rows: list[Sequence] = []
    for step in range(600):
        for owner, length in zip("ab", weights, strict=True):
            queued[owner] = sum(r.owner == owner for r in world.scheduler.queues.waiting)
            for _ in range(10 - queued[owner]):
                rows.append(world.submit(distinct(length, next(numbers)), 10, owner))
        if step < 100:
            world.step(budget=32)
            continue
        schedule = world.step(budget=32)
        for r in schedule.rows:
            served[r.owner] += 2
        for p in schedule.prefills:
            served[p.sequence.owner] += p.tokens
    assert 0.8 < served["a"] / served["b"] < 1.25


def test_a_key_that_was_away_has_saved_nothing_up() -> None:
    world = World(most=2000, max_rows=8, reuse=False)
    numbers = iter(range(10_000))
    for _ in range(100):
        world.submit(distinct(20, next(numbers)), 5, "busy")
        world.submit(distinct(4, next(numbers)), 1, "rare")
        world.step(budget=24)
    world.run()
    busy = [world.submit(distinct(20, next(numbers)), 5, "busy") for _ in range(10)]
    [world.submit(distinct(20, next(numbers)), 5, "rare") for _ in range(50)]
    for _ in range(24):
        world.step(budget=24)
    assert sum(r.ended for r in busy) > 5


def test_a_full_queue_still_takes_in_who_has_less_than_its_part() -> None:
    world = World(most=100, max_rows=1)
    for n in range(10):
        world.submit(distinct(8, n), 5, "flood")
    assert not world.scheduler.may_queue(row([1], 1, "flood"), 10)
    assert world.scheduler.may_queue(row([1], 1, "flood"), 11)
    assert world.scheduler.may_queue(row([1], 1, "single"), 10)
    for n in range(5):
        world.submit(distinct(8, 50 + n), 5, "single")
    assert not world.scheduler.may_queue(row([1], 1, "single"), 10)


def crowd(abreast: int) -> tuple[World, list[Sequence]]:
    """Seven running rows of one key, and one of another."""
    world = World(most=20_000, max_rows=9, abreast=abreast)
    rows = [world.submit(distinct(8, n), 10_000, "flood") for n in range(7)]
    world.step()
    rows.append(world.submit(distinct(8, 99), 10_000, "single"))
    # The others give way to it, once.
    assert not world.step().rows
    return world, rows


@pytest.mark.parametrize(("abreast", "turns"), [(2, 4), (3, 2), (5, 1), (0, 1)])
def test_where_keys_share_the_engine_many_rows_take_turns(abreast: int, turns: int) -> None:
    world, rows = crowd(abreast)
    taken = [world.step().rows for _ in range(12)]
    assert {len(turn) for turn in taken} == {8 // turns}
    for start in range(12 - turns):
        each = [row.key for turn in taken[start : start + turns] for row in turn]
        assert sorted(each) == [row.key for row in rows]


def test_where_turns_are_uneven_nobody_waits_for_more_of_them() -> None:
    world, rows = crowd(3)
    world.cancel(rows.pop(0))
    for _ in range(5):
        turn, other = world.step().rows, world.step().rows
        assert {row.key for row in [*turn, *other]} == {row.key for row in rows}


def test_who_joins_rows_that_take_turns_waits_no_longer_than_they() -> None:
    world, _ = crowd(3)
    # All the others have been in a turn.
    for _ in range(2):
        world.step()
    late = world.submit(distinct(4, 98), 100, "flood")
    world.step()
    assert late.drawn == 1
    assert late not in world.step().rows
    for _ in range(5):
        before = late.drawn
        for _ in range(3):
            world.step()
        assert late.drawn > before


def test_one_keys_rows_go_all_at_once_however_many() -> None:
    world = World(most=1000, max_rows=8, abreast=2)
    rows = [world.submit(distinct(8, n), 20, "flood") for n in range(8)]
    world.step()
    for _ in range(5):
        assert world.step().rows == rows


def test_rows_go_all_at_once_again_when_no_other_key_has_come_for_long() -> None:
    world, rows = crowd(2)
    world.cancel(rows.pop())
    taken = []
    for _ in range(LATELY + 1):
        taken.append(world.scheduler.schedule(at_most(4)).rows)
        for row in taken[-1]:
            row.append(1)
    assert all(len(turn) < len(rows) for turn in taken[:-1])
    assert taken[-1] == rows


# ---------------------------------------------------------------------------------------------
# Shared prefixes
# ---------------------------------------------------------------------------------------------


def test_equal_prompts_wait_for_the_one_that_is_being_computed() -> None:
    world = World(most=200, max_rows=8)
    rows = [world.submit(distinct(42, 1)) for _ in range(5)]
    world.run(budget=12)
    assert sorted(r.cached or 0 for r in rows) == [0, 40, 40, 40, 40]
    assert world.prompt_tokens == 42 + 4 * 2


def test_a_prompt_waits_only_for_what_it_shares() -> None:
    """A chat whose system prompt an agent's long conversation begins with, too."""
    world = World(most=500, max_rows=8)
    system = distinct(8, 1)
    agent = world.submit(system + [7] * 800)
    world.step(budget=8)
    chat = world.submit([*system, 8, 8, 8])
    for _ in range(3):
        world.step(budget=8)
    assert chat.ended
    assert chat.cached == 8
    assert not agent.started
    assert agent.remaining > 700


@pytest.mark.parametrize("states", [False, True])
def test_an_urgent_prompt_does_not_wait_for_what_a_less_urgent_one_computes(states: bool) -> None:
    world = World(most=500, max_rows=8, states=states)
    document = distinct(40, 1)
    plain = world.submit([*document, 7], priority=1)
    world.step(budget=8)
    urgent = world.submit([*document, 7, 8])
    # Others as urgent leave the less urgent one nothing of a step.
    for n in range(12):
        world.submit(distinct(8, n + 2))
        world.step(budget=8)
    assert urgent.ended
    assert not plain.started


def test_what_a_cancelled_prompt_computed_is_used_by_the_one_that_waited_for_it() -> None:
    world = World(most=200)
    first = world.submit(distinct(80, 1))
    second = world.submit(distinct(80, 1))
    world.step(budget=16)
    world.step(budget=16)
    world.cancel(first)
    world.step(budget=100)
    assert second.ended
    assert second.cached == 32


def test_different_prompts_do_not_wait_for_one_another() -> None:
    world = World(most=200)
    rows = [world.submit(distinct(9, n)) for n in range(4)]
    assert {p.sequence.key for p in world.step().prefills} == {r.key for r in rows}


def test_a_prompt_is_cut_where_its_state_is_to_be_kept() -> None:
    world = World(most=100, states=True)
    first = world.submit(distinct(42, 1))
    assert [(p.tokens, p.final) for p in world.step().prefills] == [(40, False)]
    assert [(p.tokens, p.final) for p in world.step().prefills] == [(2, True)]
    again = world.submit(first.tokens + [3] * 5)
    world.run()
    assert again.cached == 40
    assert again.key in world.restored


def test_a_prompt_is_not_cut_for_a_state_that_would_save_little() -> None:
    world = World(most=300, states=True, worth=30)
    world.submit(distinct(30, 1))
    assert [(p.tokens, p.final) for p in world.step().prefills] == [(30, True)]
    first = world.submit(distinct(42, 2))
    world.run()
    # Of what is new, too little: it goes on from the same state as the one before it.
    again = world.submit(first.tokens + [3] * 20)
    assert [(p.tokens, p.final) for p in world.step().prefills] == [(23, True)]
    assert again.cached == 40
    last = world.submit(again.tokens + [4] * 20)
    assert [p.final for p in world.step().prefills] == [False]
    world.run()
    assert last.cached == 40


def test_pages_without_a_state_are_no_prefix() -> None:
    world = World(most=100, states=True)
    world.submit(distinct(42, 1))
    world.run()
    # Shares eight pages, and the state is behind the tenth.
    other = world.submit(distinct(42, 1)[:34] + [5] * 10)
    world.run()
    assert other.cached == 0
    assert not world.restored


def test_with_states_equal_prompts_wait_and_others_that_begin_alike_do_not() -> None:
    world = World(most=300, states=True)
    system = distinct(8, 1)
    agent = world.submit(system + [7] * 400)
    world.step(budget=8)
    twin = world.submit(system + [7] * 400)
    chat = world.submit([*system, 8, 8, 8])
    world.step(budget=20)
    world.step(budget=20)
    assert chat.ended
    assert twin in world.scheduler.queues.waiting
    world.run(budget=100)
    assert (agent.cached, twin.cached) == (0, 404)


def test_a_state_is_kept_where_conversations_part() -> None:
    world = World(most=300, states=True)
    system = distinct(90, 1)
    first = world.submit(system + distinct(30, 2))
    world.run()
    # Its pages tell where the second goes another way, and the third goes on from there.
    second = world.submit(system + distinct(90, 3))
    steps = [[p.tokens for p in world.step().prefills] for _ in range(3)]
    assert steps == [[88], [88], [4]]
    third = world.submit(system + distinct(50, 4))
    world.run()
    assert [row.cached for row in (first, second, third)] == [0, 0, 88]


def test_conversations_that_come_together_wait_for_what_all_begin_with() -> None:
    world = World(most=600, states=True, max_rows=8)
    system = distinct(90, 1)
    rows = [world.submit(system + distinct(20 + n, n + 2)) for n in range(4)]
    assert [p.tokens for p in world.step(budget=60).prefills] == [60]
    assert world.scheduler.queues.waiting == rows[1:]
    world.run(budget=200)
    assert [row.cached for row in rows] == [0, 88, 88, 88]
    assert world.prompt_tokens == 88 + sum(len(row.tokens) - 1 - 88 for row in rows)


def test_a_copy_that_is_gone_on_from_is_given_up_after_one_that_is_not() -> None:
    world = World(most=70, states=True, copies=True)
    often, once = distinct(81, 1), distinct(81, 2)
    for prompt in (often, once, often):
        last = world.submit(prompt)
        world.run()
    assert last.cached == 80
    world.submit(distinct(130, 3))
    world.run()
    assert len(world.pool.match(often)) == 20 > len(world.pool.match(once))


def test_a_first_prompt_is_cut_before_its_last_turn() -> None:
    world = World(most=300, states=True)
    first = row(distinct(90, 1) + distinct(20, 2), 1)
    first.turn = 90
    world.scheduler.submit(first)
    # Its own end is too near to that to be kept, too.
    assert [[p.tokens for p in world.step().prefills] for _ in range(2)] == [[88], [22]]
    other = world.submit(distinct(90, 1) + distinct(30, 3))
    world.run()
    assert other.cached == 88
    # What goes on from something need not be cut there.
    later = row(other.tokens + distinct(90, 4) + distinct(8, 5), 1)
    later.turn = len(other.tokens) + 90
    world.scheduler.submit(later)
    assert [p.tokens for p in world.step().prefills] == [(later.prompt_length - 1) // 4 * 4 - 116]


def test_what_all_begin_with_is_not_waited_for_when_it_is_short_or_past() -> None:
    world = World(most=600, states=True, max_rows=8)
    first = world.submit(distinct(60, 1) + distinct(200, 2))
    world.step(budget=40)
    short = world.submit(distinct(60, 1) + distinct(20, 3))
    world.step(budget=200)
    assert short not in world.scheduler.queues.waiting
    world.run()
    assert (first.cached, short.cached) == (0, 0)
    late = World(most=600, states=True)
    late.submit(distinct(90, 1) + distinct(200, 2))
    late.step(budget=120)
    second = late.submit(distinct(90, 1) + distinct(20, 3))
    late.step(budget=400)
    assert second not in late.scheduler.queues.waiting


# ---------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------


def test_the_newest_row_is_paused_and_comes_back() -> None:
    world = World(most=9, reuse=False)
    old = world.submit(distinct(12, 1), 20)
    new = world.submit(distinct(12, 2), 20)
    world.step()
    assert world.scheduler.queues.running == [old, new]
    while new in world.scheduler.queues.running:
        world.step()
    assert old in world.scheduler.queues.running
    assert world.forgotten[-1] is new
    drawn = len(new.tokens)
    world.run()
    assert old.ended
    assert new.ended
    assert len(new.tokens) == 32 > drawn


def test_the_oldest_row_is_never_paused() -> None:
    world = World(most=16, max_rows=8, reuse=False)
    oldest = world.submit(distinct(10, 0), 50)
    world.step()
    for n in range(1, 60):
        world.submit(distinct(10, n), 30)
        if not oldest.ended:
            assert oldest in world.step().rows
        else:
            world.step()
    assert oldest.ended
    world.run()


def test_a_paused_row_finds_its_own_pages_again_if_nobody_took_them() -> None:
    world = World(most=9)
    old = world.submit(distinct(12, 1), 20)
    new = world.submit(distinct(12, 2), 20)
    world.step()
    while new in world.scheduler.queues.running:
        world.step()
    world.cancel(old)
    before = world.prompt_tokens
    world.step()
    assert world.prompt_tokens - before < 12
    world.run()
    assert len(new.tokens) == 32


def test_a_row_is_not_admitted_only_to_be_paused_at_once() -> None:
    world = World(most=7, reuse=False)
    rows = [world.submit(distinct(7, n), 5) for n in range(3)]
    world.step()
    # There would be two pages for it, but then none for the others to grow by.
    assert world.scheduler.queues.running == rows[:2]
    assert world.scheduler.queues.waiting == rows[2:]
    world.run()
    assert world.forgotten == rows


def test_cached_pages_make_room_before_anybody_is_paused() -> None:
    world = World(most=10)
    world.submit(distinct(30, 1))
    world.run()
    assert world.pool.cached >= 7
    late = world.submit(distinct(30, 2), 5)
    world.run()
    assert late.ended
    assert world.forgotten.count(late) == 1


def test_memory_is_used_to_the_last_page() -> None:
    world = World(most=10, reuse=False)
    world.submit(distinct(31, 1), 9)
    world.run()
    assert world.pool.size == 10


def test_random_days_end_with_every_row_answered() -> None:
    chance = random.Random(5)
    for _ in range(15):
        world = World(most=30, max_rows=chance.randint(1, 6), states=chance.random() < 0.3)
        rows = []
        for _ in range(60):
            if chance.random() < 0.5:
                like = chance.choice(rows).tokens if rows and chance.random() < 0.5 else []
                prompt = (like + chance.choices([1, 2, 3], k=chance.randint(1, 40)))[:80]
                rows.append(world.submit(prompt, chance.randint(1, 30)))
            if rows and chance.random() < 0.1:
                victim = chance.choice(rows)
                if not victim.ended:
                    world.cancel(victim)
                    rows.remove(victim)
            world.step(chance.choice([4, 16, 64]))
        world.run(16)
        assert all(len(r.tokens) == r.prompt_length + r.limit for r in rows)
        assert world.pool.held == 0

"""Memory that is granted to workers: never more than there is, and no need without an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_manager.mlx_server.models import grants as module
from mlx_manager.mlx_server.models.grants import Grants
from mlx_manager.mlx_server.workers.messages import (
    Beyond,
    DeviceFull,
    GaveBack,
    GiveBack,
    Granted,
    Need,
    Using,
)

LIMIT = 1000


@dataclass(eq=False)
class Worker:
    """A worker's view of its memory; it does nothing by itself."""

    granted: int = 0
    used: int = 0
    kept: int = 0
    waits: bool = False
    answers: list[int] = field(default_factory=list)
    beyond: int = 0
    asked: list[GiveBack] = field(default_factory=list)
    told: threading.Event = field(default_factory=threading.Event)

    def send(self, message: object) -> None:
        match message:
            case Granted(nbytes, beyond):
                self.granted += nbytes
                self.beyond = beyond
                self.answers.append(nbytes)
                self.waits = False
                self.told.set()
            case GiveBack():
                self.asked.append(message)
            case Beyond(nbytes):
                self.beyond = nbytes
            case other:
                raise AssertionError(other)


class Pool:
    """Workers, some of whose models are idle, and their grants."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.workers: list[Worker] = []
        self.idle: list[Worker] = []
        self.dying: list[Worker] = []
        self.evicted: list[Worker] = []
        self.grants: Grants[Worker] = Grants(limit, lambda: list(self.idle), self._evict)

    def enter(
        self, granted: int = 0, used: int = 0, kept: int = 0, *, idle: bool = False
    ) -> Worker:
        worker = Worker()
        self.grants.enter(worker)
        if granted:
            # Nobody has anything to spare meanwhile.
            for other in self.workers:
                self.grants.heard(other, Using(other.granted, 0))
            rest = self.grants.free() - granted
            self.grants.limit -= rest
            self.need(worker, granted)
            self.grants.limit += rest
            for other in self.workers:
                self.grants.heard(other, Using(other.used, other.kept))
            assert worker.granted == granted
            worker.answers.clear()
            worker.told.clear()
        self.use(worker, used, kept)
        self.workers.append(worker)
        if idle:
            self.idle.append(worker)
        return worker

    def _evict(self, worker: Worker) -> bool:
        if worker not in self.idle:
            return False
        self.idle.remove(worker)
        self.dying.append(worker)
        self.evicted.append(worker)
        return True

    def need(self, worker: Worker, nbytes: int, *, urgent: bool = True) -> None:
        worker.waits = True
        self.grants.heard(worker, Need(nbytes, urgent))

    def use(self, worker: Worker, used: int, kept: int) -> None:
        worker.used, worker.kept = used, kept
        self.grants.heard(worker, Using(used, kept))

    def give_back(self, worker: Worker) -> None:
        """Do as it is told first."""
        wanted = worker.asked.pop(0)
        if wanted.kept:
            freed = min(worker.kept, max(0, wanted.nbytes - (worker.granted - worker.used)))
            worker.used, worker.kept = worker.used - freed, worker.kept - freed
        given = max(0, min(wanted.nbytes, worker.granted - worker.used))
        worker.granted -= given
        self.grants.heard(worker, GaveBack(given))
        self.use(worker, worker.used, worker.kept)

    def die(self, worker: Worker) -> None:
        self.workers.remove(worker)
        for gone_from in (self.idle, self.dying):
            if worker in gone_from:
                gone_from.remove(worker)
        self.grants.ended(worker)

    def go_on(self) -> None:
        """Until nobody is waited for."""
        while self.dying or any(worker.asked for worker in self.workers):
            for worker in list(self.workers):
                if worker in self.dying:
                    self.die(worker)
                elif worker.asked:
                    self.give_back(worker)


class Life(RuleBasedStateMachine):
    """Workers come, need, use, give back and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "ANSWER_SECONDS", 3600.0)
        self.pool = Pool()

    def teardown(self) -> None:
        self.pool.go_on()
        assert not any(worker.waits for worker in self.pool.workers)
        self.patch.undo()

    def one(self, data: st.DataObject, workers: list[Worker]) -> Worker:
        return workers[data.draw(st.integers(0, len(workers) - 1))]

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.pool.workers if worker not in self.pool.dying]

    @precondition(lambda self: len(self.pool.workers) < 5)
    @rule()
    def enter(self) -> None:
        self.pool.enter()

    @precondition(lambda self: any(not worker.waits for worker in self.living))
    @rule(data=st.data(), nbytes=st.integers(1, LIMIT), urgent=st.booleans())
    def need(self, data: st.DataObject, nbytes: int, urgent: bool) -> None:
        worker = self.one(data, [worker for worker in self.living if not worker.waits])
        self.pool.need(worker, nbytes, urgent=urgent)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        worker = self.one(data, self.living)
        used = data.draw(st.integers(0, worker.granted))
        self.pool.use(worker, used, data.draw(st.integers(0, used)))

    @precondition(lambda self: any(worker.asked for worker in self.living))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.give_back(self.one(data, [worker for worker in self.living if worker.asked]))

    @precondition(lambda self: self.pool.workers)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.pool.die(self.one(data, self.pool.workers))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def rest_or_work(self, data: st.DataObject) -> None:
        worker = self.one(data, self.living)
        if worker in self.pool.idle:
            self.pool.idle.remove(worker)
        else:
            self.pool.idle.append(worker)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), nbytes=st.integers(1, 50))
    def find_the_device_full(self, data: st.DataObject, nbytes: int) -> None:
        worker = self.one(data, self.living)
        lost = min(nbytes, worker.granted - worker.used)
        worker.granted -= lost
        self.pool.grants.heard(worker, DeviceFull(lost))

    @invariant()
    def no_more_is_granted_than_there_is(self) -> None:
        granted = sum(worker.granted for worker in self.pool.workers)
        assert granted <= self.pool.grants.limit
        assert self.pool.grants.free() == self.pool.grants.limit - granted


TestLife = Life.TestCase

PARTS = st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), st.booleans())


@given(others=st.lists(PARTS, max_size=4), nbytes=st.integers(1, 1200), free=st.integers(0, 200))
def test_what_can_be_had_is_granted_and_nobody_pays_for_what_can_not(
    others: list[tuple[int, int, int, bool]], nbytes: int, free: int
):
    pool = Pool(4 * 600)
    for unused, busy, kept, idle in others:
        pool.enter(unused + busy + kept, busy + kept, kept, idle=idle)
    pool.grants.limit = sum(worker.granted for worker in pool.workers) + free
    before = [(worker.granted, worker.kept) for worker in pool.workers]
    needy = pool.enter()
    attainable = pool.grants.attainable(needy)
    pool.need(needy, nbytes)
    pool.go_on()
    assert bool(needy.granted) == (nbytes <= attainable)
    if not needy.granted:
        assert not pool.evicted
        assert before == [(w.granted, w.kept) for w in pool.workers if w is not needy]
    else:
        assert needy.granted >= nbytes


def test_a_worker_alone_has_everything():
    pool = Pool()
    worker = pool.enter()
    pool.need(worker, 1)
    assert (worker.granted, worker.beyond) == (LIMIT, 0)


def test_the_next_ones_have_their_part_of_what_nobody_uses():
    pool = Pool()
    for _ in range(4):
        worker = pool.enter()
        pool.need(worker, 100)
        pool.go_on()
        pool.use(worker, 100, 0)
    assert sum(worker.granted for worker in pool.workers) <= LIMIT
    assert min(worker.granted for worker in pool.workers) >= 150


@pytest.mark.parametrize(
    ("nbytes", "kept", "evicted"), [(200, 200, 0), (300, 100, 0), (500, 0, 1), (850, 0, 2)]
)
def test_what_is_not_used_goes_first_then_what_is_kept_then_idle_models(
    nbytes: int, kept: int, evicted: int
):
    pool = Pool()
    first = pool.enter(300, 300, 0, idle=True)
    second = pool.enter(400, 300, 0, idle=True)
    keeper = pool.enter(300, 200, 200)
    needy = pool.enter()
    # It has 100 unused, as the second has.
    pool.need(needy, nbytes)
    pool.go_on()
    assert needy.granted >= nbytes
    assert keeper.kept == kept
    assert pool.evicted == [first, second][:evicted]


def test_nobody_gives_up_anything_for_who_only_looks_ahead():
    pool = Pool()
    pool.enter(500, 500, 0, idle=True)
    keeper = pool.enter(500, 500, 300)
    ahead = pool.enter()
    pool.need(ahead, 100, urgent=False)
    pool.go_on()
    assert (ahead.answers, keeper.kept, pool.evicted) == ([0], 300, [])


@pytest.fixture
def soon() -> Iterator[None]:
    """Workers are waited for only for a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ANSWER_SECONDS", 0.01)
        yield


@pytest.mark.usefixtures("soon")
def test_a_worker_that_does_not_answer_is_not_waited_for():
    pool = Pool()
    silent = pool.enter(600, 100)
    pool.enter(400, 400, idle=True)
    needy = pool.enter()
    pool.need(needy, 450)
    assert needy.told.wait(30)
    # Without what the silent one has, the idle model would have gone in vain.
    assert (needy.answers, pool.evicted) == ([0], [])
    assert silent.asked
    needy.told.clear()
    pool.need(needy, 300)
    while not pool.dying:
        time.sleep(0.001)
    assert not needy.told.is_set()
    pool.die(pool.dying[0])
    assert needy.granted >= 300


def test_one_that_is_evicted_is_waited_for_however_long_it_takes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ANSWER_SECONDS", 0.05)
        pool = Pool()
        going = pool.enter(1000, 900, 0, idle=True)
        needy = pool.enter()
        pool.need(needy, 500)
        while going.asked:
            pool.give_back(going)
        assert pool.dying == [going]
        # The time in which it had to give back is over by now.
        assert not needy.told.wait(0.2)
        pool.die(going)
        assert needy.answers == [1000]


def test_who_needs_next_is_served_when_the_first_has_ended():
    pool = Pool()
    holder = pool.enter(1000, 800, 600)
    first, second = pool.enter(), pool.enter()
    pool.need(first, 700)
    while holder.asked and not holder.asked[0].kept:
        pool.give_back(holder)
    pool.need(second, 700)
    pool.die(first)
    pool.go_on()
    assert second.granted >= 700


def test_what_was_granted_for_a_need_is_not_taken_for_unused_before_its_use_is_told():
    pool = Pool()
    loading, other = pool.enter(), pool.enter()
    pool.need(loading, 900)
    assert pool.grants.attainable(other) <= 100


def test_a_worker_is_told_what_it_could_have_when_that_has_changed():
    pool = Pool()
    worker = pool.enter(500, 500)
    other = pool.enter(500, 500)
    pool.grants.tell(worker)
    assert worker.beyond == 0
    pool.idle.append(other)
    pool.grants.tell(worker)
    assert worker.beyond == 500

"""A worker's side of granted memory: asked for ahead, waited for only by a load."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from mlx_manager.mlx_server.utils.memory import Ledger, Relief
from mlx_manager.mlx_server.workers import memory as module
from mlx_manager.mlx_server.workers.memory import GrantedMemory
from mlx_manager.mlx_server.workers.messages import (
    DeviceFull,
    GaveBack,
    GiveBack,
    Granted,
    Need,
    Using,
)


@pytest.fixture(autouse=True)
def limit(mlx_limit: int) -> int:
    """Whatever moves MLX's limit moves it back."""
    return mlx_limit


class Told:
    """The messages to the server."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[Any] = SimpleQueue()

    def all(self) -> list[Any]:
        return [self.messages.get() for _ in range(self.messages.qsize())]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(0, cache_bytes=int, drop_cache=lambda: None)


@pytest.fixture
def memory(ledger: Ledger, told: Told) -> GrantedMemory:
    found = GrantedMemory(ledger, told.messages.put)
    found.begin(10_000)
    return found


@pytest.fixture
def serving(ledger: Ledger, memory: GrantedMemory, told: Told) -> GrantedMemory:
    """That of a loaded model which has 1000 bytes, of which it uses 900."""
    memory.waits = False
    memory.granted(Granted(1000, 0))
    memory.apply()
    ledger.record("weights:m", 900)
    memory.tell()
    told.all()
    return memory


def test_a_load_waits_for_what_it_needs(ledger: Ledger, memory: GrantedMemory, told: Told):
    answering = threading.Thread(target=lambda: answer(told, memory, Granted(700, 50)))
    answering.start()
    assert memory.take(600)
    answering.join()
    assert (ledger.limit, ledger.attainable()) == (700, 750)


def answer(told: Told, memory: GrantedMemory, *answers: Granted) -> None:
    """Answer each need in turn."""
    for granted in answers:
        while not isinstance(told.messages.get(timeout=30), Need):
            pass
        memory.granted(granted)


def test_a_load_that_gets_nothing_goes_on_with_nothing(
    ledger: Ledger, memory: GrantedMemory, told: Told
):
    answering = threading.Thread(target=lambda: answer(told, memory, Granted(0, 50)))
    answering.start()
    assert not memory.take(600)
    answering.join()
    assert (ledger.limit, ledger.attainable()) == (0, 50)


def test_a_load_takes_no_answer_to_an_earlier_question_for_its_own(
    ledger: Ledger, serving: GrantedMemory, told: Told
):
    ledger.record("weights:m", 990)
    serving.look_ahead()
    serving.waits = True
    answering = threading.Thread(
        target=lambda: answer(told, serving, Granted(0, 900), Granted(600, 0))
    )
    answering.start()
    assert serving.take(500)
    answering.join()


def test_a_step_does_not_wait_and_says_that_more_is_to_come(
    ledger: Ledger, serving: GrantedMemory, told: Told
):
    serving.beyond = 500
    assert not ledger.reserve("pages:m", 300)
    assert told.all() == [Need(200, urgent=True)]
    assert ledger.more_to_come()
    assert not ledger.reserve("pages:m", 300)
    assert told.all() == []
    serving.granted(Granted(250, 0))
    serving.apply()
    assert not ledger.more_to_come()
    assert ledger.reserve("pages:m", 300)


def test_what_can_not_be_had_is_not_asked_for_again_and_again(
    ledger: Ledger, serving: GrantedMemory, told: Told, monkeypatch: pytest.MonkeyPatch
):
    now = 100.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    assert not ledger.reserve("pages:m", 300)
    serving.granted(Granted(0, 10))
    serving.apply()
    for _ in range(3):
        assert not ledger.reserve("pages:m", 300)
    assert told.all() == [Need(200, urgent=True)]
    assert not ledger.more_to_come()
    now += 2
    assert not ledger.reserve("pages:m", 300)
    assert told.all() == [Need(200, urgent=True)]


def test_more_is_asked_for_before_it_is_needed(ledger: Ledger, serving: GrantedMemory, told: Told):
    serving.look_ahead()
    assert told.all() == []
    ledger.record("pages:m", 60)
    serving._looked_at = 0.0
    serving.look_ahead()
    assert told.all() == [Need(124, urgent=False), Using(960, 0)]


def test_what_is_not_used_is_given_back_save_a_little(
    ledger: Ledger, serving: GrantedMemory, told: Told
):
    serving.give_back(GiveBack(500, kept=False))
    assert told.all() == [GaveBack(38)]
    serving.give_back(GiveBack(50, kept=True))
    assert told.all() == [GaveBack(50)]
    assert ledger.limit == 912
    assert serving.beyond == 88


def test_what_is_kept_for_reuse_is_given_back_where_it_is_needed(
    ledger: Ledger, serving: GrantedMemory, told: Told
):
    def release(lacking: int) -> None:
        ledger.record("pages:m", 0)

    ledger.record("pages:m", 80)
    ledger.add_relief(Relief.PAGES, release, lambda: 80)
    serving.tell()
    assert told.all() == [Using(980, 80)]
    serving.give_back(GiveBack(15, kept=True))
    assert ledger.figures()["pages:m"] == 80
    serving.give_back(GiveBack(60, kept=True))
    assert "pages:m" not in ledger.figures()
    assert [m for m in told.all() if isinstance(m, GaveBack)] == [GaveBack(15), GaveBack(60)]


def test_what_the_device_lacks_is_told_once(ledger: Ledger, serving: GrantedMemory, told: Told):
    ledger.total -= 400
    ledger.extend(-400)
    serving.tell()
    serving.tell()
    assert [m for m in told.all() if isinstance(m, DeviceFull)] == [DeviceFull(400)]

from __future__ import annotations

from mlx_manager.mlx_server.remotes.breaker import FAILURES, LONGEST, SHORTEST, Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock, times: int = FAILURES) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(times):
        breaker.failed("it is off")
    return breaker


def test_a_single_failure_leaves_it_closed() -> None:
    breaker = opened(Clock(), FAILURES - 1)
    assert breaker.rest == 0
    assert breaker.reason == "it is off"


def test_it_opens_for_longer_with_each_failure_up_to_a_limit() -> None:
    clock = Clock()
    rests = [opened(clock, times).rest for times in range(FAILURES, FAILURES + 9)]
    assert rests[:3] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert rests[-1] == LONGEST


def test_after_its_pause_one_request_is_let_through_at_a_time() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += SHORTEST
    assert breaker.rest == 0
    trial = breaker.enter()
    assert breaker.rest > 0
    # A client that left says nothing of the server.
    breaker.leave(trial)
    assert breaker.rest == 0


def test_a_success_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock, 5)
    breaker.succeeded()
    assert (breaker.rest, breaker.failures, breaker.reason) == (0, 0, "")

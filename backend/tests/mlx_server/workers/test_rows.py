"""Messages of a worker's rows, and the end of a row."""

from __future__ import annotations

from typing import Any

from mlx_manager.mlx_server.core import (
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    Usage,
)
from mlx_manager.mlx_server.engine.stream import Outbox
from mlx_manager.mlx_server.errors import GenerationFailed
from mlx_manager.mlx_server.workers.messages import Failed, News
from mlx_manager.mlx_server.workers.rows import ServedRows

END = Finished("stop", Usage(3, 2))


class Sent:
    """A connection, and whether the worker can go on."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.looks = 0
        self.broken: str | None = None
        self.served = ServedRows(self.messages.append, lambda: self.broken, self.look)

    def look(self) -> None:
        self.looks += 1

    def step(self, *news: tuple[int, list[Event] | GenerationFailed]) -> None:
        """Deliver a step's news as an engine does."""
        outbox = Outbox()
        for number, outcome in news:
            row = self.served.rows.get(number) or self.served.row(number)
            if isinstance(outcome, GenerationFailed):
                outbox.fail(row, outcome)
            else:
                outbox.put(row, outcome)
        outbox.flush()


def test_the_rows_of_a_step_share_a_message() -> None:
    sent = Sent()
    sent.step((1, [TextDelta("a")]), (2, [ReasoningDelta("b")]))
    assert sent.messages == [News([(1, 0, "a"), (2, 0, [ReasoningDelta("b")])])]
    assert sent.looks == 1


def test_a_text_with_log_probabilities_is_told_whole() -> None:
    sent = Sent()
    scored = TextDelta("a", (TokenLogprob(1, b"a", -0.5),))
    sent.step((1, [scored]))
    assert sent.messages == [News([(1, 0, [scored])])]


def test_a_row_tells_how_many_tokens_are_drawn() -> None:
    sent = Sent()
    sent.served.row(1).drawn = iter((1, 5)).__next__
    sent.step((1, [Started(3)]))
    sent.step((1, [TextDelta("a")]))
    assert sent.messages == [News([(1, 1, [Started(3)])]), News([(1, 5, "a")])]


def test_a_row_that_has_ended_is_forgotten() -> None:
    sent = Sent()
    sent.step((1, [TextDelta("a"), END]), (2, [TextDelta("b")]))
    assert list(sent.served.rows) == [2]
    sent.step((2, GenerationFailed("It broke.")))
    assert not sent.served.rows


def test_a_failure_follows_what_came_before_it_and_has_no_frames() -> None:
    sent = Sent()
    try:
        raise GenerationFailed("It broke.") from ValueError("deep within")
    except GenerationFailed as error:
        sent.step((1, [TextDelta("a")]), (2, [TextDelta("b")]), (1, error))
    news, failed = sent.messages
    assert news == News([(1, 0, "a"), (2, 0, "b")])
    assert (type(failed), failed.number, str(failed.error)) == (Failed, 1, "It broke.")
    assert (failed.error.__traceback__, failed.error.__cause__) == (None, None)


def test_rows_of_a_worker_that_can_not_go_on_are_failed_by_its_end() -> None:
    sent = Sent()
    sent.broken = "the GPU takes no more work"
    sent.step((1, GenerationFailed("It broke.")))
    assert sent.messages == []
    assert not sent.served.rows

"""The connection of two processes: whole messages in order, and nobody held up by the other end."""

from __future__ import annotations

import inspect
import pickle
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server import errors
from mlx_manager.mlx_server.config import EngineLimits, PoolLimits
from mlx_manager.mlx_server.core import (
    Admitted,
    Conversation,
    EmbeddingRequest,
    Finished,
    GenerationRequest,
    Message,
    ReasoningDelta,
    RerankRequest,
    RowStatus,
    Started,
    Text,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.errors import ContextLengthExceeded, MLXManagerError
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.settings import AS_IT_IS
from mlx_manager.mlx_server.workers import messages
from mlx_manager.mlx_server.workers.channel import Channel

LARGE = 8_000_000
"""Bytes, many times what a socket takes at once."""


class End:
    """One end, and what has come to it."""

    def __init__(self, end: socket.socket, name: str) -> None:
        self.messages: SimpleQueue[Any] = SimpleQueue()
        self.closed = threading.Event()
        self.channel = Channel(end, self.messages.put, self.closed.set, name)

    def next(self) -> Any:
        return self.messages.get(timeout=30)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    ours, theirs = socket.socketpair()
    one, other = End(ours, "one"), End(theirs, "other")
    yield one, other
    for end in (one, other):
        end.channel.close()


def test_messages_come_whole_and_in_order_both_ways(ends: tuple[End, End]):
    for end in ends:
        end.channel.start()
    sent = [b"a", b"b" * LARGE, "c", b"", b"d" * LARGE, list(range(1000))]
    for end in ends:
        for message in sent:
            end.channel.send(message)
    for end in ends:
        assert [end.next() for _ in sent] == sent


def test_an_end_that_does_not_read_holds_up_nobody(ends: tuple[End, End]):
    one, other = ends
    one.channel.start()
    for number in range(20):
        one.channel.send((number, b"x" * LARGE))
    # All has been taken over, and nothing read.
    other.channel.start()
    assert [other.next()[0] for _ in range(20)] == list(range(20))


def test_threads_may_send_at_once(ends: tuple[End, End]):
    one, other = ends
    for end in ends:
        end.channel.start()

    def send(thread: int) -> None:
        for number in range(200):
            one.channel.send((thread, number, b"x" * 10_000))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    came: dict[int, list[int]] = {number: [] for number in range(4)}
    for _ in range(800):
        thread, number, _ = other.next()
        came[thread].append(number)
    assert all(numbers == list(range(200)) for numbers in came.values())


@pytest.mark.parametrize("closing", [0, 1])
@pytest.mark.parametrize("backlog", [False, True])
def test_what_either_end_closes_is_closed_for_both(
    ends: tuple[End, End], closing: int, backlog: bool
):
    for end in ends:
        end.channel.start()
    ends[0].channel.send("before")
    assert ends[1].next() == "before"
    if backlog:
        for _ in range(10):
            ends[closing].channel.send(b"x" * LARGE)
    ends[closing].channel.close()
    for end in ends:
        assert end.closed.wait(30)
        end.channel.send("too late")
    ends[closing].channel.close()


def test_an_end_that_goes_in_the_middle_of_a_message_has_ended(ends: tuple[End, End]):
    ours, theirs = socket.socketpair()
    end = End(ours, "whole")
    end.channel.start()
    theirs.send(b"\x10\x00\x00\x00\x00\x00\x00\x00half")
    theirs.close()
    assert end.closed.wait(30)
    assert end.messages.empty()


REQUEST = GenerationRequest("m", Conversation((Message("user", "hi"),)), max_tokens=3)
FIELDS: dict[str, Any] = {
    "source": ModelSource("m", None, "embedded"),
    "recipe": AS_IT_IS,
    "limits": PoolLimits(),
    "engine": EngineLimits(),
    "prompt": Text("hi"),
    "conversation": REQUEST.prompt,
    "question": messages.Generate(REQUEST),
    "error": MLXManagerError("no", param="p", retry_after=3),
    "ids": (1, 2),
    "special": True,
    "texts": True,
    "urgent": True,
    "kept": True,
    "key": "k",
    "device": "cpu",
    "what": "it is read",
    "silence": 0.5,
    "result": {"a": 1},
    "ledger": {"weights:m": 1},
    "engine_stats": {},
}
EVENTS = [
    Admitted(),
    Started(3, 2, (1, 2, 3), ("strict",), 0.1, 0.2, kept_tokens=1),
    TextDelta("a", (TokenLogprob(1, b"\xff", -0.5, ((1, b"a", -0.5),)),)),
    ReasoningDelta("b"),
    ToolCallStarted(0, "call_1", "f"),
    ToolCallDelta(0, "{}"),
    Finished("stop", Usage(1, 2, 3, 4, 5), "x", (1,)),
]


def example(kind: type) -> object:
    """Return a message of that kind."""
    match kind:
        case messages.Generate:
            return messages.Generate(REQUEST)
        case messages.Embed:
            return messages.Embed(EmbeddingRequest("m", ("a", (1, 2))))
        case messages.Rank:
            return messages.Rank(RerankRequest("m", "q", ("a",)))
        case messages.LeavesRoom:
            return messages.LeavesRoom(REQUEST)
        case messages.News:
            return messages.News([(1, 2, "text"), (2, 3, EVENTS)])
        case messages.WorkerFigures:
            return messages.WorkerFigures(
                {"limit": 1}, {"active": 1}, {"steps": 1}, [RowStatus("r", 1, 2)]
            )
    names = inspect.signature(kind).parameters
    return kind(**{name: FIELDS.get(name, 7) for name in names})


KINDS = [
    kind
    for _, kind in inspect.getmembers(messages, inspect.isclass)
    if kind.__module__ == messages.__name__
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_comes_as_it_was_sent(kind: type):
    sent = example(kind)
    came = pickle.loads(pickle.dumps(sent))
    if isinstance(sent, messages.Failed):
        assert vars(came.error) == vars(sent.error)
    else:
        assert came == sent


ERRORS = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, MLXManagerError)
]


@given(
    error=st.sampled_from(ERRORS),
    message=st.one_of(st.text(), st.text(min_size=5000, max_size=5010)),
    param=st.one_of(st.none(), st.text(max_size=300)),
    retry_after=st.integers(1, 100),
)
def test_every_error_comes_with_all_it_says(
    error: type[MLXManagerError], message: str, param: str | None, retry_after: int
):
    sent = error(message, param=param, retry_after=retry_after)
    came = pickle.loads(pickle.dumps(sent))
    assert type(came) is error
    assert (came.message, str(came), came.param, came.retry_after) == (
        *(sent.message, str(sent), sent.param, sent.retry_after),
    )


def test_an_error_that_counts_tokens_comes_with_its_counts():
    came = pickle.loads(pickle.dumps(ContextLengthExceeded.counted(10, 5)))
    assert (came.tokens, came.context) == (10, 5)

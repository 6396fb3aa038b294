from __future__ import annotations

import asyncio

import pytest
from scripted import MODEL, ScriptedBackend, ScriptedPool, Step, says

from mlx_manager.mlx_server.config import KeyLimits, TimeLimits
from mlx_manager.mlx_server.core import (
    Admitted,
    Caller,
    EmbeddingRequest,
    GenerationRequest,
    Started,
    Text,
    TextDelta,
)
from mlx_manager.mlx_server.engine.stream import UNREAD, steps
from mlx_manager.mlx_server.errors import GenerationFailed, RequestTimedOut, ServerNotReady
from mlx_manager.mlx_server.observability.observer import Recorder
from mlx_manager.mlx_server.services.accounts import Account
from mlx_manager.mlx_server.services.calls import Calls
from mlx_manager.mlx_server.services.drain import Drain
from mlx_manager.mlx_server.services.embeddings import embed
from mlx_manager.mlx_server.services.inference import Inference
from mlx_manager.mlx_server.services.keys import ApiKey
from mlx_manager.mlx_server.timeline import Timeline

SOON = 0.02
REQUEST = GenerationRequest(MODEL, Text("x"))
STARTED: Step = [Started(1)]


def endless(*steps: Step) -> ScriptedPool:
    """A model whose answer never gets beyond `steps`."""
    return ScriptedPool(ScriptedBackend(lambda _: [*steps, asyncio.Event()]))


def draining(seconds: float) -> tuple[Calls, Drain]:
    def refusal() -> ServerNotReady | None:
        return drain.refusal()

    calls = Calls(refusal)
    drain = Drain(calls, seconds)
    return calls, drain


async def read(
    pool: ScriptedPool, limits: TimeLimits, calls: Calls | None = None, rows: int = 1
) -> None:
    await Inference(pool, calls=calls, limits=limits).generate([REQUEST] * rows).run(UNREAD)


@pytest.mark.parametrize(
    ("steps", "limits", "param", "where"),
    [
        ([], TimeLimits(queue=SOON), "queue_timeout", "waiting for its turn"),
        ([], TimeLimits(first_token=SOON), "first_token_timeout", "waiting for its turn"),
        ([[Admitted()]], TimeLimits(first_token=SOON), "first_token_timeout", "prompt"),
        ([[Admitted()]], TimeLimits(total=SOON), "timeout", "prompt"),
        ([[Admitted()], STARTED], TimeLimits(total=SOON), "timeout", "answer"),
        ([STARTED, [TextDelta("a")]], TimeLimits(total=SOON), "timeout", "answer"),
    ],
)
async def test_the_error_names_the_limit_and_how_far_the_call_was(
    steps: list[Step], limits: TimeLimits, param: str, where: str
):
    pool = endless(*steps)
    with pytest.raises(RequestTimedOut, match=f"`{param}` of 0.02 s: .*{where}") as found:
        await read(pool, limits)
    assert found.value.param == param
    assert (pool.leases, pool.backend.running, pool.backend.cancelled) == (0, 0, 1)


async def test_texts_that_are_being_read_no_longer_wait_for_their_turn():
    pool, texts = endless([Admitted()]), EmbeddingRequest(MODEL, ("a", "b"))
    limited = Inference(pool, limits=TimeLimits(queue=SOON, total=2 * SOON))
    with pytest.raises(RequestTimedOut, match=r"`timeout` of 0\.04 s: its prompt was"):
        await embed(limited, texts)
    pool = endless()
    limited = Inference(pool, limits=TimeLimits(queue=SOON))
    with pytest.raises(RequestTimedOut, match=r"`queue_timeout` of 0\.02 s: it was"):
        await embed(limited, texts)


async def test_loading_counts_for_the_first_token_and_not_for_the_queue():
    pool = endless()
    pool.loading = asyncio.Event()
    with pytest.raises(RequestTimedOut, match="its model was still being loaded"):
        await read(pool, TimeLimits(queue=SOON / 100, first_token=SOON))


async def test_a_conversation_is_shortened_and_answered_as_one_call():
    calls, pool = Calls(), endless(STARTED)
    pool.loading = asyncio.Event()
    longer = GenerationRequest(MODEL, Text("word " * 9000))
    answer = steps(Inference(pool, calls=calls).generate_fitting([longer, REQUEST]).run)
    reading = asyncio.create_task(anext(answer))
    await calls.begun()
    (arrived,) = calls
    pool.loading.set()
    await reading
    assert list(calls) == [arrived]
    assert pool.backend.requests == [REQUEST]
    await answer.aclose()


async def test_a_conversation_is_shortened_and_answered_within_the_limits():
    pool = endless(STARTED)
    limited = Inference(pool, limits=TimeLimits(total=SOON))
    with pytest.raises(RequestTimedOut, match="ran into its `timeout`"):
        await limited.generate_fitting([REQUEST, REQUEST]).run(UNREAD)
    pool.loading = asyncio.Event()
    with pytest.raises(RequestTimedOut, match="its model was still being loaded"):
        await limited.generate_fitting([REQUEST, REQUEST]).run(UNREAD)


async def test_a_question_about_tokens_is_a_call_with_limits():
    calls, pool = Calls(), endless()
    limited = Inference(pool, calls=calls, limits=TimeLimits(total=SOON))

    async def tokens(model: ScriptedBackend, caller: Caller) -> list[int]:
        return list((await model.tokenize(Text("a b"), caller=caller)).ids)

    async def never(model: ScriptedBackend, caller: Caller) -> None:
        await asyncio.Event().wait()

    assert await limited.ask(MODEL, tokens) == [0, 1]
    pool.loading = asyncio.Event()
    with pytest.raises(RequestTimedOut, match="its model was still being loaded"):
        await limited.ask(MODEL, tokens)
    pool.loading = None
    with pytest.raises(RequestTimedOut, match="its prompt was still being processed"):
        await limited.ask(MODEL, never)
    assert (len(calls), pool.leases) == (0, 0)


async def test_a_call_that_is_on_time_is_left_alone():
    pool = ScriptedPool(ScriptedBackend(lambda _: [[Admitted()], *says("a")]))
    await read(pool, TimeLimits(queue=60, first_token=60, total=60))


async def test_of_two_limits_the_shorter_counts():
    owner, asked = TimeLimits(queue=5, total=10), TimeLimits(first_token=2, total=30)
    assert owner.and_also(asked) == TimeLimits(5, 2, 10)


async def test_the_rows_of_one_call_end_together():
    pool = endless(STARTED)
    with pytest.raises(RequestTimedOut):
        await read(pool, TimeLimits(total=SOON), rows=3)
    assert pool.backend.cancelled == 3


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("turns", [0, 2])
async def test_an_answer_that_is_complete_stays_so_though_its_caller_has_not_taken_the_last(
    rows: int, turns: int
):
    calls, records = Calls(), list[Timeline]()
    pool = ScriptedPool(ScriptedBackend(lambda _: says("a")))
    watched = Inference(pool, [Recorder([records.append])], calls=calls)
    answer = steps(watched.generate([REQUEST] * rows).run)
    await anext(answer)
    (call,) = calls
    while not call.timeline.finished:
        await anext(answer)
    for _ in range(2):
        calls.interrupt(lambda: RequestTimedOut("late"))
    for _ in range(turns):
        await asyncio.sleep(0)
    assert await anext(answer, None) is None
    assert [record.outcome for record in records] == ["stop"]
    assert (len(calls), pool.leases) == (0, 0)


async def test_a_complete_answer_that_nobody_takes_is_let_go_of():
    calls, pool = Calls(), ScriptedPool(ScriptedBackend(lambda _: says("a")))
    answer = steps(Inference(pool, calls=calls).generate([REQUEST]).run)
    await anext(answer)
    (call,) = calls
    while not call.timeline.finished:
        await anext(answer)
    calls.interrupt(lambda: RequestTimedOut("late"))
    assert await calls.ended(60)
    assert pool.leases == 0
    await answer.aclose()


async def test_who_is_busy_with_what_came_learns_of_the_interruption_when_asking_for_more():
    calls = Calls()
    pool = ScriptedPool(ScriptedBackend(lambda _: says("a")))
    answer = steps(Inference(pool, calls=calls).generate([REQUEST]).run)
    await anext(answer)
    calls.interrupt(lambda: GenerationFailed("lost"))
    await asyncio.sleep(0)
    with pytest.raises(GenerationFailed, match="lost"):
        await anext(answer)
    assert len(calls) == 0


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("limits", [TimeLimits(total=SOON), TimeLimits()])
async def test_rows_end_at_once_though_their_caller_asks_for_no_more(rows: int, limits: TimeLimits):
    calls, pool, records = Calls(), endless(STARTED), list[Timeline]()
    inference = Inference(pool, [Recorder([records.append])], calls=calls, limits=limits)
    answer = steps(inference.generate([REQUEST] * rows).run)
    await anext(answer)
    if limits.total is None:
        calls.interrupt(lambda: RequestTimedOut("late"))
    assert await calls.ended(60)
    assert (pool.leases, pool.backend.running, pool.backend.cancelled) == (0, 0, rows)
    assert [record.outcome for record in records] == ["timeout"]
    with pytest.raises(RequestTimedOut):
        await anext(answer)
    assert len(records) == 1


async def test_a_keys_turn_is_free_though_its_caller_asks_for_no_more():
    calls, pool = Calls(), endless(STARTED)
    account = Account(ApiKey("a", "", KeyLimits(max_concurrent=1)))
    stalled = steps(Inference(pool, account=account, calls=calls).generate([REQUEST]).run)
    await anext(stalled)
    calls.interrupt(lambda: GenerationFailed("lost"))
    assert await calls.ended(60)
    other = steps(Inference(pool, account=account).generate([REQUEST]).run)
    await anext(other)
    await other.aclose()
    await stalled.aclose()


@pytest.mark.parametrize("turns", range(6))
async def test_a_caller_may_leave_while_the_rows_are_being_ended(turns: int):
    calls, pool = Calls(), endless(STARTED)
    answer = steps(Inference(pool, calls=calls).generate([REQUEST] * 2).run)
    await anext(answer)
    calls.interrupt(lambda: GenerationFailed("lost"))
    for _ in range(turns):
        await asyncio.sleep(0)
    await answer.aclose()
    assert (len(calls), pool.leases, pool.backend.cancelled) == (0, 0, 2)


async def test_a_caller_who_is_cancelled_is_cancelled_and_not_interrupted():
    calls, pool = Calls(), endless(STARTED)
    reading = asyncio.create_task(read(pool, TimeLimits(), calls))
    await pool.backend.until(lambda backend: backend.running == 1)
    reading.cancel()
    calls.interrupt(lambda: GenerationFailed("lost"))
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(calls) == 0


async def test_draining_waits_for_calls_and_refuses_new_ones():
    pool = endless(STARTED)
    calls, drain = draining(60)
    reading = asyncio.create_task(read(pool, TimeLimits(), calls))
    await pool.backend.until(lambda backend: backend.running == 1)
    drain.begin()
    with pytest.raises(ServerNotReady) as refused:
        await read(pool, TimeLimits(), calls)
    assert 55 < (refused.value.retry_after or 0) <= 60
    assert not reading.done()
    reading.cancel()
    await drain.done()
    assert len(calls) == 0


async def test_draining_cuts_at_the_deadline_who_has_not_ended():
    pool, calls = endless(STARTED), Calls()
    reading = asyncio.create_task(read(pool, TimeLimits(), calls))
    await pool.backend.until(lambda backend: backend.running == 1)
    drain = Drain(calls, SOON)
    drain.begin()
    with pytest.raises(ServerNotReady, match=r"not complete within 0\.02 s"):
        await reading
    await drain.done()


async def test_a_drain_that_is_revoked_cuts_nobody():
    pool = endless(STARTED)
    calls, drain = draining(SOON)
    drain.begin()
    drain.revoke()
    await drain.done()
    assert not drain.begun
    with pytest.raises(RequestTimedOut):
        await read(pool, TimeLimits(total=5 * SOON), calls)

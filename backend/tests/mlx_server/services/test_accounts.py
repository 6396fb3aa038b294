from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scripted import MODEL, ScriptedBackend, ScriptedPool

from mlx_manager.mlx_server.config import AccessRules, KeyLimits
from mlx_manager.mlx_server.core import (
    Finished,
    GenerationRequest,
    Started,
    Text,
    TextDelta,
    Usage,
)
from mlx_manager.mlx_server.engine.stream import steps
from mlx_manager.mlx_server.errors import (
    AuthenticationFailed,
    MLXManagerError,
    Overloaded,
    PermissionDenied,
    RateLimited,
)
from mlx_manager.mlx_server.services.accounts import Account, Accounts
from mlx_manager.mlx_server.services.inference import Inference
from mlx_manager.mlx_server.services.keys import ApiKey, add_key


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def account(clock: Clock | None = None, **limits: int) -> Account:
    return Account(ApiKey("alice", "", KeyLimits(**limits)), clock or Clock())


def request(text: str = "x", priority: int = 0) -> GenerationRequest:
    return GenerationRequest(MODEL, Text(text), priority=priority)


def test_a_request_too_many_is_told_when_to_come_again():
    clock = Clock()
    alice = account(clock, requests_per_minute=2)
    alice.count_request()
    alice.count_request()
    with pytest.raises(RateLimited, match="2 requests a minute") as refused:
        alice.count_request()
    assert refused.value.retry_after == 30
    clock.now = 30
    alice.count_request()


def test_who_has_used_up_requests_and_tokens_is_told_when_both_are_there_again():
    clock = Clock()
    alice = account(clock, requests_per_minute=1, tokens_per_minute=60)
    alice.count_request()
    alice.charge(180)
    with pytest.raises(RateLimited, match="60 tokens a minute") as refused:
        alice.count_request()
    assert refused.value.retry_after == 121
    clock.now = 121
    alice.count_request()


async def test_tokens_of_prompts_and_answers_count_also_when_the_caller_goes_away():
    alice, one = account(tokens_per_minute=1000), request()
    answers = iter(
        (
            [[Started(100)], [TextDelta("a")], [Finished("stop", Usage(100, 30))]],
            [[Started(100)], [TextDelta("b")], 7, [TextDelta("c")], asyncio.Event()],
        )
    )
    pool = ScriptedPool(ScriptedBackend(lambda _: next(answers)))
    answer = steps(Inference(pool, account=alice).generate([one, one]).run)
    begun = await anext(answer)
    assert [event for _, events in begun for event in events] == [Started(100)] * 2
    # The answers to a prompt share it, and it counts as soon as it has been processed.
    assert alice.rates()[0].left == 900
    async for step in answer:
        if (1, [TextDelta("c")]) in step:
            break
    assert alice.rates()[0].left == 900
    await answer.aclose()
    assert alice.rates()[0].left == 900 - 30 - 8


def test_a_key_that_has_used_its_tokens_waits_for_them_to_flow_back():
    clock = Clock()
    alice = account(clock, tokens_per_minute=60)
    alice.charge(90)
    with pytest.raises(RateLimited, match="60 tokens a minute") as refused:
        alice.count_request()
    assert refused.value.retry_after == 31
    clock.now = 31
    alice.count_request()


async def test_turns_come_in_order_and_whoever_leaves_makes_place():
    alice = account(max_concurrent=1, max_queued=2)
    order: list[int] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def work(number: int) -> None:
        async with alice.turn():
            order.append(number)
            begun.set()
            await gate.wait()

    tasks = [asyncio.create_task(work(number)) for number in range(3)]
    await begun.wait()
    with pytest.raises(Overloaded, match="1 requests under way and 2 waiting"):
        await work(3)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    gate.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert order == [0, 2]
    async with asyncio.timeout(5), alice.turn():
        pass


def test_a_key_goes_no_earlier_than_it_may():
    alice = account(priority=0)
    alice.check_priority([request(), request(priority=3)])
    with pytest.raises(PermissionDenied, match="-1"):
        alice.check_priority([request(), request(priority=-1)])
    later = account(priority=5)
    later.check_priority([request(), request(priority=6)])
    with pytest.raises(PermissionDenied, match=r"`priority` 4 .* at least 5"):
        later.check_priority([request(priority=4)])
    assert [later.priority(asked) for asked in (0, 5, 6)] == [5, 5, 6]
    assert [account(priority=-1).priority(asked) for asked in (0, -1)] == [0, -1]


def test_keys_are_read_again_and_those_that_stay_keep_what_they_used(tmp_path: Path):
    file = tmp_path / "keys.toml"
    alice = add_key(file, "alice", {"requests_per_minute": 2})
    accounts = Accounts(AccessRules(keys_file=file))
    accounts.find(alice).count_request()
    bob = add_key(file, "bob", {})
    with pytest.raises(AuthenticationFailed):
        accounts.find(bob)
    accounts.know(accounts.read())
    assert accounts.find(bob).key.name == "bob"
    assert accounts.find(alice).rates()[0].left == 1
    file.write_text("broken")
    with pytest.raises(MLXManagerError):
        accounts.know(accounts.read())
    assert accounts.find(bob).key.name == "bob"


def test_without_keys_everybody_is_welcome_and_with_one_nobody_else():
    assert Accounts(AccessRules()).find("anything").key.name == ""
    accounts = Accounts(AccessRules(key="secret"))
    assert accounts.find("secret").key.name == "default"
    for wrong in (None, "", "Secret", "\udcff", "ключ"):
        with pytest.raises(AuthenticationFailed):
            accounts.find(wrong)

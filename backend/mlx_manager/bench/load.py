"""The load: requests go out by the plan, and what became of each is collected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import aiohttp

from mlx_manager.bench.exchange import Outcome, exchange, make_session
from mlx_manager.bench.plan import USUAL, Plan, TextLength

FEW = 8
WARMUP_TOKENS = 16
REFUSED = (400, 422)


class FirstRequestFailed(Exception):
    """The server can't be measured: the first request to it failed. `status` 0: no answer."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.error)
        self.status = outcome.status


@dataclass(slots=True)
class Measured:
    """Results of a plan. `seconds`: from the first request to the end of the last answer.

    cpu_seconds: CPU time that this program spent meanwhile. stopped: the person ended it early.
    """

    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    stopped: bool = False


async def measure(plan: Plan, tell: Callable[[Measured], None]) -> Measured:
    """Warm up, then send the load. `tell` hears of every answer.

    Raises:
        FirstRequestFailed: nothing was measured.
    """
    random = Random(plan.seed)  # nosec B311  # draws a load
    async with make_session(plan) as session:
        plan, length = await calibrate(session, plan, random)
        words = length.words(plan.prompt_tokens)
        warm = min(WARMUP_TOKENS, plan.output_tokens)
        warmups = [plan.body(random, words, warm) for _ in range(plan.warmup)]
        await warm_up(session, plan, warmups)
        measured = Measured(plan)
        started, cpu = time.perf_counter(), time.process_time()
        try:
            await send_all(session, measured, random, words, tell)
        except asyncio.CancelledError:
            measured.stopped = True
        measured.seconds = time.perf_counter() - started
        measured.cpu_seconds = time.process_time() - cpu
    return measured


async def calibrate(
    session: aiohttp.ClientSession, plan: Plan, random: Random
) -> tuple[Plan, TextLength]:
    """Learn how the model counts words, and whether the server takes `ignore_eos`."""
    first = await exchange(session, plan, plan.body(random, FEW, 1))
    if first.status in REFUSED and plan.extra.get("ignore_eos"):
        plan = replace(plan, extra={**plan.extra, "ignore_eos": None})
        first = await exchange(session, plan, plan.body(random, FEW, 1))
    if first.error:
        raise FirstRequestFailed(first)
    many = max(10 * FEW, plan.prompt_tokens)
    second = await exchange(session, plan, plan.body(random, many, 1))
    while second.status in REFUSED and many > 10 * FEW:
        # So many words may be more tokens than the model takes, where so many tokens are not.
        many = max(10 * FEW, many // 2)
        second = await exchange(session, plan, plan.body(random, many, 1))
    if first.usage is None or second.usage is None:
        return plan, USUAL
    return plan, TextLength.measured((FEW, first.usage.prompt), (many, second.usage.prompt))


async def warm_up(
    session: aiohttp.ClientSession, plan: Plan, bodies: Sequence[dict[str, Any]]
) -> None:
    """Send `bodies`, as many at once as the plan allows."""
    room = asyncio.Semaphore(plan.concurrency)

    async def send(body: dict[str, Any]) -> None:
        async with room:
            await exchange(session, plan, body)

    await asyncio.gather(*map(send, bodies))


async def send_all(
    session: aiohttp.ClientSession,
    measured: Measured,
    random: Random,
    words: int,
    tell: Callable[[Measured], None],
) -> None:
    plan = measured.plan
    room = asyncio.Semaphore(plan.concurrency)
    end = time.perf_counter() + (plan.duration or float("inf"))

    async def send() -> None:
        try:
            body = plan.body(random, words, plan.output_tokens)
            measured.outcomes.append(await exchange(session, plan, body))
            tell(measured)
        finally:
            room.release()

    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for sent, pause in enumerate(plan.pauses()):
            due += pause
            if sent == plan.requests or due >= end:
                return
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await room.acquire()
            if time.perf_counter() >= end:
                return
            group.create_task(send())

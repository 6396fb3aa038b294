"""Drafts where steps are queued ahead, as on a GPU: by portable kernels, and what they cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from devices.portable import Portable
from engine.rig import HandRig, NoText, Row, alone, prompt
from engine.speculation.test_equality import answers, check_equal, request_of
from engine.speculation.test_rows import guessing, wrong
from execution.on_kernels import on_kernels
from thorough import slow
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.engine.speculation.speculation import (
    FORGOTTEN,
    FRESH,
    LONGEST_FORGOTTEN,
    PLAIN,
    Speculation,
)
from mlx_manager.mlx_server.execution.attention.paged import FEW_QUERIES
from mlx_manager.mlx_server.execution.decoder import forward as forwards
from mlx_manager.mlx_server.execution.decoder.forward import ROWS
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward


@pytest.fixture(autouse=True)
def _little_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "LONG", 256)
    monkeypatch.setattr(devices, "CPU", replace(devices.CPU, warm_chunk=64))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "fused"),
        # Windows, and latents, which drafts write apart from attention, too.
        pytest.param("gemma3_text", "fused", marks=slow),
        pytest.param("glm4_moe_lite", "fused", marks=slow),
        pytest.param("gemma4_text, keys shared", "fused", marks=slow),
        pytest.param("ministral3", "fused", marks=slow),
        # Layers that keep a state in slots, and in the module's caches.
        pytest.param("lfm2", "fused", marks=slow),
        pytest.param("qwen3_5", "fused", marks=slow),
        pytest.param("falcon_h1", "separate", marks=slow),
        pytest.param("kimi_linear", "separate", marks=slow),
        pytest.param("gpt_oss", "ragged", marks=slow),
        pytest.param("deepseek_v3", "separate", marks=slow),
    ],
)
async def test_drafts_change_nothing_of_random_requests(
    family: str, kind: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "m", family)
    rng = random.Random(52)
    requests = [request_of(rng) for _ in range(8)]
    plain, rig = await answers(folder, requests, None, choose=on_kernels)
    assert (rig.forward.kind, rig.forward.looks_ahead) == (kind, True)
    guesses = [wrong(answer.tokens, 3 + i % 4) for i, answer in enumerate(plain)]
    proposers = [Proposer(guess if i % 4 else ()) for i, guess in enumerate(guesses)]
    drafted, rig = await answers(folder, requests, proposers, choose=on_kernels, speculation="on")
    check_equal(requests, plain, drafted)
    stats = rig.engine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


async def test_a_draft_model_is_run_on_kernels_too(llama: Path) -> None:
    async with HandRig(llama, choose=on_kernels, draft=llama, speculation="on") as rig:
        rows = [rig.row(prompt(9 + 5 * i, i + 1), 12) for i in range(2)]
        for row in rows:
            row.sequence.proposer = NoText()
        rig.submit_together(rows)
        rig.run()
        for i, row in enumerate(rows):
            assert row.tokens == alone(rig.model, prompt(9 + 5 * i, i + 1), 12)
        stats = rig.engine.stats()
        assert stats.accepted_tokens == stats.draft_tokens > 0


class Shapes(Portable):
    """Portable kernels that note the numbers of queries that they attend for."""

    rows: ClassVar[set[int]] = set()
    tokens: ClassVar[set[int]] = set()

    def attend(self, q, *args, **how):
        self.rows.add(q.shape[0])
        return super().attend(q, *args, **how)

    def attend_fused(self, qkv, *args, **how):
        self.tokens.add(qkv.shape[0])
        return super().attend_fused(qkv, *args, **how)


async def test_rows_with_drafts_beside_others_come_in_few_shapes(llama: Path) -> None:
    async with HandRig(
        llama, choose=partial(on_kernels, kernels=Shapes), speculation="on", longest_draft=5
    ) as rig:
        rows = [rig.row(prompt(9, 5), 12)]
        for i in range(3):
            answer = alone(rig.model, prompt(9 + i, i + 1), 30)
            rows.append(guessing(rig, prompt(9 + i, i + 1), 30, wrong(answer, 4 + i)))
        rig.submit_together(rows)
        rig.step(2)
        Shapes.rows.clear()
        Shapes.tokens.clear()
        rig.run()
        # Drafts of one to three rows beside a running row: few sizes, each with padding.
        assert max(Shapes.rows) > 4
        assert Shapes.rows | Shapes.tokens <= set(ROWS)
        for row in rows:
            given = row.sequence.tokens[: row.sequence.prompt_length]
            assert row.tokens == alone(rig.model, given, row.sequence.limit)


def test_the_longest_draft_by_default_fits_a_compiled_step() -> None:
    # The row's newest token comes before it.
    assert 1 + EngineLimits().longest_draft <= FEW_QUERIES


class Watched:
    """A forward that notes of each step whether some row's newest token is on the device only,
    whether the device is said to wait for its rows, and whether it has prompts and drafts."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.rows: list[Row] = []
        self.ahead: list[bool] = []
        self.waited: list[bool] = []
        self.kinds: list[tuple[bool, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        ahead = any(row.sequence.pending for row in self.rows)
        self.ahead.append(ahead)
        self.waited.append(not ahead if decode is None else decode.waited)
        drafts = [chunk.every for chunk in chunks]
        self.kinds.append((not all(drafts), any(drafts)))
        return self._forward.run(decode, chunks)


def watched(*args: Any) -> Any:
    return Watched(on_kernels(*args))


class Ticking:
    """A clock by which every step takes about as long, whatever is in it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1 / 64
        return self.now


async def test_a_row_is_waited_for_only_where_a_draft_is_foreseen(llama: Path) -> None:
    async with HandRig(llama, choose=watched, clock=Ticking(), speculation="auto") as rig:
        forward: Any = rig.forward
        row = rig.row(prompt(20), 60)
        row.sequence.proposer = NoText()
        forward.rows.append(row)
        rig.submit_together([row])
        rig.run()
        # The prompt's step, and the first of the row, which is not worth the wait.
        assert forward.ahead == [False, False, *[True] * (len(forward.ahead) - 2)]
        answer, steps = row.tokens, len(forward.ahead)
        again = guessing(rig, prompt(20), 60, answer)
        forward.rows.append(again)
        rig.submit_together([again])
        rig.run()
        assert again.tokens == answer
        ahead = forward.ahead[steps:]
        assert len(ahead) < 0.5 * len(answer)
        assert ahead.count(False) > 3
        assert forward.waited == [not each for each in forward.ahead]
        assert rig.engine.stats().accepted_tokens > 30


async def test_a_step_with_a_prompt_brings_no_drafts(llama: Path) -> None:
    size = StepSize(tokens=32)
    async with HandRig(
        llama, choose=watched, clock=Ticking(), speculation="auto", size=size
    ) as rig:
        forward: Any = rig.forward
        answer = alone(rig.model, prompt(20), 120)
        row = guessing(rig, prompt(20), 120, answer)
        rig.submit_together([row])
        while (False, True) not in forward.kinds:
            rig.step()
            assert row.sequence.drawn < 60
        forward.kinds.clear()
        rig.submit_together([rig.row(prompt(250, 3), 2)])
        rig.run()
        assert row.tokens == answer
        assert forward.kinds.count((True, False)) > 5
        assert (True, True) not in forward.kinds


# -- what drafts cost ------------------------------------------------------------------------------


def of(plain: float = 1.0) -> Speculation:
    return Speculation(8, 512, lambda rows: plain, always=False, ahead=True)


def unread(rig: HandRig, guess: list[int], right: int) -> Row:
    """A row whose newest token has not been read. All that it was foreseen to draw so far was
    right, for `right` tokens, or wrong."""
    row = rig.row(prompt(9), 500)
    row.sequence.tokens += guess[:3]
    row.sequence.proposer = proposer = Proposer(guess)
    row.sequence.pending, row.sequence.computed = 1, len(row.sequence.tokens)
    for _ in range(abs(right)):
        proposer.acceptance.learn("prediction", 1, int(right > 0))
    return row


def likely(speculation: Speculation, row: Row) -> bool:
    return speculation.is_likely([row.sequence])


async def test_what_is_foreseen_and_not_drawn_is_not_waited_for(llama: Path) -> None:
    async with HandRig(llama) as rig:
        guess = list(range(1, 90))
        assert likely(of(), unread(rig, guess, 20))
        assert not likely(of(), unread(rig, guess, -20))
        row, speculation = unread(rig, guess, 20), of()
        waited = 0
        while likely(speculation, row) and waited < 100:
            waited += 1
            # Another token than the one that was foreseen; what follows it is foreseen again.
            row.sequence.tokens += [200, *guess[:3]]
            row.sequence.computed += 4
        assert 2 < waited < 30
        assert row.sequence.proposer is not None
        assert row.sequence.proposer.acceptance.drafted == 0


async def test_where_the_wait_is_long_nothing_is_tried(llama: Path) -> None:
    async with HandRig(llama) as rig:
        row = unread(rig, list(range(1, 90)), 30)
        speculation, load = of(), StepLoad(1, late=True)
        assert likely(speculation, row)
        for _ in range(60):
            assert speculation.observe(9.0, load)
        assert not likely(speculation, row)
        for _ in range(60):
            speculation.observe(1.0, load)
        assert likely(speculation, row)


async def test_steps_that_are_queued_ahead_or_have_prompts_are_no_business_of_drafts() -> None:
    speculation = of()
    assert not speculation.observe(1.0, StepLoad(1))
    assert not speculation.observe(1.0, StepLoad(1, late=True).with_chunk(0, 9))
    assert not Speculation(8, 512, lambda rows: 1.0, always=False).observe(
        1.0, StepLoad(1, late=True)
    )


async def test_steps_of_kinds_that_are_not_compiled_yet_tell_nothing(llama: Path) -> None:
    async with HandRig(llama) as rig:
        row, speculation = unread(rig, list(range(1, 90)), 30), of()
        load = StepLoad(1, late=True).with_draft(8)
        for _ in range(3):
            speculation.observe(50.0, replace(load, fresh=True))
            speculation.observe(2.0, load)
        assert likely(speculation, row)
        for _ in range(30):
            speculation.observe(50.0, load)
        assert not likely(speculation, row)


async def test_new_kinds_that_come_again_and_again_count(llama: Path) -> None:
    async with HandRig(llama) as rig:
        row, speculation = unread(rig, list(range(1, 90)), 30), of()
        for _ in range(FRESH + 30):
            speculation.observe(50.0, replace(StepLoad(1, late=True).with_draft(8), fresh=True))
        assert not likely(speculation, row)


@pytest.mark.parametrize(("apart", "pays"), [(1000, True), (3, False)])
async def test_steps_that_are_slow_again_and_again_count_in_full(
    apart: int, pays: bool, llama: Path
) -> None:
    async with HandRig(llama) as rig:
        row, speculation = unread(rig, list(range(1, 90)), 30), of()
        for step in range(1, 100):
            more = 25.0 if step % apart == 0 else 2.5
            speculation.observe(1.0 + more, StepLoad(1, late=True).with_draft(8))
        assert likely(speculation, row) is pays


def chosen(speculation: Speculation, row: Row) -> int:
    row.sequence.pending = 0
    found = speculation.choose([row.sequence], StepLoad(1), 1 << 20, lambda row, tokens: tokens)
    row.sequence.pending = 1
    return len(list(found))


async def test_now_and_then_two_steps_in_a_row_have_no_drafts(llama: Path) -> None:
    async with HandRig(llama) as rig:
        row, speculation = unread(rig, list(range(1, 90)), 30), of()
        tried = []
        for _ in range(2 * (PLAIN + 2)):
            # The second of two can be queued ahead.
            waits = likely(speculation, row)
            tried.append((waits, chosen(speculation, row)))
        without = [number for number, (_, drafts) in enumerate(tried) if not drafts]
        assert without == [PLAIN, PLAIN + 1, 2 * PLAIN + 2, 2 * PLAIN + 3]
        assert not tried[PLAIN + 1][0]


async def test_prices_that_do_not_pay_are_tried_again_ever_more_rarely(llama: Path) -> None:
    async with HandRig(llama) as rig:
        row, speculation = unread(rig, list(range(1, 90)), 30), of()
        tries, step = [], 0
        while step < 3 * LONGEST_FORGOTTEN:
            step += 1
            if likely(speculation, row):
                tries.append(step)
                for _ in range(20):
                    speculation.observe(50.0, StepLoad(1, late=True).with_draft(8))
            else:
                chosen(speculation, row)
        apart = [b - a for a, b in pairwise(tries) if b - a > 1]
        assert apart[0] <= 2 * FORGOTTEN
        assert apart[-1] >= LONGEST_FORGOTTEN // 2

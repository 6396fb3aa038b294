"""What happens to a crowd when things go wrong at exact steps, and over many of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from engine.rig import HandRig, Rig, Row, prompt, regret
from mlx import nn
from thorough import ALL, one_in_turn
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.core import Finished, Sampling, TextDelta
from mlx_manager.mlx_server.errors import (
    GenerationFailed,
    MLXManagerError,
    OutOfMemory,
    ServerNotReady,
)
from mlx_manager.mlx_server.execution.forward import Forward, Snapshot
from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.text.grammar.guide import Guide
from mlx_manager.mlx_server.utils.text import sized

PAGE = 16 * 2 * 2 * 16 * 2 * 4
"""Bytes of a page of the tiny Llama: tokens, keys and values, heads, dim, layers, float32."""
AHEAD = pytest.mark.parametrize("looks_ahead", [False, True], ids=["", "ahead"])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "hybrid", "lfm2")


def right(rig: Rig, row: Row) -> bool:
    """Whether every token drawn is the one that the model draws for this row alone."""
    sequence = row.sequence
    assert row.tokens == sequence.tokens[sequence.prompt_length :]
    given = sequence.tokens[: sequence.prompt_length]
    return not row.tokens or regret(rig.model, given, row.tokens) < 1e-3


def nothing_left(rig: Rig) -> bool:
    s = rig.engine.stats()
    return (s.running, s.prefilling, s.waiting, s.pages_held) == (0, 0, 0, 0)


def taking_turns(abreast: int) -> Callable[[nn.Module, int], Forward]:
    """The way that is chosen, with so many rows enough for a step."""

    def chosen(model: nn.Module, page_size: int) -> Forward:
        forward = choose(model, page_size)
        forward.abreast = abreast
        return forward

    return chosen


def stored(rig: Rig) -> int:
    return sum(store.bytes_of(store.pages) for store in rig.forward.stores)


# ---------------------------------------------------------------------------------------------
# Failure of one
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "looks_ahead"), one_in_turn([0, 1, 2], [True, False]))
async def test_a_row_whose_parser_fails_costs_its_neighbours_nothing(
    llama: Path, place: int, looks_ahead: bool
) -> None:
    async with HandRig(llama, looks_ahead=looks_ahead) as rig:
        # Rows are in order of their length, so this one comes before, between or after.
        rows = [rig.row(prompt(12 + n, n + 1), 10) for n in range(3)]
        broken = rows.pop(place)
        rig.submit_together([*rows, broken])
        rig.step(4)
        broken.parser.push = None  # type: ignore[assignment, method-assign]
        rig.run()
        with pytest.raises(GenerationFailed):
            await broken.finished()
        for row in rows:
            assert (await row.finished()).usage.completion_tokens == 10
            assert right(rig, row)
        assert nothing_left(rig)


@AHEAD
async def test_rows_that_end_in_the_step_in_which_another_fails_are_ended(
    llama: Path, looks_ahead: bool
) -> None:
    async with HandRig(llama, looks_ahead=looks_ahead) as rig:
        broken, last = rig.row(prompt(5), 20), rig.row(prompt(9, 2), 4)
        rig.submit_together([broken, last])
        pushes = 0

        def breaks_at_the_fourth(token: int, logprob: object = None) -> list[object]:
            nonlocal pushes
            pushes += 1
            if pushes == 4:
                raise ValueError("this text can't be parsed")
            return []

        broken.parser.push = breaks_at_the_fourth  # type: ignore[assignment, method-assign]
        rig.run()
        assert (await last.finished()).usage.completion_tokens == 4
        assert right(rig, last)
        with pytest.raises(GenerationFailed):
            await broken.finished()
        assert nothing_left(rig)


async def test_two_rows_may_fail_in_one_step(llama: Path) -> None:
    async with HandRig(llama) as rig:
        rows = [rig.row(prompt(8 + n, n + 1), 6) for n in range(4)]
        for row in (rows[0], rows[2]):
            row.parser.push = None  # type: ignore[assignment, method-assign]
        rig.submit_together(rows)
        rig.run()
        outcomes = await asyncio.gather(*(r.finished() for r in rows), return_exceptions=True)
        assert [type(o) for o in outcomes] == [GenerationFailed, Finished] * 2
        assert nothing_left(rig)


@pytest.mark.parametrize(("place", "looks_ahead"), one_in_turn([0, 1, 2], [True, False]))
async def test_a_row_whose_grammar_fails_costs_its_neighbours_nothing(
    llama: Path, place: int, looks_ahead: bool
) -> None:
    class Broken(Guide):
        observed = 0

        def observe(self, *about: object) -> None:
            self.observed += 1
            if self.observed == 3:
                raise ValueError("this grammar can't be followed")

    async with HandRig(llama, looks_ahead=looks_ahead) as rig:
        rows = [rig.row(prompt(12 + n, n + 1), 8) for n in range(3)]
        broken = rows.pop(place)
        broken.sequence.guide = Broken("content", None, None, 9)
        guided = rows[0]
        guided.sequence.guide = Guide("content", None, None, 9)
        rig.submit_together([*rows, broken])
        rig.run()
        with pytest.raises(GenerationFailed):
            await broken.finished()
        for row in rows:
            assert (await row.finished()).usage.completion_tokens == 8
            assert right(rig, row)
        assert nothing_left(rig)


@pytest.mark.parametrize(
    ("family", "together"),
    one_in_turn(["llama", "gemma3_text", "deepseek_v3", "qwen3_next"], [True, False]),
)
async def test_what_a_model_computes_that_is_no_number_stays_in_its_row(
    tmp_path: Path, family: str, together: bool
) -> None:
    folder = make_tiny_model(tmp_path / "m", family)
    path, name, broken = folder / "model.safetensors", "model.embed_tokens.weight", 271
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    weights[name][broken] = mx.full(weights[name].shape[1:], mx.nan)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    async with HandRig(folder, prefix_cache=False) as rig:
        first = rig.row([broken, *prompt(60, 9)], 8)
        rows = [rig.row(prompt(n, n), 12) for n in (5, 18, 20, 33, 40, 50, 77)]
        if together:
            rig.submit_together([first, *rows])
        else:
            rig.submit_together([first])
            rig.run()
            rig.submit_together(rows)
        rig.run()
        assert all(right(rig, row) for row in rows)


# ---------------------------------------------------------------------------------------------
# Failure of all
# ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="needs an operation that a CPU lacks")
async def test_a_result_that_cannot_be_computed_fails_its_rows_and_no_more(llama: Path) -> None:
    async with Rig(llama) as rig:
        first = rig.submit(prompt(20), 40)
        await first.started()

        def spoil() -> None:
            # A CPU has no such product, which shows when the step is evaluated, and each time.
            half = mx.ones((2, 1, 2, 2), mx.bfloat16)
            missing = mx.gather_mm(half, half, rhs_indices=mx.array([0, 1]))
            store = rig.forward.stores[0]
            store.keys = store.keys + missing.sum().astype(mx.float32)

        await rig.thread.call(spoil)
        with pytest.raises(GenerationFailed):
            await first.events()
        assert stored(rig) == 0
        second = rig.submit(prompt(20), 10)
        await second.finished()
        assert await rig.thread.call(partial(right, rig, second))
        assert rig.ledger.figures()["pages:tiny"] == stored(rig)


@AHEAD
async def test_a_failed_step_fails_everybody_who_was_there(llama: Path, looks_ahead: bool) -> None:
    async with HandRig(llama, looks_ahead=looks_ahead, max_rows=2, prefill_chunk=32) as rig:
        running = rig.submit(prompt(5), 30)
        rig.step(3)
        prefilling = rig.submit(prompt(300, 2), 5)
        waiting = rig.submit(prompt(7, 3), 5)
        rig.step(2)
        next_token = prefilling.sequence.computed
        prefilling.sequence.tokens[next_token] = "no token"  # type: ignore[call-overload]
        rig.run()
        for row in (running, prefilling, waiting):
            with pytest.raises(GenerationFailed):
                await row.events()
        assert nothing_left(rig)
        again = rig.submit(prompt(7, 3), 5)
        rig.run()
        assert (await again.finished()).usage.completion_tokens == 5
        assert right(rig, again)


async def test_closing_ends_every_stream_and_later_ones_are_refused(llama: Path) -> None:
    async with HandRig(llama, max_rows=2, prefill_chunk=32) as rig:
        rows = [rig.submit(prompt(n, n), 50) for n in (5, 300, 9)]
        rig.step(3)
        rig.engine.close()
        late = rig.submit(prompt(5), 5)
        outcomes = await asyncio.gather(*(r.events() for r in rows), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {GenerationFailed}
        with pytest.raises(ServerNotReady):
            await late.events()
        assert set(rig.ledger.figures()) == {"buffer_cache", "limit", "available"}


# ---------------------------------------------------------------------------------------------
# Ends that come while the next step is under way
# ---------------------------------------------------------------------------------------------


@AHEAD
async def test_a_stop_string_ends_a_row_whose_next_step_is_under_way(
    llama: Path, looks_ahead: bool
) -> None:
    async with HandRig(llama, looks_ahead=looks_ahead) as rig:
        plain = rig.submit(prompt(30), 20)
        rig.run()
        events = await plain.events()
        text = "".join(e.text for e in events if isinstance(e, TextDelta))
        stop = text[6:9]
        rows = [
            rig.row(prompt(30), 20, stop=(stop,)),
            rig.row(prompt(31, 2), 20),
            rig.row(prompt(30), 20),
        ]
        rig.submit_together(rows)
        rig.run()
        events = await rows[0].events()
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == text.split(stop)[0]
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.stop_sequence) == ("stop", stop)
        for row in rows[1:]:
            assert (await row.finished()).usage.completion_tokens == 20
            assert right(rig, row)
        assert nothing_left(rig)
        # What it had computed until then is found, and right.
        again = rig.submit(plain.sequence.tokens[:40] + prompt(5, 4), 5)
        rig.run()
        await again.finished()
        assert right(rig, again)


@AHEAD
async def test_a_row_may_be_cancelled_at_any_step_of_its_life(
    llama: Path, looks_ahead: bool
) -> None:
    async with HandRig(llama, looks_ahead=looks_ahead, prefill_chunk=16) as rig:
        for step in range(12):
            others = [rig.submit(prompt(40, 2), 6), rig.submit(prompt(9, 3), 9)]
            victim = rig.submit(prompt(60, step + 10), 5)
            rig.step(step)
            rig.cancel(victim)
            rig.cancel(victim)
            rig.run()
            assert nothing_left(rig)
            for row in others:
                await row.finished()
                assert right(rig, row)


@AHEAD
async def test_who_waits_for_a_cancelled_prompt_goes_on_from_where_it_was(
    llama: Path, looks_ahead: bool
) -> None:
    for step in range(7):
        async with HandRig(llama, looks_ahead=looks_ahead, prefill_chunk=16) as rig:
            rows = [rig.submit(prompt(90), 5) for _ in range(3)]
            rig.step(step)
            rig.cancel(rows[0])
            rig.run()
            cached = [(await row.finished()).usage.cached_tokens for row in rows[1:]]
            assert cached[1] == 80
            # What the first had computed, which the second need not.
            assert cached[0] == min(16 * step, 80)
            assert all(right(rig, row) for row in rows[1:])
            assert nothing_left(rig)


@AHEAD
async def test_equal_prompts_are_processed_once(llama: Path, looks_ahead: bool) -> None:
    async with HandRig(llama, looks_ahead=looks_ahead, prefill_chunk=32) as rig:
        rows = [rig.submit(prompt(100), 8) for _ in range(4)]
        rig.run()
        assert [(await row.finished()).usage.cached_tokens for row in rows] == [0, 96, 96, 96]
        assert all(right(rig, row) for row in rows)


# ---------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
@AHEAD
async def test_rows_that_are_paused_come_back_and_answer_right(
    llama: Path, prefix_cache: bool, looks_ahead: bool
) -> None:
    async with HandRig(
        llama, memory=14 * PAGE, prefix_cache=prefix_cache, looks_ahead=looks_ahead
    ) as rig:
        assert rig.engine.stats().page_bytes == PAGE
        rows = [rig.submit(prompt(60 - n, n + 1), 40) for n in range(5)]
        paused = 0
        while rig.engine.has_work():
            before = rig.engine.stats().running
            rig.step()
            paused += rig.engine.stats().waiting > 0 and rig.engine.stats().running < before
        assert paused
        assert rig.engine.stats().pauses
        for row in rows:
            assert (await row.finished()).usage.completion_tokens == 40
            assert right(rig, row)
        assert nothing_left(rig)
        assert rig.ledger.figures()["pages:tiny"] == stored(rig)


@AHEAD
async def test_seeded_rows_draw_after_a_pause_what_they_draw_without(
    llama: Path, looks_ahead: bool
) -> None:
    drawn, pauses = [], []
    for pages in (12, 1000):
        async with HandRig(llama, memory=pages * PAGE, looks_ahead=looks_ahead) as rig:
            rows = [
                rig.row(prompt(20, n + 1), 60, Sampling(temperature=1.0, top_p=0.9, seed=n))
                for n in range(4)
            ]
            rig.submit_together(rows)
            rig.run()
            drawn.append([row.tokens for row in rows])
            pauses.append(rig.engine.stats().pauses)
    assert drawn[0] == drawn[1]
    assert pauses[0] > pauses[1] == 0


async def test_a_prompt_that_waits_for_room_does_not_shake_the_pages_of_others(
    llama: Path,
) -> None:
    async with HandRig(llama, memory=20 * PAGE, prefix_cache=False) as rig:
        rig.submit(prompt(100), 150)
        rig.step(3)
        big = rig.submit(prompt(250, 2), 4)
        sizes = []
        while rig.engine.stats().waiting:
            rig.step()
            s = rig.engine.stats()
            sizes.append(s.pages_free + s.pages_held + s.pages_cached)
        # Stores that shrink and grow again are copied each time.
        assert sizes == sorted(sizes)
        rig.run()
        assert right(rig, big)


async def test_a_row_whose_memory_others_have_taken_is_told_so(llama: Path) -> None:
    async with HandRig(llama, memory=40 * PAGE) as rig:
        row = rig.submit(prompt(60), 400)
        rig.step(4)
        waiting = rig.submit(prompt(30, 2), 5)
        assert rig.ledger.reserve("weights:other", 34 * PAGE)
        rig.run()
        with pytest.raises(OutOfMemory) as failure:
            await row.events()
        assert failure.value.retry_after
        outcome = (await asyncio.gather(waiting.finished(), return_exceptions=True))[0]
        assert isinstance(outcome, Finished | OutOfMemory)
        assert nothing_left(rig)
        rig.ledger.record("weights:other", 0)
        again = rig.submit(prompt(60), 10)
        rig.run()
        assert right(rig, again)


async def test_cached_pages_are_given_to_whoever_reserves_memory(llama: Path) -> None:
    async with HandRig(llama, memory=100 * PAGE) as rig:
        row = rig.submit(prompt(200), 4)
        rig.run()
        await row.finished()
        assert rig.engine.stats().pages_cached == 12
        assert rig.ledger.reserve("weights:other", 95 * PAGE)
        assert rig.engine.stats().pages_cached == 0
        assert stored(rig) == rig.ledger.figures().get("pages:tiny", 0) <= 5 * PAGE


async def test_a_model_without_pages_has_none_to_give(tmp_path: Path) -> None:
    async with HandRig(make_tiny_model(tmp_path / "m", "mamba2"), speculation="off") as rig:
        assert rig.engine.stats().page_bytes == 0
        for _ in range(3):
            row = rig.submit(prompt(50), 4)
            rig.run()
            assert right(rig, row)
            assert not rig.ledger.reserve("weights:other", 1 << 40)
            assert "pages:tiny" not in rig.ledger.figures()
        overdrawn = rig.ledger.limit + 1
        rig.ledger.record("weights:other", overdrawn)
        refused = rig.submit(prompt(50, 2), 4)
        rig.run()
        with pytest.raises(
            OutOfMemory, match=f"beside {sized(rig.forward.row_bytes)} that every row"
        ):
            await refused.finished()
    assert set(rig.ledger.figures()) == {"weights:other", "buffer_cache", "limit", "available"}


@pytest.mark.parametrize("family", ["mamba2", "llama4", "qwen3_next"])
async def test_what_rows_keep_besides_pages_is_granted_first(tmp_path: Path, family: str) -> None:
    async with HandRig(make_tiny_model(tmp_path / "m", family)) as rig:
        forward, figures = rig.forward, rig.ledger.figures
        rig.ledger.limit = 4 * forward.row_bytes + 60 * rig.engine.stats().page_bytes
        rows = [rig.submit(prompt(60, n + 1), 20) for n in range(10)]
        together = 0
        while rig.engine.has_work():
            rig.step()
            pages = sum(store.keys.nbytes + store.values.nbytes for store in forward.stores)
            kept = sum(array.nbytes for array in forward.state()) - pages
            promised = figures().get("states:tiny", 0)
            if forward.token_bytes:
                promised += figures().get("pages:tiny", 0)
            assert kept <= promised <= rig.ledger.limit
            stats = rig.engine.stats()
            together = max(together, stats.running + stats.prefilling)
        assert 1 < together <= 4
        for row in rows:
            assert right(rig, row)
            assert (await row.finished()).reason == "length"
        assert nothing_left(rig)
        assert "states:tiny" not in figures()


async def test_prompts_that_are_kept_leave_room_for_many_rows(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "hybrid", "qwen3_next")
    async with HandRig(folder, memory=4_000_000) as rig:
        for n in range(36):
            rig.submit(prompt(200, n + 1), 2)
            rig.run()
        assert rig.ledger.figures()["pages:tiny"] > 1_000_000
        rows = [rig.submit(prompt(20, n + 100), 40) for n in range(12)]
        rig.step(20)
        assert rig.engine.stats().running == 12
        rig.run()
        assert all(right(rig, row) for row in rows)


@pytest.mark.parametrize("family", ["llama4", "qwen3_next"])
async def test_a_row_that_fails_gives_back_what_it_kept(tmp_path: Path, family: str) -> None:
    async with HandRig(make_tiny_model(tmp_path / "m", family), speculation="off") as rig:
        rows = [rig.submit(prompt(30, n + 1), 20) for n in range(3)]
        rig.step(5)
        assert rig.ledger.figures()["states:tiny"] == 3 * rig.forward.row_bytes
        rig.cancel(rows[0])
        assert rig.ledger.figures()["states:tiny"] == 2 * rig.forward.row_bytes
        rig.engine.fail(ZeroDivisionError())
        assert "states:tiny" not in rig.ledger.figures()
        again = rig.submit(prompt(30), 4)
        rig.run()
        assert right(rig, again)


# ---------------------------------------------------------------------------------------------
# Recurrent layers
# ---------------------------------------------------------------------------------------------


async def test_states_of_more_conversations_than_are_kept_do_no_harm(hybrid: Path) -> None:
    async with HandRig(hybrid) as rig:
        assert rig.forward.prefixes == "snapshot"
        for turn in range(2):
            for n in range(20):
                row = rig.submit(prompt(40 + 20 * turn, n + 1), 3)
                rig.run()
                await row.finished()
                assert right(rig, row)
        figures = rig.ledger.figures()
        assert figures["snapshots:tiny"] > 0
        rig.engine.drop_prefixes()
        assert "snapshots:tiny" not in rig.ledger.figures()


@pytest.mark.parametrize("family", ["lfm2", "mamba2", "jamba"])
async def test_states_that_are_kept_take_the_memory_that_is_said(
    tmp_path: Path, family: str
) -> None:
    async with HandRig(make_tiny_model(tmp_path / "m", family), prefill_chunk=512) as rig:
        for n in range(8):
            rig.submit(prompt(520, n + 1), 2)
            rig.run()
        said, before = rig.ledger.figures()["snapshots:tiny"], mx.get_active_memory()
        shared = 0
        while isinstance(kept := rig.engine._memory.pool.detach_oldest(), Snapshot):
            # `mx.contiguous` copies nothing where that leaves as many bytes unused at most.
            shared += 2**14 * sum(array is not None for leaf in kept.leaves for array in leaf)
            del kept
        assert 0 < said <= before - mx.get_active_memory() < 2 * said + shared


async def test_a_state_that_was_given_up_is_kept_again_when_its_prompt_returns(
    hybrid: Path,
) -> None:
    async with HandRig(hybrid) as rig:
        for n in range(30):
            row = rig.submit(prompt(40, n + 1), 2)
            rig.run()
        cached = []
        for _ in range(3):
            row = rig.submit(prompt(40, 1), 2)
            rig.run()
            cached.append((await row.finished()).usage.cached_tokens)
            assert right(rig, row)
        assert cached == [0, 32, 32]


async def test_prompts_go_on_being_kept_when_pages_have_taken_all_the_memory(
    tmp_path: Path,
) -> None:
    # A state takes as much as 14 pages here, and the first prompts' pages are given up one by one.
    folder = make_tiny_model(tmp_path / "hybrid", "qwen3_next")
    async with HandRig(folder, memory=680_000) as rig:
        cached = []
        for n in range(12):
            for _ in range(2):
                row = rig.submit(prompt(200, n + 1), 2)
                rig.run()
                cached.append((await row.finished()).usage.cached_tokens)
                assert right(rig, row)
        assert cached == [0, 192] * 12
        # What is left is for a row's own state.
        assert rig.ledger.available() < 2 * rig.forward.row_bytes


async def test_prompts_are_kept_again_after_a_crowd_that_took_all_the_memory(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "hybrid", "qwen3_next")
    async with HandRig(folder, memory=400_000, speculation="off") as rig:
        crowd = [rig.submit(prompt(120, n + 20), 30) for n in range(12)]
        rig.run()
        assert all([(await row.finished()).reason == "length" for row in crowd])
        assert "snapshots:tiny" not in rig.ledger.figures()
        cached = []
        for n in (1, 1, 2, 2, 1):
            row = rig.submit(prompt(200, n), 2)
            rig.run()
            cached.append((await row.finished()).usage.cached_tokens)
            assert right(rig, row)
        assert cached == [0, 192, 0, 192, 192]


async def test_states_that_never_find_room_do_no_harm_where_pages_have_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with HandRig(
        make_tiny_model(tmp_path / "recurrent", "mamba2"), memory=41_000, speculation="off"
    ) as rig:
        assert rig.engine.stats().page_bytes == 0
        failures: list[Exception] = []
        monkeypatch.setattr(rig.engine, "fail", failures.append)
        for _ in range(2):
            row = rig.submit(prompt(70), 3)
            rig.run()
            assert (await row.finished()).usage.cached_tokens == 0
            assert right(rig, row)
        assert failures == []


async def test_the_state_of_a_conversation_in_use_outlives_those_of_others(hybrid: Path) -> None:
    async with HandRig(hybrid) as rig:
        cached = []
        for n in range(40):
            row = rig.submit(prompt(40, 1), 2)
            rig.run()
            cached.append((await row.finished()).usage.cached_tokens)
            other = rig.submit(prompt(40, n + 2), 2)
            rig.run()
            await other.finished()
        assert cached == [0] + [32] * 39


# ---------------------------------------------------------------------------------------------
# Rows that take turns
# ---------------------------------------------------------------------------------------------


@AHEAD
async def test_rows_that_take_turns_draw_what_each_draws_in_any_company(
    llama: Path, looks_ahead: bool
) -> None:
    kinds = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, top_p=0.9, seed=7),
        Sampling(temperature=0.0, frequency_penalty=2.0),
        Sampling(temperature=0.7, repetition_penalty=1.2, seed=8),
    ]

    def crowd(rig: HandRig, owners: str) -> list[Row]:
        rows = []
        for n in range(9):
            row = rig.row(prompt(5 + 9 * n, n + 1), 12 + n, kinds[n % 4], owner=owners[n % 2])
            if n == 4:
                row.sequence.guide = Guide("content", None, None, 9)
            rows.append(row)
        return rows

    async with HandRig(llama, looks_ahead=looks_ahead, max_rows=7) as rig:
        together = crowd(rig, "aa")
        rig.submit_together(together)
        rig.run()
        steps = rig.engine.steps
    async with HandRig(llama, looks_ahead=looks_ahead, max_rows=7, choose=taking_turns(2)) as rig:
        rows = crowd(rig, "ab")
        for row in rows:
            rig.submit_together([row])
            rig.step()
        rig.run()
        # One row at least was left out of a step, again and again.
        assert rig.engine.steps > 1.5 * steps
        for row, other in zip(rows, together, strict=True):
            assert (await row.finished()).usage.completion_tokens == row.sequence.limit
            assert row.tokens == other.tokens
        assert nothing_left(rig)


# ---------------------------------------------------------------------------------------------
# Long runs
# ---------------------------------------------------------------------------------------------


async def check_all(rig: Rig, rows: list[Row], cancelled: set[int]) -> None:
    for row in rows:
        if row.sequence.key in cancelled:
            assert right(rig, row)
            continue
        events = await row.events()
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert finished.usage.completion_tokens == row.sequence.limit
        assert right(rig, row)


@pytest.mark.parametrize(
    ("seed", "abreast", "looks_ahead"),
    one_in_turn([(1, 0), (3, 2), (4, 1)] + [(2, 0)] * ALL, [True, False]),
)
async def test_three_hundred_steps_of_anything(
    llama: Path, seed: int, abreast: int, looks_ahead: bool
) -> None:
    chance = random.Random(seed)
    async with HandRig(
        llama,
        choose=taking_turns(abreast),
        memory=chance.choice([24, 40, 10_000]) * PAGE,
        looks_ahead=looks_ahead,
        max_rows=chance.choice([3, 8]),
        prefill_chunk=chance.choice([16, 48, 512]),
        prefix_cache=chance.random() < 0.8,
    ) as rig:
        rows: list[Row] = []
        cancelled: set[int] = set()
        for _ in range(300):
            if chance.random() < 0.25:
                given = prompt(chance.choice([1, 5, 16, 17, 40, 90]), chance.randint(1, 4))
                if rows and chance.random() < 0.4:
                    given = (chance.choice(rows).sequence.tokens + given)[:200]
                limit, owner = chance.choice([1, 2, 15, 40]), chance.choice("aab")
                rows.append(rig.submit(given, limit, owner=owner))
            if rows and chance.random() < 0.05:
                victim = chance.choice(rows)
                if not victim.sequence.ended:
                    rig.cancel(victim)
                    cancelled.add(victim.sequence.key)
            if chance.random() < 0.01:
                rig.engine.drop_prefixes()
            rig.step()
            assert rig.ledger.figures().get("pages:tiny", 0) == stored(rig)
            assert rig.ledger.available() >= 0
        rig.run()
        await check_all(rig, rows, cancelled)
        assert nothing_left(rig)
        assert rig.ledger.figures().get("pages:tiny", 0) == stored(rig)
    assert set(rig.ledger.figures()) == {"buffer_cache", "limit", "available"}


@pytest.mark.parametrize(
    ("family", "looks_ahead"),
    one_in_turn(["gemma3_text", "deepseek_v3", "lfm2", "llama4"], [True, False]),
)
async def test_a_hundred_steps_of_anything_for_other_kinds_of_layers(
    tmp_path: Path, family: str, looks_ahead: bool
) -> None:
    chance = random.Random(7)
    folder = make_tiny_model(tmp_path / "m", family)
    async with HandRig(folder, looks_ahead=looks_ahead, prefill_chunk=48) as rig:
        rows: list[Row] = []
        cancelled: set[int] = set()
        for _ in range(100):
            if chance.random() < 0.2:
                given = prompt(chance.choice([1, 16, 17, 40, 90]), chance.randint(1, 3))
                limit, owner = chance.choice([1, 5, 20]), chance.choice("aab")
                rows.append(rig.submit(given, limit, owner=owner))
            if rows and chance.random() < 0.05:
                victim = chance.choice(rows)
                if not victim.sequence.ended:
                    rig.cancel(victim)
                    cancelled.add(victim.sequence.key)
            rig.step()
        rig.run()
        await check_all(rig, rows, cancelled)
        assert nothing_left(rig)


async def test_rows_submitted_and_cancelled_from_outside_while_it_runs(llama: Path) -> None:
    chance = random.Random(4)
    async with Rig(llama, memory=60 * PAGE, max_rows=6, prefill_chunk=32) as rig:
        rows: list[Row] = []
        cancelled: set[int] = set()
        for _ in range(40):
            rows.append(rig.submit(prompt(chance.choice([3, 30, 70]), chance.randint(1, 9)), 12))
            if chance.random() < 0.3:
                victim = chance.choice(rows)
                rig.cancel(victim)
                cancelled.add(victim.sequence.key)
            await asyncio.sleep(0)
        for row in rows:
            if row.sequence.key not in cancelled:
                try:
                    assert (await row.finished()).usage.completion_tokens == 12
                except MLXManagerError as error:  # pragma: no cover
                    pytest.fail(str(error))
        await rig.thread.call(lambda: None)
        for row in rows:
            if row.sequence.key not in cancelled:
                assert await rig.thread.call(partial(right, rig, row))
        assert nothing_left(rig)

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from engine.rig import GREEDY, HandRig, Rig, alone, prompt
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.core import Finished, Sampling, TextDelta
from mlx_manager.mlx_server.engine.kv.store import LayerStore
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.errors import GenerationFailed, OutOfMemory, Overloaded
from mlx_manager.mlx_server.formats import PLAIN
from mlx_manager.mlx_server.utils import memory
from mlx_manager.mlx_server.utils.memory import Relief


async def reference(rig: Rig, tokens: list[int], limit: int = 16) -> list[int]:
    return await rig.thread.call(lambda: alone(rig.model, tokens, limit))


async def nothing_left(rig: Rig) -> None:
    stats = rig.engine.stats()
    assert (stats.running, stats.prefilling, stats.waiting, stats.pages_held) == (0, 0, 0, 0)


async def test_one_row_draws_what_the_model_itself_draws(llama: Path) -> None:
    async with Rig(llama) as rig:
        row = rig.submit(prompt(21))
        finished = await row.finished()
        assert row.tokens == await reference(rig, prompt(21))
        assert finished.reason == "length"
        assert finished.usage.prompt_tokens == 21
        assert finished.usage.completion_tokens == 16
        await nothing_left(rig)


async def test_a_mixed_crowd_draws_what_each_draws_alone(llama: Path) -> None:
    lengths = [3, 40, 17, 300, 16, 33, 64, 5]
    async with Rig(llama, prefill_chunk=48) as rig:
        rows = []
        for i, length in enumerate(lengths):
            rows.append(rig.submit(prompt(length, i + 1), 8 + 3 * i))
            await asyncio.sleep(0)
        await asyncio.gather(*(row.finished() for row in rows))
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            assert row.tokens == await reference(rig, prompt(length, i + 1), 8 + 3 * i)
        await nothing_left(rig)


async def test_a_stop_string_in_what_was_held_back_to_the_limit_ends_the_row(llama: Path) -> None:
    async with Rig(llama) as rig:
        shown = await rig.submit(prompt(9)).events()
        text = "".join(event.text for event in shown if isinstance(event, TextDelta))
        stop = text[-3:]
        # Until the limit this might have been the beginning of a marker.
        output = replace(PLAIN, edges={"content": ((stop + "!", "reasoning"),)})
        events = await rig.submit(prompt(9), stop=(stop,), output=output).events()
        said = "".join(event.text for event in events if isinstance(event, TextDelta))
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert said == text[: text.index(stop)]
        assert (finished.reason, finished.stop_sequence) == ("stop", stop)


async def test_a_shared_prefix_is_computed_once_and_changes_nothing(llama: Path) -> None:
    shared = prompt(100)
    async with Rig(llama) as rig:
        first = rig.submit(shared + prompt(7, 2))
        assert (await first.finished()).usage.cached_tokens == 0
        second = rig.submit(shared + prompt(9, 3))
        assert (await second.finished()).usage.cached_tokens == 96
        assert second.tokens == await reference(rig, shared + prompt(9, 3))


async def test_the_next_turn_finds_the_answer_in_pages_too(llama: Path) -> None:
    async with Rig(llama) as rig:
        first = rig.submit(prompt(30), 40)
        await first.finished()
        conversation = prompt(30) + first.tokens
        second = rig.submit(conversation + prompt(5, 2))
        # All that was computed: the last token drawn was never fed back.
        assert (await second.finished()).usage.cached_tokens == (len(conversation) - 1) // 16 * 16
        assert second.tokens == await reference(rig, conversation + prompt(5, 2))


async def test_equal_prompts_that_arrive_together_are_processed_once(llama: Path) -> None:
    async with Rig(llama, prefill_chunk=32) as rig:
        rows = [rig.row(prompt(100)) for _ in range(4)]
        rig.submit_together(rows)
        cached = sorted([(await row.finished()).usage.cached_tokens for row in rows])
        assert cached == [0, 96, 96, 96]
        assert len({tuple(row.tokens) for row in rows}) == 1


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "running"])
async def test_a_cancelled_row_leaves_nothing_behind(llama: Path, moment: str) -> None:
    async with Rig(llama, prefill_chunk=16, max_rows=2) as rig:
        others = [rig.submit(prompt(20, 5), 60), rig.submit(prompt(900, 6), 4)]
        victim = rig.row(prompt(1000 if moment == "prefilling" else 12, 7), 500)
        if moment == "waiting":
            rig.submit_together([victim])
        elif moment == "prefilling":
            rig.cancel(others.pop())
            rig.submit_together([victim])
        else:
            rig.cancel(others.pop())
            rig.submit_together([victim])
            await victim.started()
        rig.cancel(victim)
        await asyncio.gather(*(row.finished() for row in others))
        await rig.thread.call(lambda: None)
        await nothing_left(rig)
        assert victim.sequence.ended


async def test_short_of_pages_the_newest_row_pauses_and_still_answers_right(llama: Path) -> None:
    # Room for about 14 pages: three rows of 4 pages that each grow to 6.
    page = 16 * 2 * 2 * 16 * 2 * 4
    async with Rig(llama, memory=14 * page, prefix_cache=False) as rig:
        assert rig.engine.stats().page_bytes == page
        rows = [rig.submit(prompt(60, i + 1), 36) for i in range(3)]
        await asyncio.gather(*(row.finished() for row in rows))
        for i, row in enumerate(rows):
            assert row.tokens == await reference(rig, prompt(60, i + 1), 36)
        await nothing_left(rig)


async def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(llama: Path) -> None:
    page = 16 * 2 * 2 * 16 * 2 * 4
    async with Rig(llama, memory=4 * page) as rig:
        with pytest.raises(OutOfMemory, match="500 tokens"):
            await rig.submit(prompt(500)).finished()
        assert (await rig.submit(prompt(40), 4).finished()).reason == "length"


async def test_room_that_was_hoped_for_and_is_not_given_up_refuses_the_prompt_in_its_turn(
    llama: Path,
) -> None:
    page = 16 * 2 * 2 * 16 * 2 * 4
    async with HandRig(llama, memory=8 * page) as rig:
        # As a model that is idle now, and in use by then.
        rig.ledger.add_relief(Relief.IDLE_MODELS, lambda lacking: None, lambda: 100 * page)
        first = rig.submit(prompt(40), 4)
        rig.step()
        second = rig.submit(prompt(500), 4)
        rig.run(most=100)
        assert (await first.finished()).reason == "length"
        with pytest.raises(OutOfMemory, match="500 tokens"):
            await second.finished()


async def test_pages_grow_in_few_goes_also_where_memory_runs_short(llama: Path) -> None:
    page = 16 * 2 * 2 * 16 * 2 * 4
    async with HandRig(llama, memory=100 * page) as rig:
        sizes = set()
        for i in range(6):
            rig.submit(prompt(200, i + 1), 60)
        while rig.engine.has_work():
            rig.step()
            stats = rig.engine.stats()
            sizes.add(stats.pages_held + stats.pages_cached + stats.pages_free)
        assert sizes == {64, 100}


async def test_an_answer_is_cut_where_memory_ends(llama: Path) -> None:
    page = 16 * 2 * 2 * 16 * 2 * 4
    async with Rig(llama, memory=4 * page) as rig:
        finished = await rig.submit(prompt(40), 500).finished()
        assert finished.reason == "length"
        assert finished.usage.completion_tokens == 4 * 16 - 40


async def test_a_full_queue_refuses_and_says_when_to_come_back(llama: Path) -> None:
    async with Rig(llama, max_rows=1, max_waiting=2) as rig:
        rows = [rig.row(prompt(5, i), 4) for i in range(1, 6)]
        rig.submit_together(rows)
        outcomes = await asyncio.gather(*(r.finished() for r in rows), return_exceptions=True)
        refused = [o for o in outcomes if isinstance(o, Overloaded)]
        assert len(refused) == 2
        assert refused[0].retry_after
        assert sum(isinstance(o, Finished) for o in outcomes) == 3


async def test_the_same_seed_draws_the_same_tokens_in_any_company(llama: Path) -> None:
    seeded = Sampling(temperature=1.0, top_p=0.9, seed=42)
    async with Rig(llama) as rig:
        lone = rig.submit(prompt(11), 24, seeded)
        await lone.finished()
        company = [
            rig.row(prompt(20 + i, i + 2), 30, Sampling(temperature=0.5 + i / 4, top_k=3 * i))
            for i in range(4)
        ]
        again = rig.row(prompt(11), 24, seeded)
        rig.submit_together([*company, again])
        await asyncio.gather(*(row.finished() for row in [*company, again]))
        assert again.tokens == lone.tokens


async def test_a_row_whose_parser_fails_fails_alone(llama: Path) -> None:
    async with Rig(llama) as rig:
        neighbour = rig.row(prompt(12), 20)
        broken = rig.row(prompt(13), 20)
        broken.parser.finish = None  # type: ignore[assignment, method-assign]
        broken.parser.push = None  # type: ignore[assignment, method-assign]
        rig.submit_together([neighbour, broken])
        with pytest.raises(GenerationFailed):
            await broken.finished()
        await neighbour.finished()
        assert neighbour.tokens == await reference(rig, prompt(12), 20)
        await nothing_left(rig)


async def test_a_step_that_fails_fails_its_rows_and_the_next_request_is_answered(
    llama: Path,
) -> None:
    async with Rig(llama) as rig:
        row = rig.row(prompt(12), 20)
        row.sequence.tokens[3] = "not a token"  # type: ignore[call-overload]
        rig.submit_together([row])
        with pytest.raises(GenerationFailed):
            await row.finished()
        good = rig.submit(prompt(12), 20)
        await good.finished()
        assert good.tokens == await reference(rig, prompt(12), 20)
        await nothing_left(rig)


class Crowded(LayerStore):
    """Finds the device full of what others than this server keep there."""

    says = "[malloc] Unable to allocate"

    def resize(self, pages: int) -> bool:
        if pages > self.pages:
            raise RuntimeError(self.says)
        return super().resize(pages)


class CrowdedGpu(Crowded):
    says = "cudaMallocAsync(&data, size, stream) failed: out of memory"


async def gets_no_pages(rig: HandRig, kind: type[Crowded], tokens: int) -> None:
    """A row fails for whose prompt of so many tokens there is no memory."""
    full = rig.forward.stores[-1]
    full.__class__ = kind
    row = rig.submit(prompt(tokens), 4)
    rig.step()
    with pytest.raises(GenerationFailed):
        await row.events()
    full.__class__ = LayerStore


@pytest.mark.parametrize("pages_before", [0, 64])
async def test_a_step_that_gets_no_memory_for_pages_takes_none_of_the_ledgers_for_good(
    llama: Path, pages_before: int
) -> None:
    async with HandRig(llama) as rig:
        if pages_before:
            rig.submit(prompt(20), 4)
            rig.run()
        assert rig.engine.stats().pages_free + rig.engine.stats().pages_cached == pages_before
        await gets_no_pages(rig, Crowded, 1200)
        assert rig.ledger.figures() == rig.ledger.figures() | {"available": rig.ledger.limit}
        again = rig.submit(prompt(1200), 4)
        rig.run()
        assert again.tokens == alone(rig.model, prompt(1200), 4, again.tokens)


async def test_what_a_device_turns_out_not_to_have_is_not_promised_again(
    llama: Path, mlx_limit: int, monkeypatch
) -> None:
    async with HandRig(llama) as rig:
        limit = rig.ledger.limit
        has = limit // 2
        others = memory.device_memory() - has - memory.HEADROOM
        monkeypatch.setattr(memory, "taken_by_others", lambda: others)
        await gets_no_pages(rig, CrowdedGpu, 40)
        assert rig.ledger.limit == rig.ledger.available() == has
        assert mx.get_memory_limit() == mlx_limit - (limit - has)
        again = rig.submit(prompt(40), 4)
        rig.run()
        assert again.tokens == alone(rig.model, prompt(40), 4, again.tokens)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU is given its next step first")
async def test_a_token_is_delivered_before_the_next_step_is_computed(llama: Path) -> None:
    async with HandRig(llama) as rig:
        row = rig.submit(prompt(12), 20, Sampling(temperature=1.0))
        rig.step()
        # From now on nothing can be drawn.
        row.sequence.sampler.seed = None  # type: ignore[assignment]
        rig.step()
        assert (await row.started()).prompt_tokens == 12
        with pytest.raises(GenerationFailed):
            await row.events()


async def test_memory_of_pages_is_what_the_ledger_says_and_goes_back_to_zero(llama: Path) -> None:
    async with Rig(llama) as rig:
        await rig.submit(prompt(200), 10).finished()
        pages = sum(s.bytes_of(s.pages) for s in rig.forward.stores)
        assert rig.ledger.figures()["pages:tiny"] == pages
        await rig.thread.call(rig.engine.drop_prefixes)
        assert rig.engine.stats().pages_cached == 0
    assert "pages:tiny" not in rig.ledger.figures()


async def test_prompts_that_arrive_together_are_not_paced_by_the_first_of_them(
    llama: Path,
) -> None:
    async with HandRig(llama, prefill_chunk=64) as rig:
        rig.submit_together([rig.row(prompt(16, i + 1), 40) for i in range(12)])
        rig.step(3)
        assert rig.engine.stats().running == 12
        # Who comes later finds rows that are to be kept at their pace, which is seen first.
        late = rig.submit(prompt(60, 99), 4)
        rig.step()
        assert rig.engine.stats().waiting == 1
        rig.run()
        assert (await late.finished()).reason == "length"


@pytest.mark.parametrize(
    ("limit", "tick", "longest"),
    [
        pytest.param(1 << 30, 1e-3, [64, 128, 192], id="short"),
        pytest.param(1 << 30, 1.0, [64, 64, 64], id="long"),
        pytest.param(1 << 21, 1e-3, [64, 64, 64], id="little-memory"),
    ],
)
async def test_where_steps_are_short_and_memory_is_plenty_a_burst_has_longer_ones(
    limit: int, tick: float, longest: list[int], llama: Path
) -> None:
    size = StepSize(64, ample=256, working_bytes=1000, ample_bytes=1 << 20)
    # Every step takes as long as the others.
    ticks = count()
    async with HandRig(
        llama, memory=limit, size=size, clock=lambda: next(ticks) * tick, max_rows=32
    ) as rig:

        def lengths() -> list[int]:
            """Prompt tokens of each step of a burst."""
            given = [rig.engine.stats().prompt_tokens]
            rows = [rig.row(prompt(32, len(rig._submitted) + i + 1), 2) for i in range(24)]
            rig.submit_together(rows)
            while rig.engine.has_work():
                rig.step()
                given.append(rig.engine.stats().prompt_tokens)
            return [after - before for before, after in pairwise(given)]

        # What steps take is not known yet; then each is at most twice as long as those before.
        assert [max(lengths()) for _ in range(6)][:3] == longest
        more = size.ample_bytes if longest[-1] > 64 else 0
        assert rig.ledger.figures()["working:tiny"] == 1000 + more
        rig.engine.drop_prefixes()
        assert rig.ledger.figures()["working:tiny"] == 1000


async def test_logit_bias_and_penalties_change_what_is_drawn(llama: Path) -> None:
    async with Rig(llama) as rig:
        plain = await reference(rig, prompt(9))
        biased = rig.submit(
            prompt(9), sampling=Sampling(temperature=0, logit_bias=((plain[0], -100.0),))
        )
        await biased.finished()
        assert plain[0] not in biased.tokens
        frequent = rig.submit(prompt(9), 40, Sampling(temperature=0, frequency_penalty=2.0))
        await frequent.finished()
        greedy = rig.submit(prompt(9), 40, GREEDY)
        await greedy.finished()
        assert len(set(frequent.tokens)) > len(set(greedy.tokens))


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "falcon_h1", "lfm2"])
async def test_recurrent_layers_take_up_a_prefix_where_its_state_was_kept(
    tmp_path: Path, family: str
) -> None:
    shared = prompt(70)
    async with Rig(make_tiny_model(tmp_path / family, family)) as rig:
        assert rig.forward.prefixes == "snapshot"
        first = rig.submit(shared + prompt(7, 2))
        assert (await first.finished()).usage.cached_tokens == 0
        conversation = shared + prompt(7, 2) + first.tokens
        second = rig.submit(conversation + prompt(9, 3))
        assert (await second.finished()).usage.cached_tokens == 64
        assert second.tokens == await reference(rig, conversation + prompt(9, 3))
        again = rig.submit(conversation + prompt(9, 3))
        assert (await again.finished()).usage.cached_tokens == 96
        assert again.tokens == second.tokens

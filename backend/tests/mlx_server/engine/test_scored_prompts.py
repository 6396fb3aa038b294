"""Prompts whose tokens are scored, by a tiny model with many tokens to tell the likelihood of."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from engine.rig import HandRig, prompt
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.core import TokenLogprob
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.engine.scores import Scoring

VOCABULARY = 1 << 15
SCORING = Scoring(2, prompt=True, piece=lambda token: b"")

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    return make_tiny_model(path, "llama", vocab_size=VOCABULARY, num_hidden_layers=1)


async def scored(
    model: Path, lengths: list[int], chunk: int, most: int, neighbours: int = 0
) -> tuple[list[list[TokenLogprob]], list[list[int]], int]:
    """The prompts' scores, the neighbours' tokens, and the bytes that it took at once."""
    async with HandRig(model, size=StepSize(chunk, scored=most)) as rig:
        # Room for pages is made by the first row.
        rig.submit(prompt(400, 40), 1)
        rig.run()
        beside = [rig.submit(prompt(9, 50 + i), 30) for i in range(neighbours)]
        rig.step(3)
        rows = [rig.row(prompt(length, i), 1) for i, length in enumerate(lengths, 1)]
        for row in rows:
            row.sequence.scoring = SCORING
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        rig.submit_together(rows)
        rig.run()
        peak = mx.get_peak_memory() - before
        return [row.sequence.prompt_scores for row in rows], [r.tokens for r in beside], peak


async def test_scores_take_no_more_memory_for_longer_prompts_larger_chunks_or_more_rows(
    wide: Path,
):
    given = {
        "short": await scored(wide, [100], 64, 32),
        "long": await scored(wide, [300], 64, 32),
        "chunk": await scored(wide, [300], 512, 32),
        "rows": await scored(wide, [100, 90, 80, 70], 512, 32),
    }
    peaks = {name: peak for name, (_, _, peak) in given.items()}
    # Logits of 4 bytes, their logarithms, and where the best are, beside the first draw's.
    assert max(peaks.values()) < 16 * (32 + 8) * VOCABULARY, peaks
    assert [len(each) for each in given["rows"][0]] == [99, 89, 79, 69]


async def test_scores_do_not_depend_on_how_many_are_found_at_once(wide: Path):
    few, beside, _ = await scored(wide, [150, 70], 128, 32, neighbours=2)
    many, undisturbed, _ = await scored(wide, [150, 70], 128, 1000, neighbours=2)
    assert beside == undisturbed
    for one, other in zip(few, many, strict=True):
        assert [s.token_id for s in one] == [s.token_id for s in other]
        expected = pytest.approx([s.logprob for s in other], abs=2e-2)
        assert [s.logprob for s in one] == expected


async def test_the_ledger_knows_what_a_steps_scores_take(wide: Path):
    async with HandRig(wide, prefill_chunk=1024) as rig:
        size = StepSize.of(rig._limits, rig.model, rig.forward, rig.ledger)
        assert size.scored == 512
        assert size.tokens == 1024
        assert size.working_bytes > 16 * VOCABULARY * (rig._limits.max_rows + size.scored)

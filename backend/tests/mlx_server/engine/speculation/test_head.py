"""An MTP head: what it reads of rows, of prompts and of pages that are shared, and what it guesses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from engine.rig import GREEDY, HandRig, alone, drafting, prompt
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from thorough import every_other, one_in_turn
from tiny_models import VOCAB_SIZE, add_mtp_head, make_tiny_model, replace_weights

from mlx_manager.mlx_server.core import Sampling
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation import speculation
from mlx_manager.mlx_server.engine.speculation.head import READ_AT, DraftHead

SEEDED = Sampling(temperature=1.0, seed=11)
KINDS = ("deepseek_v3", "glm4_moe_lite", "glm4_moe")


def following(token: int) -> int:
    return (5 * token + 3) % VOCAB_SIZE


def right_head(path: Path, *, by_states: bool) -> Path:
    """Write a model that draws `following` of a token, and whose head is right by construction.

    Layers add nothing, and embeddings have one number each. The head copies either the token that it
    reads or, by states, what follows the token before, which only the hidden state tells.
    """
    folder = make_tiny_model(path, "deepseek_v3", hidden_size=VOCAB_SIZE, first_k_dense_replace=2)
    add_mtp_head(folder)
    tensors = mx.load(str(folder / "model.safetensors"))
    for name, array in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = mx.zeros_like(array)
        elif name.endswith("norm.weight"):
            tensors[name] = mx.ones_like(array)
    one, none = mx.eye(VOCAB_SIZE), mx.zeros((VOCAB_SIZE, VOCAB_SIZE))
    turned = one[mx.array([following(token) for token in range(VOCAB_SIZE)])].T
    # So large that the norms' epsilons are nothing beside them.
    tensors["model.embed_tokens.weight"] = 1e4 * one
    tensors["lm_head.weight"] = 0.3 * turned
    parts = [none, turned] if by_states else [one, none]
    tensors["model.layers.2.eh_proj.weight"] = mx.concatenate(parts, axis=1)
    replace_weights(folder, tensors)
    return folder


def random_head(path: Path, kind: str = "deepseek_v3", **sizes: int) -> Path:
    folder = make_tiny_model(path, kind, **sizes)
    add_mtp_head(folder)
    return folder


def head_in(rig: HandRig) -> DraftHead:
    found = rig.engine._head
    assert found is not None
    return found


def guessed(rig: HandRig, tokens: list[int], count: int, first_place: int = 0) -> list[int]:
    """Return the head's guesses after these tokens, over the text from a place on and with caches of
    its own."""
    states = body_of(rig.model)(mx.array([tokens[:-1]]), make_prompt_cache(rig.model))[
        :, first_place:
    ]
    cache, found = make_prompt_cache(rig.head), []
    given, first = tokens[first_place + 1 :], [] if first_place else [0]
    for _ in range(count):
        rig.given.give(states.reshape(-1, states.shape[-1]), first)
        states = body_of(rig.head)(mx.array([given]), cache)[:, -1:]
        given, first = [int(mx.argmax(rig.shared.logits(states)).item())], []
        found += given
    return found


@pytest.mark.parametrize(("by_states", "sampling"), [(True, GREEDY), (False, SEEDED)])
async def test_a_head_that_is_right_has_all_accepted(
    tmp_path: Path, by_states: bool, sampling: Sampling
) -> None:
    folder = right_head(tmp_path / "m", by_states=by_states)
    size = StepSize(32, working_bytes=0)
    limits = {"speculation": "on", "longest_draft": 4}
    async with HandRig(folder, head=True, size=size, **limits) as rig:
        rows = [drafting(rig, prompt(9 + 30 * i, i + 1), 21, sampling) for i in range(3)]
        drawn = rig.ran(rows)
        stats = rig.engine.stats()
        assert stats.accepted_tokens == stats.draft_tokens >= 40
        assert stats.steps < 21
        if sampling is GREEDY:
            assert all(
                token == following(before) for tokens in drawn for before, token in pairwise(tokens)
            )


def body_of(model: nn.Module) -> nn.Module:
    return model["language_model"].model if "language_model" in model else model.model


def noting(head: DraftHead) -> list[tuple[list[int], list[int]]]:
    """Note what the head guesses from now on, behind the tokens that it follows."""
    seen: list[tuple[list[int], list[int]]] = []
    guess = head.guess

    def noted(rows: list[tuple[Sequence, int]]) -> list[list[int]]:
        tokens = [list(row.tokens) for row, _ in rows]
        found = guess(rows)
        seen.extend(zip(tokens, map(list, found), strict=True))
        return found

    head.guess = noted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("kind", [*every_other(KINDS), "qwen3_5"])
async def test_it_guesses_what_it_would_over_the_whole_text(tmp_path: Path, kind: str) -> None:
    folder = random_head(tmp_path / "m", kind)
    size, limits = StepSize(32, working_bytes=0), {"speculation": "on", "longest_draft": 3}
    async with HandRig(folder, head=True, size=size, page_size=4, **limits) as rig:
        seen = noting(head_in(rig))
        given = [prompt(length, length) for length in (5, 90, 1)]
        drawn = rig.ran([drafting(rig, tokens, 9) for tokens in given])
        assert drawn == [alone(rig.model, tokens, 9) for tokens in given]
        # The pages that this one begins with have been read for another.
        follower = drafting(rig, [*given[1], 7, 8, 9], 4)
        rig.ran([follower])
        assert follower.sequence.cached == 88
        assert len(seen) > 9
        for tokens, found in seen:
            assert found == guessed(rig, tokens, len(found))


async def test_pages_that_nobody_had_it_read_are_left_out(tmp_path: Path) -> None:
    folder = random_head(tmp_path / "m")
    async with HandRig(folder, head=True, page_size=4, speculation="on") as rig:
        seen = noting(head_in(rig))
        rig.ran([rig.row(prompt(41), 2)])
        follower = drafting(rig, [*prompt(40), *prompt(30, 5)], 12)
        rig.submit_together([follower])
        while not follower.tokens:
            rig.step()
        unread = follower.sequence.unread
        assert follower.sequence.cached == 40
        assert unread is not None
        assert unread.skipped == list(range(10))
        rig.run()
        assert follower.tokens == alone(rig.model, follower.sequence.tokens[:70], 12)
        # It is as if the text began with the rest, but that no token of that is left out.
        assert seen
        for tokens, found in seen:
            assert found == guessed(rig, tokens, len(found), first_place=40)


@pytest.mark.parametrize(("kind", "sampling"), one_in_turn([*KINDS, "qwen3_5"], [GREEDY, SEEDED]))
async def test_texts_are_those_without_a_head(
    tmp_path: Path, kind: str, sampling: Sampling
) -> None:
    folder, size = random_head(tmp_path / "m", kind), StepSize(32, working_bytes=0)
    async with HandRig(folder, head=True, size=size, page_size=8, speculation="on") as rig:
        given = [prompt(5 + 17 * i, 1 + i % 2) for i in range(4)]
        drawn = rig.ran([drafting(rig, tokens, 12, sampling) for tokens in given])
        tried = rig.engine.stats().draft_tokens
        assert tried > 0
        assert rig.ran([rig.row(tokens, 12, sampling) for tokens in given]) == drawn
        assert rig.engine.stats().draft_tokens == tried
        # Once more, from pages that others have filled.
        assert rig.ran([drafting(rig, tokens, 12, sampling) for tokens in given]) == drawn
        stats = rig.engine.stats()
        assert stats.draft_tokens > tried
        assert stats.prefix_hits > 0


async def test_what_rows_draw_without_guesses_is_read_a_little_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No guess now and then to learn what it brings.
    monkeypatch.setattr(speculation, "WAIT", 1000)
    folder = random_head(tmp_path / "m")
    async with HandRig(folder, head=True, part=1e9) as rig:
        rows = [drafting(rig, prompt(9, i + 1), 50) for i in range(2)]
        rig.submit_together(rows)
        most = 0
        while rig.engine.has_work():
            rig.step()
            for row in rows:
                unread = row.sequence.unread
                if unread is not None and unread.end:
                    most = max(most, unread.end - unread.first)
        assert rig.engine.stats().drafts == 0
        assert READ_AT <= most <= READ_AT + 3


async def test_rows_do_not_hold_the_states_of_prompts_that_share_their_steps(
    tmp_path: Path,
) -> None:
    folder, size = random_head(tmp_path / "m"), StepSize(64, working_bytes=0)
    async with HandRig(folder, head=True, part=1e9, size=size) as rig:
        row, other = drafting(rig, prompt(9), 24), rig.row(prompt(900, 2), 1)
        rig.submit_together([row])
        rig.step(2)
        rig.submit_together([other])
        rig.step(12)
        unread = row.sequence.unread
        assert unread is not None
        assert 12 <= unread.end - unread.first <= READ_AT
        assert not other.sequence.ended
        held = {id(part.states): len(part.states) for part in unread.of(0, unread.end)}
        assert sum(held.values()) <= 2 * (unread.end - unread.first)


async def test_states_that_rows_keep_are_in_the_ledger(tmp_path: Path) -> None:
    folder = random_head(tmp_path / "m")
    async with HandRig(folder, head=True, speculation="on") as rig:
        rig.submit_together([drafting(rig, prompt(9, i + 1), 9) for i in range(3)])
        rig.step(3)
        assert rig.ledger.figures()["states:tiny"] == 3 * READ_AT * 64 * 4
        rig.run()
        assert not rig.ledger.figures().get("states:tiny")


async def test_states_of_larger_steps_are_in_the_ledger_with_these(tmp_path: Path) -> None:
    async with HandRig(random_head(tmp_path / "m"), head=True) as rig:
        of = rig._limits, rig.head, head_in(rig)._forward
        sizes = [StepSize(64, ample=256, ample_bytes=1000).with_draft(*of, each) for each in (0, 8)]
        assert sizes[1].working_bytes - sizes[0].working_bytes == 8 * 64
        assert sizes[1].ample_bytes == 1000 + 8 * 192


async def test_rows_that_are_paused_go_on(tmp_path: Path) -> None:
    folder = random_head(tmp_path / "m")
    async with HandRig(folder, head=True, max_rows=4) as rig:
        answers = [alone(rig.model, prompt(30, i + 1), 34) for i in range(4)]
        # Pages for less than three rows.
        memory = 11 * rig.engine.stats().page_bytes + 4 * READ_AT * 64 * 4
    size, limits = StepSize(64, working_bytes=0), {"max_rows": 4, "speculation": "on"}
    async with HandRig(folder, head=True, memory=memory, size=size, **limits) as rig:
        assert rig.ran([drafting(rig, prompt(30, i + 1), 34) for i in range(4)]) == answers
        stats = rig.engine.stats()
        assert stats.pauses > 0
        assert stats.draft_tokens > 0
        assert stats.pages_held == 0


async def test_a_cancelled_row_leaves_nothing(tmp_path: Path) -> None:
    folder = random_head(tmp_path / "m")
    async with HandRig(folder, head=True, speculation="on") as rig:
        second = alone(rig.model, prompt(20, 2), 9)
        for steps in range(1, 4):
            gone, stays = drafting(rig, prompt(20, 1), 9), drafting(rig, prompt(20, 2), 9)
            rig.lose(gone, stays, steps, second)


async def test_it_guesses_on_after_a_step_has_failed(tmp_path: Path) -> None:
    folder = right_head(tmp_path / "m", by_states=True)
    async with HandRig(folder, head=True, speculation="on") as rig:
        lost = drafting(rig, prompt(20), 20)
        rig.submit_together([lost])
        rig.step(3)
        rig.engine.fail(RuntimeError("as a device may say"))
        assert lost.sequence.ended
        before = rig.engine.stats()
        rig.ran([drafting(rig, prompt(20), 20)])
        stats = rig.engine.stats()
        assert stats.accepted_tokens == stats.draft_tokens > before.draft_tokens

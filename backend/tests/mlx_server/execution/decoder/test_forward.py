"""The engine as it runs on a GPU (lookahead, kernels, fused steps), with portable kernels."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from devices.cuda.linear_attention.portable import PortableDelta, PortableShort
from devices.cuda.matmul.portable import PortableProducts
from devices.portable import Portable, PortableLatents, PortableWriter, plainly
from engine.rig import HandRig, Row, alone, prompt
from execution.on_kernels import on_kernels
from mlx import nn
from mlx_lm.utils import load_model
from thorough import slow
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.core import Sampling
from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.cuda.mla import expansion
from mlx_manager.mlx_server.devices.cuda.mla.expansion import Expansion
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.errors import GenerationFailed
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.decoder import decoder as decoders
from mlx_manager.mlx_server.execution.decoder import forward as forwards
from mlx_manager.mlx_server.execution.decoder.check import CHECKED_ROWS, check
from mlx_manager.mlx_server.execution.decoder.forward import ROWS, FusedForward
from mlx_manager.mlx_server.execution.forward import Chunk
from mlx_manager.mlx_server.execution.select import choose

PAGE = 16


@pytest.fixture(autouse=True)
def _little_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles a GPU's kernels takes portable ones, which have nothing to compile, half of a
    test. `test_loads_in_pieces` has it as long as it is."""
    monkeypatch.setattr(forwards, "LONG", 16 * PAGE)
    monkeypatch.setattr(devices, "CPU", replace(devices.CPU, warm_chunk=4 * PAGE))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "fused"),
        ("qwen3", "fused"),
        pytest.param("mistral", "fused", marks=slow),
        ("phi3", "fused"),
        ("gemma3_text", "fused"),
        pytest.param("gemma3", "fused", marks=slow),
        # It attends by itself, and does not run over the kernels otherwise.
        ("gemma2", "fused"),
        # Some layers keep a state of their own.
        ("qwen3_5", "fused"),
        ("lfm2", "fused"),
        # Queries are multiplied far into a text.
        ("ministral3", "fused"),
        # Layers take inputs of their own, or attend to the keys and values of earlier ones.
        ("gemma4_text", "fused"),
        ("gemma4_text, keys shared", "fused"),
        # What it attends to are latents.
        ("glm4_moe_lite", "fused"),
        # Other modules run over the kernels: windows and sinks among them.
        ("gpt_oss", "ragged"),
        ("gemma3n", "ragged"),
        ("qwen3_moe", "ragged"),
        # States beside pages that kernels read, and pages that the module reads by itself.
        ("falcon_h1", "separate"),
        ("deepseek_v3", "separate"),
        ("kimi_linear", "separate"),
    ],
)
async def test_rows_that_join_and_leave_draw_what_each_draws_alone(
    family: str, kind: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "m", family)
    async with HandRig(folder, choose=on_kernels, prefill_chunk=48) as rig:
        assert (rig.forward.kind, rig.forward.looks_ahead) == (kind, True)
        rows = []
        for i, length in enumerate([3, 40, 17, 130, 16, 33]):
            rows.append((prompt(length, i + 1), 4 + 4 * i))
            rig.submit(*rows[-1])
            rig.step(3)
        rig.run()
        for row, (tokens, limit) in zip(rig._submitted, rows, strict=True):
            assert row.tokens == alone(rig.model, tokens, limit, row.tokens)
        assert rig.engine.stats().pages_held == 0


async def test_prompts_whose_latents_are_expanded_draw_what_each_draws_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expansion, "START", 0)
    planned: list[int] = []
    plan = Expansion.plan
    monkeypatch.setattr(
        Expansion, "plan", lambda *of, **how: planned.append(len(of[1])) or plan(*of, **how)
    )
    folder = make_tiny_model(tmp_path / "m", "glm4_moe_lite")
    expanding = partial(on_kernels, latents=PortableLatents.build_expanding)
    async with HandRig(folder, choose=expanding, prefill_chunk=48) as rig:
        rows: list[tuple[list[int], int]] = []
        for i, length in enumerate([100, 20, 70]):
            # All but the first begin as it does, and find its pages.
            start = rows[0][0][:64] if rows else []
            rows.append((start + prompt(length, i + 1), 3 + 5 * i))
            rig.submit(*rows[-1])
            rig.step(3)
        rig.run()
        for row, (tokens, limit) in zip(rig._submitted, rows, strict=True):
            assert row.tokens == alone(rig.model, tokens, limit, row.tokens)
        assert any((row.sequence.cached or 0) > 0 for row in rig._submitted)
    assert len(planned) > 3


async def test_rows_that_are_paused_and_cancelled_leave_the_others_right(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama")
    chance = random.Random(7)
    async with HandRig(folder, choose=on_kernels, prefill_chunk=32, max_rows=6) as rig:
        rig.ledger.limit = (
            rig.ledger.limit - rig.ledger.available() + 30 * rig.engine.stats().page_bytes
        )
        wanted = []
        for i in range(14):
            tokens, limit = prompt(chance.randint(1, 90), i + 1), chance.randint(1, 40)
            row = rig.submit(tokens, limit, sampling=Sampling(temperature=0.0))
            wanted.append((row, tokens, limit))
            rig.step(chance.randint(0, 6))
            if i % 5 == 4:
                rig.cancel(row)
        rig.run()
        for i, (row, tokens, limit) in enumerate(wanted):
            expected = alone(rig.model, tokens, limit, row.tokens)
            assert row.tokens == (expected[: len(row.tokens)] if i % 5 == 4 else expected)
        assert rig.engine.stats().pages_held == 0


@pytest.mark.parametrize(
    ("family", "seed", "memory"),
    [("qwen3_5", 1, 1 << 30), ("qwen3_5", 2, 3_000_000), ("lfm2", 3, 1 << 30)],
)
async def test_layers_with_a_state_are_right_through_anything(
    tmp_path: Path, family: str, seed: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedForward, "worth", 16)
    chance = random.Random(seed)
    folder = make_tiny_model(tmp_path / "m", family)
    how = {"prefill_chunk": 48, "max_rows": 6, "memory": memory}
    async with HandRig(folder, choose=on_kernels, **how) as rig:
        assert (rig.forward.kind, rig.forward.prefixes) == ("fused", "snapshot")
        rows: list[Row] = []
        wanted: dict[int, tuple[list[int], int]] = {}
        for _ in range(80):
            if chance.random() < 0.2:
                tokens = prompt(chance.choice([1, 16, 17, 40, 90]), chance.randint(1, 3))
                if rows and chance.random() < 0.5:
                    tokens = (chance.choice(rows).sequence.tokens + tokens)[:200]
                limit = chance.choice([1, 5, 20])
                rows.append(rig.submit(tokens, limit))
                wanted[rows[-1].sequence.key] = (tokens, limit)
            if rows and chance.random() < 0.05:
                victim = chance.choice(rows)
                if not victim.sequence.ended:
                    rig.cancel(victim)
            rig.step()
        rig.run()
        for row in rows:
            expected = alone(rig.model, *wanted[row.sequence.key], row.tokens)
            assert row.tokens == expected[: len(row.tokens)]
        assert rig.engine.stats().pages_held == 0
        reused = [row for row in rows if (row.sequence.cached or 0) > 0]
        assert reused


@pytest.mark.parametrize("little", [False, True])
async def test_a_state_is_kept_of_a_step_that_nothing_came_before(
    tmp_path: Path, little: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if little:
        request.getfixturevalue("little_at_once")
    monkeypatch.setattr(FusedForward, "worth", 16)
    folder = make_tiny_model(tmp_path / "m", "qwen3_5")
    async with HandRig(folder, choose=on_kernels, prefill_chunk=2048) as rig:
        for length, cached in ((400, 0), (400, 384), (430, 384), (500, 416)):
            row = rig.submit(prompt(length, 3), 5)
            rig.run()
            assert row.tokens == alone(rig.model, prompt(length, 3), 5, row.tokens)
            assert row.sequence.cached == cached


async def test_conversations_of_one_system_prompt_go_on_from_its_end(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3_5")
    async with HandRig(folder, choose=on_kernels, prefill_chunk=512) as rig:
        running = rig.submit(prompt(9), 60)
        rig.step(4)
        together = [prompt(600, 3) + prompt(40, salt) for salt in (4, 5, 6)]
        rows = [rig.submit(tokens, 5) for tokens in together]
        rig.run()
        for row, tokens in zip(rows, together, strict=True):
            assert row.tokens == alone(rig.model, tokens, 5, row.tokens)
        # One of them computes it, and the others wait for that.
        assert sorted(row.sequence.cached for row in rows) == [0, 592, 592]
        assert running.tokens == alone(rig.model, prompt(9), 60, running.tokens)


def test_a_decoder_whose_states_are_put_back_wrongly_is_not_used(tmp_path: Path) -> None:
    class Wrong(PortableDelta):
        def restore(self, store: Any, slot: int, kept: Any) -> None:
            super().restore(store, slot, [kept[0], kept[1] + 1])

    model, _ = load_model(make_tiny_model(tmp_path / "m", "qwen3_5"))
    assert choose(model, PAGE, Portable, plainly, PortableDelta).kind == "fused"
    assert choose(model, PAGE, Portable, plainly, Wrong).kind == "separate"


def test_a_decoder_whose_inputs_are_put_back_wrongly_is_not_used(tmp_path: Path) -> None:
    class Wrong(PortableShort):
        def restore(self, store: Any, slot: int, kept: Any) -> None:
            super().restore(store, slot, [kept[0] + 1])

    model, _ = load_model(make_tiny_model(tmp_path / "m", "lfm2"))
    for shorts, kind in ((PortableShort, "fused"), (Wrong, "separate")):
        assert choose(model, PAGE, Portable, plainly, shorts=shorts).kind == kind


async def test_steps_come_in_few_shapes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama")
    shapes = set()

    class Watching(Portable):
        def attend_fused(self, qkv, rotation, norms, k_pool, v_pool, table, lengths, **how):
            shapes.add((table.shape, lengths.shape))
            return super().attend_fused(qkv, rotation, norms, k_pool, v_pool, table, lengths, **how)

    watching = partial(choose, kernels=Watching, compile=plainly)
    async with HandRig(folder, choose=watching) as rig:
        assert isinstance(rig.forward, FusedForward)
        shapes.clear()
        for i in range(13):
            rig.submit(prompt(20 + 5 * i, i + 1), 8 + 2 * i)
        rig.run()
    assert {rows for (rows, _), _ in shapes} <= set(ROWS)
    assert all(width & (width - 1) == 0 for (_, width), _ in shapes)
    assert len(shapes) <= 14


class Watched:
    """A forward that notes how many tokens a row's reader has got, and how many have been drawn,
    when it is run (`begun`) and when it is to wait for the device (`waited`)."""

    def __init__(self, forward: FusedForward) -> None:
        self._forward = forward
        self.row: Row | None = None
        self.begun: list[tuple[int, int]] = []
        self.waited: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def run(self, *args: Any) -> Any:
        self.begun.append(self._figures())
        return self._forward.run(*args)

    def finish(self) -> None:
        self.waited.append(self._figures())
        self._forward.finish()

    def _figures(self) -> tuple[int, int]:
        assert self.row is not None
        return len(self.row.tokens), self.row.sequence.drawn


def watching(*args: Any, watch: type[Watched] = Watched) -> Any:
    forward = on_kernels(*args)
    assert isinstance(forward, FusedForward)
    return watch(forward)


@pytest.fixture
def little_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more than a hundred tokens or so are queued in pieces."""
    monkeypatch.setattr(decoders, "BYTES_AHEAD", 4_000_000)
    monkeypatch.setattr(decoders, "BYTES_AT_A_TIME", 1_500_000)


@pytest.mark.usefixtures("little_at_once")
async def test_a_crowd_s_prompts_do_not_keep_back_what_has_been_drawn(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=16)
    prompts = [prompt(200, salt) for salt in range(2, 9)]
    async with HandRig(folder, choose=watching, prefill_chunk=2048) as rig:
        row = rig.forward.row = rig.submit(prompt(9), 20)
        rig.step(4)
        rows = [rig.submit(tokens, 6) for tokens in prompts]
        rig.run()
        assert row.tokens == alone(rig.model, prompt(9), 20, row.tokens)
        for each, tokens in zip(rows, prompts, strict=True):
            assert each.tokens == alone(rig.model, tokens, 6, each.tokens)
    assert rig.forward.waited
    assert all(got == drawn for got, drawn in rig.forward.waited)


class Failing(Watched):
    """The device fails before the rest of a pass can be queued."""

    def finish(self) -> None:
        if not self.waited:
            self.waited.append((0, 0))
            raise RuntimeError("the device has failed")
        super().finish()


@pytest.mark.usefixtures("little_at_once")
async def test_a_pass_that_fails_half_way_leaves_nothing_of_itself(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama", num_hidden_layers=16)
    async with HandRig(folder, choose=partial(watching, watch=Failing), prefill_chunk=2048) as rig:
        row = rig.forward.row = rig.submit(prompt(1100), 6)
        rig.run()
        assert rig.forward.waited
        assert not rig.forward.unfinished
        with pytest.raises(GenerationFailed):
            await row.events()
        again = rig.submit(prompt(20), 6)
        rig.run()
        assert again.tokens == alone(rig.model, prompt(20), 6, again.tokens)


async def test_a_first_token_does_not_wait_for_the_next_step(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama")
    async with HandRig(folder, choose=watching) as rig:
        row = rig.forward.row = rig.submit(prompt(20), 5)
        rig.run()
        assert row.tokens == alone(rig.model, prompt(20), 5, row.tokens)
    # The first is there before the second is begun, and from then on one step is under way.
    assert rig.forward.begun == [(0, 0), (1, 1), (1, 2), (2, 3), (3, 4)]


class WrongRows(Portable):
    def attend_fused(self, *args, **how):
        return super().attend_fused(*args, **how) * 1.5


class WrongPrompts(Portable):
    def rotate_and_write(self, *args, **how):
        return super().rotate_and_write(*args, **how) * 1.5


class NotCompiled(Portable):
    def attend_fused(self, *args, **how):
        raise RuntimeError("Failed to compile kernel")


@pytest.mark.parametrize("wrong", [WrongRows, WrongPrompts, NotCompiled])
async def test_a_kernel_that_is_wrong_is_not_used(
    wrong: type[Portable], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama")
    async with HandRig(folder, choose=partial(choose, kernels=wrong, compile=plainly)) as rig:
        assert rig.forward.kind == "ragged"
        row = rig.submit(prompt(20), 5)
        rig.run()
        assert row.tokens == alone(rig.model, prompt(20), 5, row.tokens)
    assert "the fused decoder is not used" in caplog.text


async def test_without_kernels_nothing_looks_ahead(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama")
    without = partial(choose, kernels=lambda shape: Unsupported("no GPU"))
    async with HandRig(folder, choose=without) as rig:
        assert (rig.forward.kind, rig.forward.looks_ahead) == ("fused", False)


async def test_rows_draw_what_each_draws_alone_where_experts_are_beside_an_mlp(
    tmp_path: Path,
) -> None:
    products = PortableProducts()

    def choose(model: nn.Module, page_size: int) -> FusedForward:
        decoder = decoders.FusedDecoder.build(
            model, page_size, Portable, lambda _: products, plainly
        )
        assert isinstance(decoder, decoders.FusedDecoder), decoder
        assert check(decoder, model, page_size) is None
        kernels = KernelSet(Portable, build_writer=PortableWriter)
        return FusedForward(decoder.stores(page_size, kernels), decoder, page_size)

    folder = make_tiny_model(tmp_path / "m", "gemma4_text, experts")
    async with HandRig(folder, choose=choose, prefill_chunk=48) as rig:
        rows = [(prompt(length, length), 4 + length // 4) for length in (3, 40, 17)]
        for row in rows:
            rig.submit(*row)
            rig.step(3)
        rig.run()
        for submitted, (tokens, limit) in zip(rig._submitted, rows, strict=True):
            assert submitted.tokens == alone(rig.model, tokens, limit)
    assert products.experts.rows > set(CHECKED_ROWS)


async def test_a_short_prompt_whose_logits_are_all_wanted_is_no_draft(llama: Path) -> None:
    """A decode step takes a row without tokens before its own for padding."""
    async with HandRig(llama, choose=on_kernels) as rig:
        for store in rig.forward.stores:
            store.resize(1)
        chunk = Chunk(0, Span(PageTable([0]), 5, 5), prompt(5), final=True, every=True)
        logits = rig.forward.run(None, [chunk])[:5]
        expected = rig.model(mx.array([prompt(5)]))[0]
        assert mx.allclose(logits, expected, atol=1e-4 * float(mx.abs(expected).max()))

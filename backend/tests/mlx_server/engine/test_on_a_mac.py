"""The engine with a Mac's limits, which a CPU is taken for. Launches in no order are in
devices/metal/test_order.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from devices.portable import Portable, PortableWriter, plainly
from engine.rig import HandRig, Row, alone, drafting, prompt
from engine.speculation.test_head import guessed, head_in, noting, random_head
from mlx import nn

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.engine.step.host_tokens import HostTokens
from mlx_manager.mlx_server.errors import GenerationFailed, OutOfMemory
from mlx_manager.mlx_server.execution.alone import AloneForward
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess
from mlx_manager.mlx_server.execution.decoder import forward as forwards
from mlx_manager.mlx_server.execution.decoder.forward import FusedForward
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward
from mlx_manager.mlx_server.execution.module.separate import SeparateForward
from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.utils.pressure import Pressure

TIMEOUT = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
)
on_kernels = partial(choose, kernels=Portable, compile=plainly, writers=PortableWriter)


@pytest.fixture(autouse=True)
def _mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current", lambda: devices.METAL)
    monkeypatch.setattr(forwards, "LONG", 256)


def pages(rig: HandRig) -> int:
    stats = rig.engine.stats()
    return stats.pages_held + stats.pages_cached + stats.pages_free


class Ran:
    """The prompt tokens of each step. One of more than `bears` fails as on a GPU: when it is waited
    for."""

    def __init__(self, rig: HandRig, patch: pytest.MonkeyPatch, bears: int = 1 << 20) -> None:
        self.steps: list[int] = []
        self._run, of, read = rig.forward.run, HostTokens.of, HostTokens.read
        failed: list[HostTokens] = []

        def noting(tokens: mx.array) -> HostTokens:
            transfer = of(tokens)
            if self.steps[-1] > bears:
                failed.append(transfer)
            return transfer

        def failing(transfer: HostTokens) -> list[int]:
            if any(transfer is other for other in failed):
                raise RuntimeError(TIMEOUT)
            return read(transfer)

        patch.setattr(rig.forward, "run", self.run)
        patch.setattr(HostTokens, "of", noting)
        patch.setattr(HostTokens, "read", failing)

    def run(self, decode: Decode | None, chunks: list[Chunk]) -> mx.array:
        self.steps.append(sum(len(chunk.tokens) for chunk in chunks))
        return self._run(decode, chunks)


async def fails(row: Row) -> bool:
    try:
        await row.events()
    except GenerationFailed:
        return True
    return False


def ragged(model: nn.Module, size: int) -> Forward:
    return RaggedForward(model, size, KeyAccess.PAGES, kernels(), plainly)


def separate(model: nn.Module, size: int) -> Forward:
    return SeparateForward(model, size, KeyAccess.GATHERED, kernels(), plainly)


def by_itself(model: nn.Module, size: int) -> Forward:
    return AloneForward(model)


def kernels() -> KernelSet:
    return KernelSet(Portable, build_writer=PortableWriter)


@pytest.mark.parametrize("way", [on_kernels, choose, ragged, separate, by_itself])
async def test_a_prompt_begins_with_few_tokens_until_it_is_known_what_they_cost(
    llama: Path, monkeypatch: pytest.MonkeyPatch, way
):
    async with HandRig(llama, choose=way, prefill_chunk=2048) as rig:
        ran = Ran(rig, monkeypatch)
        rig.submit(prompt(900), 2)
        rig.run()
        assert ran.steps[0] == 256
        assert max(ran.steps) <= 512


async def test_after_a_step_that_failed_prompts_have_half_as_many_tokens_a_step(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    async with HandRig(llama, choose=on_kernels) as rig:
        ran, tried = Ran(rig, monkeypatch, bears=100), 0
        while True:
            tried += 1
            row = rig.submit(prompt(300), 2)
            rig.run()
            if not await fails(row):
                break
        assert row.tokens == alone(rig.model, prompt(300), 2, row.tokens)
        assert tried == 3
        assert max(ran.steps[-4:]) <= 64


async def test_rows_that_fail_without_a_prompt_beside_them_change_nothing(
    llama: Path, monkeypatch: pytest.MonkeyPatch
):
    async with HandRig(llama, choose=on_kernels) as rig:
        ran = Ran(rig, monkeypatch)
        row = rig.submit(prompt(20), 20)
        rig.step(4)
        rig.engine.fail(RuntimeError(TIMEOUT))
        assert await fails(row)
        rig.submit(prompt(300), 2)
        rig.run()
        assert max(ran.steps) == 256


@pytest.mark.parametrize("way", [on_kernels, choose], ids=["a GPU's way", "by mlx-lm's operations"])
async def test_pages_grow_by_a_hundred_or_so(llama: Path, way):
    async with HandRig(llama, choose=way) as rig:
        rig.engine.make_pages()
        first = pages(rig)
        assert first == (64 if rig.forward.horizon else 0)
        sizes = [first]
        for salt in range(1, 8):
            rig.submit(prompt(16 * 60, salt), 4)
            rig.run()
            sizes.append(pages(rig))
        grown = [after - before for before, after in pairwise(sizes)]
        assert max(grown) <= 128
        assert sum(grown) >= 300


async def test_kept_pages_go_where_other_programs_want_memory(llama: Path):
    async with HandRig(llama) as rig:
        level = Pressure.NORMAL
        rig.ledger.pressure = lambda: level
        rig.submit(prompt(200), 4)
        rig.run()
        assert rig.engine.stats().pages_cached
        level = Pressure.WARNING
        row = rig.submit(prompt(40, 2), 4)
        rig.run()
        assert row.tokens == alone(rig.model, prompt(40, 2), 4, row.tokens)
        assert rig.engine.stats().pages_cached <= 3


async def test_nothing_new_is_begun_where_macos_is_about_to_end_programs(llama: Path):
    async with HandRig(llama, max_rows=1) as rig:
        level = Pressure.NORMAL
        rig.ledger.pressure = lambda: level
        running, waiting = rig.submit(prompt(20), 30), rig.submit(prompt(21), 4)
        rig.step(3)
        level = Pressure.CRITICAL
        new = rig.submit(prompt(22), 4)
        with pytest.raises(OutOfMemory, match="critically short of memory"):
            await new.events()
        rig.run()
        # Who was answered still is, and who waited hears of it.
        assert running.tokens == alone(rig.model, prompt(20), 30, running.tokens)
        with pytest.raises(OutOfMemory, match="critically short of memory"):
            await waiting.events()
        level = Pressure.NORMAL
        again = rig.submit(prompt(22), 4)
        rig.run()
        assert again.tokens == alone(rig.model, prompt(22), 4, again.tokens)


async def test_a_load_has_little_to_compile(llama: Path, monkeypatch: pytest.MonkeyPatch):
    rows, chunks = [], []
    step, prompted = forwards.FusedForward._step, forwards.FusedForward._prompted

    def noting(self, tokens, batch):
        rows.append(tokens.size)
        return step(self, tokens, batch)

    def noting_chunk(self, decode, chunk):
        chunks.append(len(chunk.tokens))
        return prompted(self, decode, chunk)

    monkeypatch.setattr(forwards.FusedForward, "_step", noting)
    monkeypatch.setattr(forwards.FusedForward, "_prompted", noting_chunk)
    async with HandRig(llama, choose=on_kernels) as rig:
        assert rig.forward.kind == "fused"
        assert max(rows) <= 2
        assert chunks == [64]


async def test_what_is_a_macs_is_no_other_devices(llama: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "current", lambda: replace(devices.CUDA, warm_chunk=64))
    async with HandRig(llama, choose=on_kernels) as rig:
        ran = Ran(rig, monkeypatch)
        rig.submit(prompt(900), 2)
        rig.step()
        assert ran.steps == [900]
        rig.engine.fail(RuntimeError(TIMEOUT))
        rig.submit(prompt(900), 2)
        rig.run()
        assert 900 in ran.steps[1:]


@pytest.mark.parametrize(
    ("kind", "sizes", "way"),
    [
        ("glm4_moe", {}, RaggedForward),
        ("qwen3_5", {}, SeparateForward),
        ("glm4_moe", {"head_dim": 32, "first_k_dense_replace": 2}, FusedForward),
    ],
)
async def test_an_mtp_head_reads_the_states_of_steps_that_are_queued_ahead(
    tmp_path: Path, kind: str, sizes: dict[str, int], way: type[Forward]
) -> None:
    folder = random_head(tmp_path / "m", kind, **sizes)
    limits = {"speculation": "on", "longest_draft": 3, "page_size": 8}
    async with HandRig(folder, head=True, choose=on_kernels, **limits) as rig:
        assert isinstance(rig.forward, way)
        assert rig.forward.looks_ahead
        seen = noting(head_in(rig))
        given = [prompt(length, length) for length in (5, 40, 9)]
        rows = [drafting(rig, tokens, 9 + 4 * i) for i, tokens in enumerate(given)]
        # Beside a row that brings no drafts.
        drawn = rig.ran([*rows, rig.row(prompt(7), 6)])
        for i, tokens in enumerate(given):
            assert drawn[i] == alone(rig.model, tokens, 9 + 4 * i)
        assert len(seen) > 9
        for tokens, found in seen:
            assert found == guessed(rig, tokens, len(found))

"""Answers of a GPU that orders launches by nothing but the arrays that they are given, as MLX has
it on Metal: with pages written in place, rows that are cancelled or end, and pages that move."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from devices.late import LateGPU
from devices.portable import plainly
from engine.rig import HandRig, alone, prompt
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.forward import FusedForward
from mlx_manager.mlx_server.execution.forward import Forward
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward
from mlx_manager.mlx_server.execution.module.separate import SeparateForward

PAGE = 16
# Pages are added so few at a time that they often are.
MAC = replace(devices.METAL, growth=(3, 6))


def fused(model, size: int, kernels: KernelSet) -> Forward:
    decoder = FusedDecoder.build(model, size, kernels.find, compile=plainly)
    assert isinstance(decoder, FusedDecoder), decoder
    return FusedForward(decoder.stores(size, kernels), decoder, size, kernels.order)


def ragged(model, size: int, kernels: KernelSet) -> Forward:
    return RaggedForward(model, size, KeyAccess.PAGES, kernels, plainly)


def separate(model, size: int, kernels: KernelSet) -> Forward:
    return SeparateForward(model, size, KeyAccess.PAGES, kernels, plainly)


def gathered(model, size: int, kernels: KernelSet) -> Forward:
    return SeparateForward(model, size, KeyAccess.GATHERED, kernels, plainly)


WAYS = [fused, ragged, separate, gathered]


async def wrong_answers(folder: Path, way: Callable[..., Forward], seed: int) -> list[int]:
    """Return the rows, of some that come and go, that the model answers otherwise by themselves."""
    model = make_tiny_model(folder / "m", "llama")
    gpu, chance = LateGPU(folder, random.Random(seed)), random.Random(seed)

    def choose(model, size: int) -> Forward:
        return way(model, size, gpu.kernels())

    async with HandRig(model, choose=choose, prefill_chunk=2 * PAGE) as rig:
        with pytest.MonkeyPatch.context() as patch:
            gpu.install(patch)
            texts = [prompt(chance.randint(20, 50), salt) for salt in range(1, 3)]
            asked = []
            for number in range(8):
                # Some begin as others do, and share their pages.
                text = chance.choice(texts) + prompt(chance.randint(1, 9), number)
                asked.append((rig.submit(text, chance.randint(3, 20)), text))
                rig.step(chance.randint(1, 3))
                if chance.random() < 0.4:
                    # A step of its is under way.
                    row, _ = asked.pop(chance.randrange(len(asked)))
                    rig.cancel(row)
            rig.run()
        got = [(row.tokens, row.sequence.limit, text) for row, text in asked]
        return [
            number
            for number, (tokens, limit, text) in enumerate(got)
            if alone(rig.model, text, limit, guess=tokens) != tokens
        ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(2))
async def test_rows_come_and_go_and_pages_move_while_a_step_is_under_way(
    tmp_path, monkeypatch, way, seed
):
    monkeypatch.setattr(devices, "current", lambda: MAC)
    assert not await wrong_answers(tmp_path, way, seed)


@pytest.mark.parametrize("way", WAYS)
async def test_such_a_gpu_gives_wrong_answers_where_it_is_counted_on_to_keep_the_order(
    tmp_path, monkeypatch, way
):
    """Or else these tests would see nothing."""
    monkeypatch.setattr(devices, "current", lambda: replace(MAC, in_order=True))
    for seed in range(5):
        (tmp_path / str(seed)).mkdir()
        if await wrong_answers(tmp_path / str(seed), way, seed):
            return
    pytest.fail("all answers are right")

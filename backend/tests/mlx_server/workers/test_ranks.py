"""Models spread over several devices: processes on this CPU, joined by MLX's ring."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from here import start_here
from linux import descendants, running
from spread import GREEDY, asking, drawn, finished, spread_pool, text_of
from thorough import every_other, slow
from tiny_models import make_tiny_model
from tiny_vision import make_seeing_model, picture

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.core import (
    Conversation,
    GenerationRequest,
    JsonSchema,
    Message,
    Sampling,
)
from mlx_manager.mlx_server.errors import MLXManagerError, ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.workers.mpirun import PLACE, Mpirun
from mlx_manager.mlx_server.workers.process import start_process

SHARED = {"qwen3_moe": "ragged", "qwen3": "fused"}
MORE = {
    "llama": "fused",
    "qwen2": "fused",
    "ministral3": "fused",
    "gpt_oss": "ragged",
    "glm4_moe": "ragged",
    "minimax": "ragged",
    "glm4_moe_lite": "separate",
    "deepseek_v2": "ragged",
    "deepseek_v3": "separate",
    "deepseek_v32": "separate",
    "deepseek_v41": "alone",
    "longcat_flash": "separate",
    "qwen3_5": "separate",
}
"""Ways in which shares of families of models are run on a CPU."""
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
PAGE_BYTES = 2 * 2 * 2 * 64 * 4 * 16
"""Bytes of a page: two layers of two heads of 64, keys and values in float32, 16 tokens."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def prompts(rows: int, seed: int = 0) -> list[list[int]]:
    """Prompts of many lengths; some begin alike, for longer than a page."""
    drawing = random.Random(seed)
    begun = [drawing.randrange(256) for _ in range(40)]
    return [
        (begun if row % 3 == 0 else [])
        + [drawing.randrange(256) for _ in range(drawing.randrange(1, 90))]
        for row in range(rows)
    ]


def room(one: Mapping[str, int], pages: int) -> int:
    """Return the memory for two ranks with so many pages, which keep as much together as one."""
    return 2 * one["working"] + one["weights"] + pages * PAGE_BYTES


@pytest.mark.parametrize(
    ("family", "kind"),
    [*every_other(SHARED.items()), *(pytest.param(*each, marks=slow) for each in MORE.items())],
)
async def test_two_ranks_draw_the_tokens_of_one_process(
    tmp_path: Path, family: str, kind: str
) -> None:
    make_tiny_model(tmp_path / "m", family)
    asked = [asking(ids) for ids in prompts(10)]
    async with spread_pool(tmp_path, 1, start=start_here) as one:
        wanted = await drawn(one, "m", asked)
    async with spread_pool(tmp_path) as two:
        got = await drawn(two, "m", asked)
        assert await drawn(two, "m", asked[:3]) == wanted[:3]
        assert (await two.status("m")).devices == 2
        assert await forward_of(two) == kind
    assert got == wanted


async def forward_of(pool: ModelPoolManager) -> str:
    """Return how the model is run."""
    await pool.look()
    kind: str = pool.figures()["engines"]["m"]["forward"]
    return kind


async def test_pauses_prefixes_schemas_and_drafts_are_as_on_one_device(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", "llama", head_dim=64)
    few = [asking(ids, 40) for ids in prompts(10)]
    again = asking([1, 2, 3] * 20, 40, speculation="auto")
    asked = Conversation((Message("user", "Who?"),))
    schema, seeded = JsonSchema(json.dumps(SCHEMA)), Sampling(seed=7)
    held = GenerationRequest("m", asked, seeded, constraint=schema, max_tokens=200)
    limits = EngineLimits(speculation="on", prefill_chunk=64)
    async with spread_pool(tmp_path, 1, limits, start_here) as one:
        wanted = await drawn(one, "m", [*few, again])
        await one.look()
        known, said = (await one.status("m")).memory, await text_of(one, "m", held)
    async with spread_pool(tmp_path, 2, limits, memory_limit=room(known, 12)) as two:
        assert await drawn(two, "m", [*few, again]) == wanted
        ends = [await finished(two, "m", again) for _ in range(2)]
        assert ends[1].usage.cached_tokens >= 32
        assert await text_of(two, "m", held) == said
        await two.look()
        figures = two.figures()["engines"]["m"]
    assert json.loads(said).keys() == {"name", "old"}
    assert figures["pauses"] > 0
    assert figures["accepted_tokens"] > 0


@slow
@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl", "qwen2_5_vl", "mistral3"])
async def test_pictures_are_seen_as_on_one_device(tmp_path: Path, kind: str) -> None:
    make_seeing_model(tmp_path / "m", kind)
    asked = [
        GenerationRequest("m", Conversation((Message("user", parts),)), GREEDY, return_ids=True)
        for parts in (
            ("word1 ", picture(100, 60), " what is it?"),
            ("no picture at all",),
            (picture(30, 31, 1), picture(100, 60), "two"),
            (picture(20, 90, 2), "x " * 200),
        )
    ]
    short = [replace(each, max_tokens=12) for each in asked]
    async with spread_pool(tmp_path, 1, start=start_here) as one:
        wanted = await drawn(one, "m", short)
    async with spread_pool(tmp_path) as two:
        assert await drawn(two, "m", short) == wanted


@slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "fused"),
        ("qwen3", "fused"),
        ("qwen2", "fused"),
        ("ministral3", "fused"),
        # Experts, with shared ones beside them, with biases, behind a norm of their own.
        ("qwen3_moe", "fused"),
        ("glm4_moe", "fused"),
        ("gpt_oss", "fused"),
        # Latents, and states.
        ("glm4_moe_lite", "fused"),
        ("deepseek_v3", "fused"),
        ("qwen3_5", "fused"),
    ],
)
async def test_steps_that_are_queued_ahead_draw_the_same(
    tmp_path: Path, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: by our decoder, over kernels that any device has. Tokens that only rank 0's
    device knows go through the group."""
    here = Path(__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{here.parent.parent}")
    # Kernels rotate 16 elements or more.
    changes = {"partial_rotary_factor": 1.0} if family == "glm4_moe" else {}
    make_tiny_model(tmp_path / "m", family, **changes)
    asked = [asking(ids, 30) for ids in prompts(5)]
    async with spread_pool(tmp_path, 1, start=start_here) as one:
        wanted = await drawn(one, "m", asked)
    ahead = partial(start_process, program="portable_worker")
    async with spread_pool(tmp_path, start=ahead) as two:
        assert await drawn(two, "m", asked) == wanted
        assert await forward_of(two) == kind


PACKING = {"group_size": 32, "bits": 4}


@slow
@pytest.mark.parametrize("weights", ["keep", "dequantize"])
async def test_packed_weights_are_shared_out_in_either_form(tmp_path: Path, weights: str) -> None:
    make_tiny_model(tmp_path / "m", "qwen3", quantize=PACKING)
    asked = [asking(ids) for ids in prompts(4)]
    async with spread_pool(tmp_path, 1, start=start_here, weights=weights) as one:
        wanted = await drawn(one, "m", asked)
    async with spread_pool(tmp_path, weights=weights) as two:
        assert await drawn(two, "m", asked) == wanted
        assert await forward_of(two) == "fused"


@slow
async def test_groups_of_packed_weights_that_do_not_divide_are_refused_by_name(
    tmp_path: Path,
) -> None:
    make_tiny_model(tmp_path / "m", "llama", quantize=PACKING, intermediate_size=96)
    refused = r"layers\.0\.mlp\.down_proj has 3 groups of 32 packed weights .* no multiple of 2"
    async with spread_pool(tmp_path, weights="keep") as two:
        with pytest.raises(ModelNotSupported, match=refused):
            await drawn(two, "m", [asking([1, 2, 3])])
    async with spread_pool(tmp_path, weights="dequantize") as two:
        assert await drawn(two, "m", [asking([1, 2, 3])])


@needs_mpi
@pytest.mark.parametrize("family", every_other(["llama", "qwen3_moe"]))
async def test_two_ranks_by_mpi_draw_the_tokens_of_one_process(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    make_tiny_model(tmp_path / "m", family)
    asked = [asking(ids) for ids in prompts(5)]
    async with spread_pool(tmp_path, 1, start=start_here) as one:
        wanted = await drawn(one, "m", asked)
    async with spread_pool(tmp_path, distributed="mpi") as two:
        assert await drawn(two, "m", asked) == wanted
        started = descendants(os.getpid())
    async with asyncio.timeout(10):
        while running(started):  # noqa: ASYNC110 other processes'
            await asyncio.sleep(0.05)


@slow
@needs_mpi
async def test_a_group_of_one_is_noticed_where_mlx_does_not_find_mpis_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("MLX_MPI_LIBNAME", "libnothing.so")
    make_tiny_model(tmp_path / "m", "llama")
    async with spread_pool(tmp_path, distributed="mpi") as two:
        with pytest.raises(MLXManagerError, match=r"by libnothing\.so; MLX_MPI_LIBNAME names"):
            await drawn(two, "m", [asking([1, 2, 3])])


def test_without_mpirun_mpi_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    # It may have been asked for in either place.
    where = r"MLX_SERVER_DISTRIBUTED, or `backend` in the hostfile"
    with pytest.raises(ModelLoadFailed, match=rf"{where}.*there is no mpirun on the PATH"):
        Mpirun(2)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have a script in place of mpirun."""
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_words_of_an_mpirun_that_makes_no_places_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "echo 'There are not enough slots' >&2\nexit 1\n")
    with pytest.raises(ModelLoadFailed, match="2 ranks: There are not enough slots"):
        Mpirun(2)


def test_a_place_ends_with_its_worker_even_where_mpirun_stays(tmp_path: Path) -> None:
    """This process stands for mpirun: it is the place's parent. The worker has been killed."""
    worker = subprocess.Popen(["true"])
    worker.wait()
    folder = tmp_path / "places"
    folder.mkdir()
    command = [sys.executable, "-m", PLACE, str(folder), str(worker.pid)]
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "0"}
    subprocess.run(command, env=environment, check=True, timeout=20)
    assert not folder.exists()


def test_on_a_mac_mpirun_has_its_files_where_paths_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `TMPDIR` is on a Mac, names of Open MPI's files there are cut off."""
    stand_in(tmp_path, monkeypatch, 'echo "in $TMPDIR"\nexit 1\n')
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ModelLoadFailed, match="in /tmp/mpi-"):
        Mpirun(2)

"""Loads and what becomes of models whose workers fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from here import Here, start_here
from hypothesis import given
from hypothesis import strategies as st
from pools import answer, open_pool, states

from mlx_manager.mlx_server.errors import MLXManagerError, WorkerFailed
from mlx_manager.mlx_server.models.loads import STRIKES, Strikes
from mlx_manager.mlx_server.workers.process import LogSettings


@given(
    failures=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["reading", "answering"]), st.booleans())
    )
)
def test_a_model_is_down_after_failures_in_a_row_at_the_same_thing(
    failures: list[tuple[str, str, bool]],
):
    strikes = Strikes()
    rows: dict[str, list[str]] = {"a": [], "b": []}
    for name, doing, answered in failures:
        if answered:
            strikes.forget(name)
        strikes.note(name, doing, "it broke")
        row = rows[name]
        if answered or (row and row[-1] != doing):
            row.clear()
        row.append(doing)
    for name, row in rows.items():
        reason = strikes.reason(name)
        assert (reason is not None) == (len(row) >= STRIKES)
        assert reason is None or f"{len(row)} times in a row while {row[-1]}: it broke" in reason
        strikes.forget(name)
        assert strikes.reason(name) is None
    assert sum(strikes.counts.values()) == len(failures)


async def test_a_model_whose_worker_always_fails_is_left_down_until_its_owner_wants_it(
    models_dir: Path,
):
    async with open_pool(models_dir) as pool:
        for _ in range(3):
            async with pool.lease("a") as lease:
                lease.worker.kill("a test failed it")
                await asyncio.wrap_future(lease.worker.over)
        with pytest.raises(MLXManagerError, match="failed 3 times in a row while answering") as e:
            await answer(pool, "a")
        assert (e.value.code, e.value.status) == ("model_down", 503)
        assert (await states(pool))["a"] == "down"
        assert "a test failed it" in (pool.failure("a") or "")
        assert pool.figures()["failures"] == {"a": 3}
        await pool.unload("a")
        assert await answer(pool, "a")


async def test_failures_with_answers_between_them_are_none_in_a_row(models_dir: Path):
    async with open_pool(models_dir) as pool:
        for _ in range(4):
            assert await answer(pool, "a")
            async with pool.lease("a") as lease:
                lease.worker.kill("a test failed it")
                await asyncio.wrap_future(lease.worker.over)
        assert pool.failure("a") is None


async def test_a_load_tells_what_it_is_at_and_what_it_has_done(models_dir: Path):
    async with open_pool(models_dir) as pool:
        told = set()
        loading = asyncio.create_task(pool.get_model("a"))
        while not loading.done():
            told.add(pool.doing("a"))
            await asyncio.sleep(0)
        assert "its process starts" in told
        assert len(told - {None}) > 2
        assert pool.doing("a") is None
        facts = (await loading).facts
        assert facts.seconds > 0
        status = await pool.status("a")
        assert (status.state, status.nbytes) == ("loaded", facts.nbytes)


async def test_a_process_that_can_not_be_started_fails_the_load_and_the_next_may_succeed(
    models_dir: Path,
):
    full = True

    def start(name: str, log: LogSettings) -> Any:
        if full:
            raise OSError("Resource temporarily unavailable")
        return start_here(name, log)

    async with open_pool(models_dir, start=start) as pool:
        with pytest.raises(WorkerFailed, match="No process can be started for a: Resource"):
            await answer(pool, "a")
        full = False
        assert await answer(pool, "a")


async def test_each_model_has_a_worker_which_ends_with_it(models_dir: Path):
    async with open_pool(models_dir, start=(here := Here())) as pool:
        for name in "ab":
            await pool.get_model(name)
        assert set(pool.workers()) == set(here.models) == {"a", "b"}
        worker = (await pool.get_model("a")).worker
        await pool.unload("a")
        assert worker.ended
        assert not here.models["a"].thread.alive
        assert set(pool.workers()) == {"b"}
        assert await answer(pool, "b")


async def test_a_load_that_is_abandoned_leaves_no_worker(models_dir: Path):
    async with open_pool(models_dir, start=(here := Here())) as pool:
        loading = asyncio.create_task(pool.get_model("a"))
        while pool.doing("a") is None:  # noqa: ASYNC110 the pool tells nobody
            await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert pool.grants.free() == pool.grants.limit
        assert not any(model.thread.alive for model in here.models.values())

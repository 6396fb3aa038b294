"""A load is made of small pieces, between which the models that are loaded go on: on a CPU, and as
on a GPU, with kernels of which each may have to be compiled (portable ones stand in for them)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest
from engine.portable import Portable, plainly
from pools import answer, given_back, open_pool, request, states

from mlx_manager.mlx_server.backends.text import TextBackend, preparing
from mlx_manager.mlx_server.engine.choice import STEPS, choosing
from mlx_manager.mlx_server.engine.sampling import every_way
from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.loading import LoadedModel
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.utils.memory import clear_cache
from mlx_manager.mlx_server.utils.steps import Done, Steps, advance, whereabouts

on_kernels = partial(preparing, choice=partial(choosing, kernels=Portable, compile=plainly))
"""A backend as on a GPU."""


@dataclass
class Watch:
    """Notes where the pieces of `model`'s preparation end, and by `steps` what others have done."""

    model: str
    prepare: Callable[..., Steps[TextBackend]]
    steps: Callable[[], int] = lambda: 0
    seen: list[int] = field(default_factory=list)
    pauses: list[str] = field(default_factory=list)

    def __call__(self, loaded: LoadedModel, *rest: object) -> Steps[TextBackend]:
        steps = self.prepare(loaded, *rest)
        if loaded.id != self.model:
            return (yield from steps)
        try:
            while not isinstance(piece := advance(steps), Done):
                self.pauses.append(whereabouts(steps))
                self.seen.append(self.steps())
                yield piece
        finally:
            steps.close()
        return piece.value


async def endless(pool: ModelPoolManager, model: str) -> None:
    """A stream that ends when it is cancelled."""
    async with pool.lease(model) as lease:
        for number in count():
            prompt = f"story {number}"
            async for _ in lease.backend.generate(request(lease.id, prompt, tokens=1500)):
                pass


@pytest.mark.parametrize("prepare", [preparing, on_kernels])
async def test_a_running_stream_steps_between_any_two_pieces_of_a_load(
    prepare: Callable[..., Steps[TextBackend]], models_dir: Path
) -> None:
    watch = Watch("b", prepare)
    async with open_pool(models_dir, prepare=watch) as pool:
        alone = await answer(pool, "a", tokens=40)
        backend = (await pool.get_model("a")).backend
        watch.steps = lambda: backend.stats().steps
        running = asyncio.create_task(endless(pool, "a"))
        answering = asyncio.create_task(answer(pool, "a", tokens=40))
        while not backend.stats().running:  # noqa: ASYNC110 the engine tells nobody
            await asyncio.sleep(0)
        await pool.get_model("b")
        assert not running.done()
        running.cancel()
        assert await answering == alone
        assert await answer(pool, "b")
    assert len(watch.seen) > 10
    assert all(after > before for before, after in zip(watch.seen, watch.seen[1:], strict=False))


async def test_on_a_gpu_each_kernel_and_each_pass_is_a_piece(models_dir: Path) -> None:
    watch = Watch("b", on_kernels)
    async with open_pool(models_dir, prepare=watch) as pool:
        await pool.get_model("b")
        engines = pool.figures()["engines"]
        assert engines["b"]["forward"] == "fused"
    parts = [pause.partition(" > _fused > ") for pause in watch.pauses]
    places = [place for _, of_fused, place in parts if of_fused]
    # A step's launches by themselves for five numbers of rows; when warming, two times for each of
    # three loads.
    tried = places.count("checking > one_by_one > computed > beside")
    warmed = places.count("warming > one_by_one > computed > beside")
    # A layer's are five, and there are the embedding and the head at least.
    assert tried // 5 == warmed // 6 >= 5 + 2
    assert (tried % 5, warmed % 6) == (0, 0)
    # Its two layers are joined one by one, and two sequences pass through the model three times.
    assert places.count("building > _building > computed > beside") == 2
    assert places.count("checking > _passed > computed > beside") == 2 * 3
    assert places.count("disagreement > run_both > computed > beside") == 2 + STEPS
    # A draw in every way.
    draws = watch.pauses.count("preparing > choosing > one_by_one > computed > beside")
    assert draws == len(list(every_way(mx.zeros((2, 64)))))
    assert [pause for pause in watch.pauses if "first_pages" in pause] == 2 * [
        "preparing > first_pages"
    ]


@pytest.mark.parametrize("place", ["_alone", "_building", "checking", "warming", "first_pages"])
async def test_a_load_that_fails_between_two_pieces_leaves_nothing_behind(
    place: str, models_dir: Path
) -> None:
    failing = True

    def prepare(loaded: LoadedModel, *rest: object) -> Steps[TextBackend]:
        steps = on_kernels(loaded, *rest)
        try:
            while not isinstance(piece := advance(steps), Done):
                yield piece
                if failing and f" {place}" in whereabouts(steps):
                    raise ModelLoadFailed("that was enough")
        finally:
            steps.close()
        return piece.value

    async with open_pool(models_dir, prepare=prepare) as pool:
        clear_cache()
        before = mx.get_active_memory()
        with pytest.raises(ModelLoadFailed, match="that was enough"):
            await pool.get_model("b")
        gc.collect()
        await given_back(before)
        assert set(pool.ledger.figures()) == {"buffer_cache", "limit", "available"}
        assert (await states(pool))["b"] == "loadable"
        failing = False
        assert await answer(pool, "b")


@pytest.mark.parametrize("where", ["joined", "launches", "passes"])
async def test_a_server_that_ends_in_the_middle_of_a_load_frees_everything(
    where: str, models_dir: Path
) -> None:
    place = {"joined": "building", "launches": "one_by_one", "passes": "_passed"}[where]
    watch = Watch("b", on_kernels)
    clear_cache()
    before = mx.get_active_memory()
    async with open_pool(models_dir, prepare=watch) as pool:
        loading = asyncio.create_task(pool.get_model("b"))
        while not any(place in pause for pause in watch.pauses):  # noqa: ASYNC110
            await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await loading
    await given_back(before)

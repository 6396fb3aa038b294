"""The pool and the owner's settings: times, pins, preloads, reading them again, what is unloaded."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from pools import Clock, answer, open_pool, states, tended
from tiny_models import make_tiny_adapter, make_tiny_model

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import Sampling
from mlx_manager.mlx_server.defaults import asked_sampling, fill_sampling
from mlx_manager.mlx_server.errors import (
    InvalidSettings,
    ModelInUse,
    ModelLoadFailed,
    ModelNotFound,
    OutOfMemory,
)
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.models.residents import Returns
from mlx_manager.mlx_server.services.inference import generate_completion


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "models.toml").write_text(text)
    return tmp_path / "models.toml"


async def loaded(pool: ModelPoolManager) -> set[str]:
    return {name for name, state in (await states(pool)).items() if state == "loaded"}


async def until(pool: ModelPoolManager, names: set[str]) -> None:
    while await loaded(pool) != names:  # noqa: ASYNC110 the pool tells nobody
        await asyncio.sleep(0.001)


async def test_a_model_goes_when_nobody_has_used_it_for_its_time(models_dir: Path, tmp_path: Path):
    clock = Clock()
    file = write(tmp_path, '[models.b]\nttl = "10s"\n[models.c]\nttl = "never"')
    async with open_pool(models_dir, models_file=file, ttl=60.0, clock=clock) as pool:
        for name in "abc":
            await pool.get_model(name)
        assert await pool.expire() == 10
        clock.now = 9.0
        async with pool.lease("b"):
            clock.now = 30.0
            assert await pool.expire() == 30
            assert await loaded(pool) == {"a", "b", "c"}
        clock.now = 39.0
        assert await pool.expire() == 1
        clock.now = 40.0
        assert await pool.expire() == 20
        assert await loaded(pool) == {"a", "c"}
        clock.now = 60.0
        assert await pool.expire() is None
        assert await loaded(pool) == {"c"}
        status = await pool.status("c")
        assert (status.idle, status.ttl) == (60.0, float("inf"))


async def test_a_pool_that_is_tended_preloads_and_unloads_by_itself(
    models_dir: Path, tmp_path: Path
):
    file = write(tmp_path, "[models.b]\npreload = true\n[models.c]\npreload = true\nttl = 0")
    async with open_pool(models_dir, default="a", models_file=file) as pool, tended(pool):
        await until(pool, {"b"})
        await answer(pool, "c")
        await until(pool, {"b"})


async def test_a_model_that_is_loaded_for_nobody_any_more_goes_after_its_time(models_dir: Path):
    async with open_pool(models_dir, ttl=0.0) as pool, asyncio.timeout(60), tended(pool):
        # The default model has come and gone.
        while not pool.figures()["unloads"]:  # noqa: ASYNC110 the pool tells nobody
            await asyncio.sleep(0.001)
        asking = asyncio.create_task(pool.get_model("b"))
        while (await states(pool))["b"] != "loading":  # noqa: ASYNC110 likewise
            await asyncio.sleep(0)
        asking.cancel()
        while "b" not in pool.figures()["loads"]:  # noqa: ASYNC110 likewise
            await asyncio.sleep(0.001)
        await until(pool, set())


async def test_a_pinned_model_makes_no_place_and_outlives_its_time(
    models_dir: Path, tmp_path: Path
):
    clock = Clock()
    file = write(tmp_path, "[models.a]\npinned = true\nttl = 5")
    async with open_pool(
        models_dir, models_file=file, max_models=2, patience=0.0, clock=clock
    ) as pool:
        for name in ("a", "b", "c"):
            await pool.get_model(name)
        clock.now = 100.0
        assert await pool.expire() is None
        assert await loaded(pool) == {"a", "c"}
        await pool.pin("c", True)
        with pytest.raises(OutOfMemory, match="2 models are loaded, 0 in use and 2 pinned"):
            await pool.get_model("b")
        await pool.pin("a", False)
        await pool.get_model("b")
        assert await loaded(pool) == {"b", "c"}
        with pytest.raises(ModelNotFound):
            await pool.pin("nope", True)


async def test_unloading_says_what_memory_came_back(models_dir: Path):
    async with open_pool(models_dir) as pool:
        size = (await pool.get_model("a")).facts.nbytes
        gone = await pool.unload("a")
        assert gone is not None
        assert (gone.id, gone.nbytes) == ("a", size)
        assert gone.before - gone.after >= size
        assert gone.after == 0
        assert await pool.unload("a") is None
        with pytest.raises(ModelNotFound):
            await pool.unload("nope")
        async with pool.lease("b"), pool.lease("b"):
            with pytest.raises(ModelInUse, match="b is answering 2 requests") as refusal:
                await pool.unload("b")
            assert refusal.value.status == 409


async def test_settings_that_are_read_again_take_effect(models_dir: Path, tmp_path: Path):
    file = write(tmp_path, '[models.a]\naliases = ["first"]\n[models.b]\ncontext_length = 100')
    async with open_pool(models_dir, models_file=file) as pool:
        assert (await pool.get_model("first")).id == "a"
        assert (await pool.get_model("b")).facts.context_length == 100
        write(
            tmp_path,
            '[models.a]\naliases = ["one"]\n[models.b]\ncontext_length = 200\n[models.nope]',
        )
        reloaded = await pool.reload()
        assert (reloaded.changed, reloaded.unloaded) == (("a", "b"), ("b",))
        assert (reloaded.outdated, reloaded.unknown) == ((), ("nope",))
        assert (pool.resolve("one"), pool.resolve("first")) == ("a", "first")
        assert await loaded(pool) == {"a"}
        assert (await pool.status("b")).context_length == 200
        assert (await pool.get_model("b")).facts.context_length == 200


async def test_settings_of_what_is_not_on_offer_are_told_of_at_the_start_and_when_read_again(
    models_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = write(tmp_path, "[models.b]\npreload = true\n[models.bee]\npinned = true")
    async with open_pool(models_dir, default="a", models_file=file) as pool:
        async with tended(pool):
            await until(pool, {"b"})
        told = [record.message for record in caplog.records if "not on offer" in record.message]
        assert told == [f"{file} has settings of 'bee', which is not on offer"]
        write(tmp_path, "[models.see]")
        assert (await pool.reload()).unknown == ("see",)
        assert f"{file} has settings of 'see', which is not on offer" in caplog.messages


async def test_settings_that_can_not_be_leave_the_old_ones_in_force(
    models_dir: Path, tmp_path: Path
):
    file = write(tmp_path, '[models.a]\naliases = ["first"]')
    async with open_pool(models_dir, models_file=file) as pool:
        write(tmp_path, '[models.a]\naliases = ["second"]\npinned = "perhaps"')
        with pytest.raises(InvalidSettings, match=r"models.a.pinned: must be true or false"):
            await pool.reload()
        write(tmp_path, f'[models.a]\naliases = ["second"]\n[models.s]\nbase = "{"x" * 300}"')
        with pytest.raises(InvalidSettings, match=r"models.s.base: must be a path that can be"):
            await pool.reload()
        file.unlink()
        with pytest.raises(InvalidSettings, match="can't be read"):
            await pool.reload()
        assert pool.resolve("first") == "a"
        assert (await pool.status("first")).aliases == ("first",)


async def test_a_model_in_use_takes_its_new_settings_when_it_is_idle(
    models_dir: Path, tmp_path: Path
):
    file = write(tmp_path, "")
    async with open_pool(models_dir, models_file=file) as pool, tended(pool):
        async with pool.lease("b") as old:
            write(tmp_path, "[models.b]\ncontext_length = 100")
            assert (await pool.reload()).outdated == ("b",)
            async with pool.lease("b") as same:
                assert same is old
            assert (await pool.status("b")).outdated
        await until(pool, set())
        assert (await pool.get_model("b")).facts.context_length == 100


async def test_what_is_preloaded_is_loaded_again_when_it_has_gone_for_its_new_settings(
    models_dir: Path, tmp_path: Path
):
    def set_length(tokens: int) -> Path:
        return write(tmp_path, f"[models.b]\npreload = true\ncontext_length = {tokens}")

    async def until_it_has(tokens: int) -> None:
        while True:
            status = await pool.status("b")
            if (status.state, status.context_length) == ("loaded", tokens):
                return
            await asyncio.sleep(0.001)

    file = set_length(50)
    async with (
        open_pool(models_dir, models_file=file) as pool,
        asyncio.timeout(60),
        tended(pool),
    ):
        await until_it_has(50)
        async with pool.lease("b"):
            set_length(100)
            assert (await pool.reload()).outdated == ("b",)
        await until_it_has(100)
        set_length(200)
        await pool.reload()
        while (await states(pool))["b"] != "loading":  # noqa: ASYNC110 the pool tells nobody
            await asyncio.sleep(0)
        set_length(300)
        await pool.reload()
        await until_it_has(300)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a load waits for room."""
    begun = asyncio.Event()

    async def wait(self: Returns, seen: int, seconds: float | None) -> None:
        begun.set()
        await original(self, seen, seconds)

    original = Returns.wait
    monkeypatch.setattr(Returns, "wait", wait)
    return begun


async def test_who_waits_for_room_gets_that_of_a_pinned_model_that_is_unloaded(
    models_dir: Path, waits: asyncio.Event
):
    async with open_pool(models_dir, max_models=2) as pool, asyncio.timeout(30):
        await pool.get_model("a")
        await pool.pin("a", True)
        async with pool.lease("b"):
            waiting = asyncio.create_task(pool.get_model("c"))
            await waits.wait()
            await pool.unload("a")
            assert (await waiting).id == "c"


async def test_a_load_that_waited_for_room_makes_the_model_as_the_settings_have_it_now(
    models_dir: Path, tmp_path: Path, waits: asyncio.Event
):
    file = write(tmp_path, '[models.s]\nbase = "b"\nweights = "keep"')
    async with open_pool(models_dir, models_file=file, max_models=1) as pool:
        wanted = await answer(pool, "c")
        async with pool.lease("a"):
            waiting = asyncio.create_task(answer(pool, "s"))
            await waits.wait()
            write(tmp_path, '[models.s]\nbase = "c"\nweights = "keep"')
            await pool.reload()
        assert await waiting == wanted


async def test_a_model_that_is_no_longer_allowed_is_gone_even_if_loaded(
    models_dir: Path, tmp_path: Path
):
    file = write(tmp_path, "")
    async with open_pool(models_dir, default="a", models_file=file) as pool:
        async with pool.lease("b"):
            write(tmp_path, 'allow = ["c"]')
            assert (await pool.reload()).outdated == ("b",)
            with pytest.raises(ModelNotFound, match=r"no model 'b' here\. Offered: "):
                await pool.get_model("b")
            assert (await pool.status("b")).state == "loaded"
        await pool.expire()
        with pytest.raises(ModelNotFound):
            await pool.status("b")
        assert (await pool.get_model("c")).id == "c"
        assert (await pool.get_model()).id.endswith("a")


async def test_one_base_is_served_with_and_without_its_adapter(models_dir: Path, tmp_path: Path):
    make_tiny_adapter(tmp_path / "adapter", models_dir / "a")
    file = write(tmp_path, '[models.tuned]\nbase = "a"\nadapter = "adapter"')
    async with open_pool(models_dir, models_file=file) as pool:
        assert await answer(pool, "tuned") != await answer(pool, "a")
        status = await pool.status("tuned")
        assert (status.recipe.base, status.recipe.adapter) == ("a", tmp_path / "adapter")
        assert status.memory["weights"] == status.nbytes
        (tmp_path / "adapter" / "adapters.safetensors").unlink()
        await pool.unload("tuned")
        with pytest.raises(ModelLoadFailed, match=r"adapters.safetensors can't be read"):
            await answer(pool, "tuned")


async def test_the_models_own_sampling_fills_what_a_request_leaves_open(
    models_dir: Path, tmp_path: Path
):
    file = write(tmp_path, "[models.b]\nsampling = { temperature = 0, top_k = 1 }")
    async with open_pool(models_dir, models_file=file) as pool:

        async def text(**fields: object) -> str:
            body = await generate_completion("b", "hello", pool=pool, max_tokens=12, **fields)
            assert isinstance(body, dict)
            return body["choices"][0]["text"]

        greedy = await text(temperature=0)
        assert await text() == await text(seed=1) == greedy
        assert await text(temperature=2, top_k=0, seed=1) != greedy
        # What the request says goes before the owner's: a single candidate is the greedy one.
        assert await text(temperature=2, seed=1) == greedy


@pytest.mark.parametrize("first", ["unloaded", "loaded"])
async def test_what_the_makers_draw_by_fills_what_request_and_owner_leave_open(
    first: str, tmp_path: Path
):
    for name in ("made", "owned"):
        folder = make_tiny_model(tmp_path / "models" / name)
        made = {"do_sample": True, "temperature": 2.0, "top_k": 1, "top_p": None}
        (folder / "generation_config.json").write_text(json.dumps(made))
    file = write(tmp_path, "[models.owned]\nsampling = { top_k = 0 }")
    async with open_pool(tmp_path / "models", default="made", models_file=file) as pool:

        async def text(model: str, **fields: object) -> str:
            body = await generate_completion(model, "hello", pool=pool, max_tokens=12, **fields)
            assert isinstance(body, dict)
            return body["choices"][0]["text"]

        if first == "loaded":
            await asyncio.gather(text("made"), text("owned"))
        # A single candidate is the greedy one, however hot.
        assert await text("made", seed=1) == await text("made", temperature=0)
        assert await text("made", seed=1, top_k=0) != await text("made", temperature=0)
        assert await text("owned", seed=1) == await text("owned", seed=1, temperature=2, top_k=0)
        for name, top_k in (("made", 1), ("owned", 0)):
            expected = {"temperature": 2.0, "top_k": top_k}
            assert pool.sampling(name) == (await pool.status(name)).sampling == expected


async def test_prompts_kept_for_reuse_are_forgotten(models_dir: Path):
    async with open_pool(models_dir) as pool:
        await answer(pool, "a", tokens=64)
        await answer(pool, "b", tokens=64)
        await pool.look()
        assert pool.figures()["engines"]["a"]["pages_cached"] > 0
        freed = await pool.clear_prefixes("a")
        assert list(freed) == ["a"]
        assert freed["a"] > 0
        await pool.look()
        assert pool.figures()["engines"]["a"]["pages_cached"] == 0
        assert pool.figures()["engines"]["b"]["pages_cached"] > 0
        assert set(await pool.clear_prefixes()) == {"a", "b"}
        await pool.look()
        assert pool.figures()["engines"]["b"]["pages_cached"] == 0
        with pytest.raises(ModelNotFound):
            await pool.clear_prefixes("nope")


async def test_a_loaded_model_whose_files_are_gone_is_still_listed_and_served(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "models" / "a")
    make_tiny_model(tmp_path / "models" / "b")
    async with open_pool(tmp_path / "models", default="b") as pool:
        before = await answer(pool, "a")
        for file in folder.iterdir():
            file.unlink()
        pool.catalog.rescan()
        assert (await pool.status("a")).state == "loaded"
        assert await answer(pool, "a") == before
        await pool.unload("a")
        with pytest.raises(ModelNotFound):
            await answer(pool, "a")


def test_the_time_to_live_is_a_setting():
    assert MLXServerSettings().pool.ttl == float("inf")
    assert MLXServerSettings(model_ttl_seconds=90).pool.ttl == 90


def test_sampling_knows_what_was_left_open():
    asked = asked_sampling(temperature=0.5, top_p=None, seed=3, top_k=None)
    assert asked == Sampling(temperature=0.5, seed=3)
    filled = fill_sampling(asked, {"temperature": 0.1, "top_p": 0.9, "min_p": 0.1})
    assert filled == Sampling(temperature=0.5, top_p=0.9, min_p=0.1, seed=3)
    # Who comes first has the word.
    assert fill_sampling(filled, {"top_p": 0.1, "top_k": 5}) == replace(filled, top_k=5)
    assert fill_sampling(Sampling(), {"temperature": 0.1}) == Sampling()

from __future__ import annotations

import asyncio
import gc
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from devices.portable import Portable, plainly
from here import Here
from llguidance import LLTokenizer
from pools import (
    GREEDY,
    answer,
    events_of,
    given_back,
    lose,
    open_pool,
    request,
    states,
    taken,
    tended,
)
from pydantic import ValidationError
from tiny_encoders import make_tiny_encoder
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.backends.text import TextBackend, prepare
from mlx_manager.mlx_server.config import (
    EngineLimits,
    MLXServerSettings,
)
from mlx_manager.mlx_server.core import (
    Finished,
    GenerationRequest,
    JsonObject,
    StopRules,
    Tokens,
)
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.errors import (
    InvalidRequest,
    ModelLoadFailed,
    ModelNotFound,
    ModelNotSupported,
    ModelTooLarge,
    OutOfMemory,
)
from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.models import loads as loads_module
from mlx_manager.mlx_server.models import pool as pool_module
from mlx_manager.mlx_server.models.loading.load import LoadedModel
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.services.inference import rows
from mlx_manager.mlx_server.text.grammar import matchers as grammar
from mlx_manager.mlx_server.utils import memory
from mlx_manager.mlx_server.utils.memory import Ledger, clear_cache
from mlx_manager.mlx_server.utils.pressure import Pressure
from mlx_manager.mlx_server.utils.progress import Doing
from mlx_manager.mlx_server.utils.text import sized
from mlx_manager.mlx_server.workers import model as worker_model
from mlx_manager.mlx_server.workers.messages import Granted, Need


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


async def until_loading(pool: ModelPoolManager, name: str) -> None:
    while (await states(pool))[name] != "loading":  # noqa: ASYNC110 the pool tells nobody
        await asyncio.sleep(0)


async def test_model_answers_and_is_listed_with_its_figures(models_dir: Path):
    async with open_pool(models_dir) as pool:
        assert await states(pool) == {"a": "loadable", "b": "loadable", "c": "loadable"}
        await answer(pool, "b")
        assert await states(pool) == {"a": "loadable", "b": "loaded", "c": "loadable"}
        status = next(status for status in await pool.models() if status.id == "b")
        assert (status.family, status.model_type, status.context_length) == ("llama", "llama", 2048)
        assert status.weights is not None
        assert status.weights.dtype == "float32"
        await pool.look()
        figures = pool.figures()
        assert figures["ledger"]["weights:b"] == status.nbytes
        assert list(figures["engines"]) == ["b"]
        assert figures["mlx"]["active"] >= status.nbytes


async def test_many_requests_for_one_model_load_it_once(models_dir: Path, caplog):
    async with open_pool(models_dir) as pool:
        with caplog.at_level("INFO"):
            answers = await asyncio.gather(*(answer(pool, "a") for _ in range(8)))
        assert len(set(answers)) == 1
        assert sum("is loaded" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("name", [None, "", "default"])
async def test_no_name_means_the_default_model(models_dir: Path, name: str | None):
    async with open_pool(models_dir, default="c") as pool:
        assert (await pool.get_model(name)).id == str(models_dir / "c")


async def test_least_recently_used_idle_model_makes_place(models_dir: Path):
    async with open_pool(models_dir, max_models=2) as pool:
        for name in ("a", "b", "a", "c"):
            await pool.get_model(name)
        assert await states(pool) == {"a": "loaded", "b": "loadable", "c": "loaded"}
        assert list(pool.workers()) == ["a", "c"]
        assert not await taken(pool, "b")


async def test_model_in_use_is_never_evicted_and_who_waits_gets_its_place(models_dir: Path):
    async with open_pool(models_dir, max_models=1) as pool:
        async with pool.lease("a"):
            waiting = asyncio.create_task(pool.get_model("b"))
            await until_loading(pool, "b")
            with pytest.raises(InvalidRequest, match="a is answering"):
                await pool.unload("a")
            assert (await states(pool))["a"] == "loaded"
            assert not waiting.done()
        assert (await waiting).id == "b"
        assert await states(pool) == {"a": "loadable", "b": "loaded", "c": "loadable"}


async def test_waiting_for_place_ends_with_the_numbers(models_dir: Path):
    async with open_pool(models_dir, max_models=1, patience=0.0) as pool, pool.lease("a"):
        with pytest.raises(
            OutOfMemory, match="1 models are loaded, 1 in use and 0 pinned"
        ) as refusal:
            await pool.get_model("b")
        assert refusal.value.retry_after


async def test_eviction_by_bytes(models_dir: Path):
    async with open_pool(models_dir) as pool:
        size = (await pool.get_model("a")).facts.nbytes
        needed = await taken(pool, "a")
    async with open_pool(models_dir, memory_limit=int(2.5 * needed), patience=0.0) as pool:
        for name in "abc":
            await pool.get_model(name)
        assert await states(pool) == {"a": "loadable", "b": "loaded", "c": "loaded"}
        async with pool.lease("b"), pool.lease("c"):
            with pytest.raises(
                OutOfMemory, match=r"[\d.,]+ \w+, and [\d.,]+ \w+ of [\d.,]+ \w+ are left"
            ):
                await pool.get_model("a")
    async with open_pool(models_dir, memory_limit=size // 2) as pool:
        with pytest.raises(ModelTooLarge, match=f"memory limit is {sized(size // 2)}"):
            await pool.get_model("a")


async def needs_of(models: Path, *names: str) -> list[int]:
    """Return the bytes that each of the models takes."""
    async with open_pool(models) as pool:
        for name in names:
            await answer(pool, name)
        return [await taken(pool, name) for name in names]


@pytest.mark.parametrize("max_models", [2, 8])
async def test_no_idle_model_goes_for_one_that_does_not_fit_beside_those_in_use(
    tmp_path: Path, max_models: int
):
    for name in ("a", "b"):
        make_tiny_model(tmp_path / name)
    size = (make_tiny_model(tmp_path / "c", vocab_size=30_000) / "model.safetensors").stat().st_size
    async with open_pool(tmp_path, max_models=max_models, patience=0.0) as pool:
        for name in ("b", "a"):
            await answer(pool, name)
        async with pool.lease("a"):
            pool.grants.limit -= pool.grants.available() + await taken(pool, "b") - size // 2
            with pytest.raises(OutOfMemory, match="are left beside the models in use"):
                await pool.get_model("c")
            assert await states(pool) == {"a": "loaded", "b": "loaded", "c": "loadable"}


async def test_no_idle_model_goes_for_one_whose_steps_have_no_memory(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    def greedy(
        loaded: LoadedModel, thread: MLXThread, limits: EngineLimits, ledger: Ledger, **_: object
    ) -> TextBackend:
        chunk = 10**6 if loaded.id == "b" else None
        return prepare(loaded, thread, replace(limits, prefill_chunk=chunk), ledger)

    monkeypatch.setattr(worker_model, "prepare", greedy)
    async with open_pool(models_dir, memory_limit=2 * 10**8, patience=0.0) as pool:
        await pool.get_model("a")
        with pytest.raises(OutOfMemory, match=r"A step of b works on up to [\d.,]+ \w+"):
            await pool.get_model("b")
        assert await states(pool) == {"a": "loaded", "b": "loadable", "c": "loadable"}


async def test_no_idle_model_goes_for_weights_that_leave_their_steps_no_memory(tmp_path: Path):
    for name in "ab":
        make_tiny_model(tmp_path / name)
    make_tiny_model(tmp_path / "c", vocab_size=30_000)
    least, more = await needs_of(tmp_path, "a", "c")
    said = r"of c and what its steps work on take [\d.,]+ \w+"
    async with open_pool(tmp_path, patience=0.0, memory_limit=(least + more) // 2) as pool:
        await answer(pool, "a")
        with pytest.raises(ModelTooLarge, match=said):
            await pool.get_model("c")
        assert await states(pool) == {"a": "loaded", "b": "loadable", "c": "loadable"}
    limit = 2 * least + (more - least) // 2
    async with open_pool(tmp_path, patience=0.0, memory_limit=limit) as pool:
        for name in "ab":
            await answer(pool, name)
        async with pool.lease("a"):
            with pytest.raises(OutOfMemory, match=said):
                await pool.get_model("c")
        assert await states(pool) == {"a": "loaded", "b": "loaded", "c": "loadable"}


async def test_the_log_tells_what_memory_starts_loads_and_unloads_leave(
    models_dir: Path, caplog: pytest.LogCaptureFixture
):
    memory_now = r"; memory: \d+\.\d\d GB active, \d+\.\d\d GB peak, \d+\.\d\d GB cache"
    with caplog.at_level("INFO", loads_module.log.name):
        async with open_pool(models_dir) as pool:
            nbytes = (await pool.get_model("b")).facts.nbytes
            await pool.unload("b")
    started, loaded, unloaded = (record for record in caplog.records if "memory" in record.message)
    assert re.fullmatch("ready to load models" + memory_now, started.message)
    weights = r"b is loaded in \d+\.\d s: \d+\.\d\d GB of weights, \w+ \(.*\)"
    assert re.fullmatch(weights + memory_now, loaded.message)
    assert re.fullmatch(r"b is unloaded: \d\.\d\d GB are free again" + memory_now, unloaded.message)
    assert (loaded.facts["model"], loaded.facts["weights_bytes"]) == ("b", nbytes)
    assert loaded.facts["memory_active_bytes"] >= nbytes + unloaded.facts["memory_active_bytes"]
    assert loaded.facts["seconds"] > 0


async def two_models(pool: ModelPoolManager, here: Here, left: int) -> None:
    """Load a, which has so many bytes left, and b, which has none."""
    for name in "ba":
        await pool.get_model(name)
    pool.grants.limit -= pool.grants.free()
    await lose(here.models["b"], 0)
    await lose(here.models["a"], left)


async def test_a_model_that_goes_for_the_pages_of_another_is_out_of_memory_at_once(
    models_dir: Path, caplog: pytest.LogCaptureFixture
):
    async with open_pool(models_dir, start=(here := Here())) as pool:
        # There is room for the pages of one of two prompts.
        await two_models(pool, here, 70 * 8192)
        prompts = [Tokens(tuple(range(first, 200)) * 5) for first in (3, 5)]
        async with pool.lease("a") as lease:
            asked = [GenerationRequest("a", prompt, max_tokens=2) for prompt in prompts]
            await rows(lease.backend, asked, lambda row, events, tokens: None)
        assert await states(pool) == {"a": "loaded", "b": "loadable", "c": "loadable"}
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == []


@pytest.mark.parametrize(("used", "tokens"), [("prompt", 985), ("answer", 200)])
async def test_a_request_gets_the_room_of_idle_models_before_it_is_refused_or_cut(
    models_dir: Path, used: str, tokens: int
):
    async with open_pool(models_dir, start=(here := Here())) as pool:
        await two_models(pool, here, 20 * 8192)
        prompt = Tokens(tuple(range(3, 200)) * 5)
        asked = GenerationRequest(
            "a",
            Tokens(prompt.ids[:tokens]),
            GREEDY,
            StopRules(ignore_eos=True),
            max_tokens=2 if used == "prompt" else 500,
        )
        async with pool.lease("a") as lease:
            events = [event async for step in events_of(lease.backend, asked) for event in step]
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.completion_tokens == asked.max_tokens
        assert await states(pool) == {"a": "loaded", "b": "loadable", "c": "loadable"}


async def test_a_request_that_is_too_much_for_idle_models_to_go_is_refused_and_they_stay(
    models_dir: Path,
):
    async with open_pool(models_dir, start=(here := Here())) as pool:
        await two_models(pool, here, 20 * 8192)
        await pool.pin("b", pinned=True)
        asked = GenerationRequest("a", Tokens(tuple(range(3, 200)) * 5), max_tokens=2)
        async with pool.lease("a") as lease:
            with pytest.raises(OutOfMemory, match="985 tokens"):
                await anext(events_of(lease.backend, asked))
        assert (await states(pool))["b"] == "loaded"


async def test_a_model_alone_has_all_memory_and_gives_back_what_it_does_not_use(models_dir: Path):
    async with open_pool(models_dir, memory_limit=10**9, start=(here := Here())) as pool:
        await answer(pool, "a")
        assert here.models["a"].ledger.limit == 10**9
        await answer(pool, "b")
        limits = [here.models[name].ledger.limit for name in "ab"]
        assert sum(limits) <= 10**9
        assert min(limits) > 10**9 // 4
        assert await states(pool) == {"a": "loaded", "b": "loaded", "c": "loadable"}
        await pool.unload("a")
        assert pool.grants.available() >= 10**9 - await taken(pool, "b")


async def test_prompts_kept_for_reuse_go_before_idle_models(models_dir: Path):
    async with open_pool(models_dir, start=(here := Here())) as pool:
        await answer(pool, "b", tokens=200)
        await two_models(pool, here, 8192)
        await pool.look()
        assert pool.figures()["engines"]["b"]["pages_cached"]
        asked = GenerationRequest("a", Tokens(tuple(range(3, 100))), GREEDY, max_tokens=2)
        async with pool.lease("a") as lease:
            async for _ in events_of(lease.backend, asked):
                pass
        await pool.look()
        assert not pool.figures()["engines"]["b"]["pages_cached"]
        assert await states(pool) == {"a": "loaded", "b": "loaded", "c": "loadable"}


async def test_memory_is_back_after_unloading(models_dir: Path):
    async with open_pool(models_dir) as pool:
        # What other tests have left would go in the middle of this one.
        gc.collect()
        clear_cache()
        before = mx.get_active_memory()
        await answer(pool, "a")
        assert mx.get_active_memory() > before
        await pool.unload("a")
        await pool.unload("a")
        await given_back(before)
        assert pool.grants.free() == pool.grants.limit


async def test_unknown_model_is_an_error_that_names_what_is_offered(models_dir: Path):
    async with open_pool(models_dir) as pool:
        for name in ("nope", "../a", "a/../b", str(models_dir / "b")):
            with pytest.raises(ModelNotFound, match=r"Offered: .*, a, b, c\."):
                await pool.get_model(name)


async def test_failed_load_gives_its_reason_and_memory_back_and_the_pool_lives(tmp_path: Path):
    make_tiny_model(tmp_path / "good")
    broken = make_tiny_model(tmp_path / "broken") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    make_tiny_model(tmp_path / "contradictory")
    config = tmp_path / "contradictory" / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 128'))
    make_tiny_model(tmp_path / "exotic")
    config = tmp_path / "exotic" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"xyzformer"'))
    async with open_pool(tmp_path, default="good") as pool:
        before = mx.get_active_memory()
        with pytest.raises(ModelLoadFailed, match=r"model.safetensors is truncated") as truncated:
            await pool.get_model("broken")
        with pytest.raises(ModelLoadFailed, match="contradictory can't be loaded") as contradictory:
            await pool.get_model("contradictory")
        with pytest.raises(ModelNotSupported, match="'xyzformer' model"):
            await pool.get_model("exotic")
        assert truncated.value.status == contradictory.value.status == 400
        await given_back(before)
        assert await answer(pool, "good")
        await pool.look()
        assert list(pool.figures()["engines"]) == ["good"]


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("make", "damage", "message"),
    [
        (make_tiny_model, truncate, r"model.safetensors is truncated"),
        (make_tiny_encoder, truncate, r"model.safetensors is truncated"),
        (make_tiny_model, overwrite("tokenizer.json", "{}"), "broken can't be loaded"),
        (make_tiny_encoder, overwrite("tokenizer.json", "{}"), "broken can't be loaded"),
        (make_tiny_encoder, overwrite("modules.json", "{}"), r"modules.json is not a list"),
        (partial(make_tiny_encoder, reranker=True, num_labels=1, id2label={"0": "A", "1": "B"}), lambda _: None, "of 2 labels"),
    ],
    ids=["text", "encoder", "its tokenizer", "an encoder's", "its modules", "a classifier"],
)  # fmt: skip
@pytest.mark.parametrize("short_of", ["places", "bytes"])
async def test_no_model_goes_for_one_whose_files_are_broken(
    tmp_path: Path,
    make: Callable[[Path], Path],
    damage: Callable[[Path], None],
    message: str,
    short_of: str,
):
    make_tiny_model(tmp_path / "good")
    damage(make(tmp_path / "broken"))
    limits: dict[str, int] = {"max_models": 1}
    if short_of == "bytes":
        async with open_pool(tmp_path, default="good") as pool:
            await answer(pool, "good")
            limits = {"memory_limit": await taken(pool, "good")}
    async with open_pool(tmp_path, default="good", **limits) as pool:
        await answer(pool, "good")
        with pytest.raises((ModelLoadFailed, ModelNotSupported), match=message):
            await pool.get_model("broken")
        assert (await pool.status("good")).state == "loaded"


async def test_nobody_waits_for_room_for_a_model_whose_files_are_broken(tmp_path: Path):
    for name in ("good", "broken"):
        make_tiny_model(tmp_path / name)
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    async with (
        open_pool(tmp_path, default="good", max_models=1) as pool,
        pool.lease("good"),
        asyncio.timeout(30),
    ):
        with pytest.raises(ModelLoadFailed, match="is not a safetensors file"):
            await pool.get_model("broken")


async def test_model_whose_backend_fails_leaves_nothing_behind(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    def without_pages(*_: Any, **__: Any) -> TextBackend:
        raise OutOfMemory("no pages")

    monkeypatch.setattr(worker_model, "prepare", without_pages)
    async with open_pool(models_dir) as pool:
        before = mx.get_active_memory()
        with pytest.raises(OutOfMemory, match="no pages"):
            await pool.get_model("b")
        await given_back(before)
        await until(lambda: pool.grants.free() == pool.grants.limit)


def as_on_a_gpu(*arguments: Any, **named: Any) -> TextBackend:
    """Prepare with kernels for which portable ones stand in."""
    return prepare(*arguments, partial(choose, kernels=Portable, compile=plainly), **named)


@pytest.mark.parametrize(
    "place",
    [
        "it is run as it is",
        "a way to run it is compared (1 ",
        "kernels of step 2 are checked (5 ",
        "its steps are compiled (3 ",
        "kernels that draw",
        "its pages are made",
    ],
)
async def test_a_load_that_fails_midway_leaves_nothing_behind(
    place: str, models_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    failing = True

    def prepare_up_to(*arguments: Any, doing: Doing, **named: Any) -> TextBackend:
        def tell(said: str) -> None:
            if failing and said.startswith(place):
                raise ModelLoadFailed("that was enough")
            doing(said)

        return as_on_a_gpu(*arguments, doing=tell, **named)

    monkeypatch.setattr(worker_model, "prepare", prepare_up_to)
    async with open_pool(models_dir) as pool:
        clear_cache()
        before = mx.get_active_memory()
        with pytest.raises(ModelLoadFailed, match="that was enough"):
            await pool.get_model("b")
        gc.collect()
        await given_back(before)
        await until(lambda: pool.grants.free() == pool.grants.limit)
        assert (await states(pool))["b"] == "loadable"
        failing = False
        assert await answer(pool, "b")


async def test_a_device_that_others_have_filled_is_no_fault_of_the_model(
    models_dir: Path, mlx_limit: int, monkeypatch
) -> None:
    full, limit = True, 10**9

    def prepare_if_there_is_room(*arguments: Any, **named: Any) -> TextBackend:
        if full:
            raise RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory")
        return prepare(*arguments, **named)

    others = memory.device_memory() - limit // 2 - memory.HEADROOM
    monkeypatch.setattr(memory, "taken_by_others", lambda: others)
    monkeypatch.setattr(worker_model, "prepare", prepare_if_there_is_room)
    async with open_pool(models_dir, memory_limit=limit) as pool:
        with pytest.raises(OutOfMemory, match=f"models get {sized(limit // 2)} now"):
            await pool.get_model("b")
        assert pool.grants.limit == limit // 2
        full = False
        assert await answer(pool, "b")


async def test_running_stream_goes_on_while_another_model_loads(models_dir: Path):
    async with open_pool(models_dir) as pool:
        alone = await answer(pool, "a", tokens=64)
        running = asyncio.create_task(answer(pool, "a", tokens=64))
        await pool.get_model("b")
        assert await running == alone


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.01)


async def test_what_the_first_request_for_json_needs_is_made_ahead(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []
    vocabulary = grammar.vocabulary

    def noting(*arguments: Any) -> LLTokenizer:
        made.append("vocabulary")
        return vocabulary(*arguments)

    monkeypatch.setattr(grammar, "vocabulary", noting)
    async with open_pool(models_dir) as pool:
        await pool.get_model("a")
        assert made == ["vocabulary"]
        async with pool.lease("a") as lease:
            asked = replace(request("a"), constraint=JsonObject())
            async for _ in events_of(lease.backend, asked):
                pass
    assert made == ["vocabulary"]


async def test_requester_who_gives_up_does_not_stop_the_load_for_others(models_dir: Path):
    async with open_pool(models_dir) as pool:
        impatient = asyncio.create_task(pool.get_model("a"))
        patient = asyncio.create_task(pool.get_model("a"))
        await until_loading(pool, "a")
        impatient.cancel()
        assert (await patient).id == "a"
        with pytest.raises(asyncio.CancelledError):
            await impatient


class Elsewhere:
    """Needs all memory there is, again and again, save what it can never have."""

    def __init__(self) -> None:
        self.told = 0

    def send(self, message: object) -> None:
        self.told += isinstance(message, Granted)


async def test_a_model_stays_until_those_who_waited_for_its_load_have_had_it(models_dir: Path):
    async with open_pool(models_dir, memory_limit=10**9) as pool:
        other, over = Elsewhere(), threading.Event()
        pool.grants.enter(other)

        def need_all() -> None:
            while not over.is_set():
                if pool.grants.available() < 10**9:
                    pool.grants.heard(other, Need(10**9, urgent=True))

        needing = threading.Thread(target=need_all)
        needing.start()
        assert await answer(pool, "a")
        over.set()
        needing.join()
        assert pool.figures()["loads"]["a"] == 1
        assert other.told


async def test_closing_while_loading_and_while_in_use_frees_everything(models_dir: Path):
    clear_cache()
    before = mx.get_active_memory()
    async with open_pool(models_dir) as pool:
        in_use = await pool.lease("a").__aenter__()
        loading = asyncio.create_task(pool.get_model("b"))
        await until_loading(pool, "b")
        del in_use
    with pytest.raises(asyncio.CancelledError):
        await loading
    await given_back(before)


async def test_a_name_that_fits_an_aliass_pattern_means_what_it_stands_for(models_dir: Path):
    async with open_pool(models_dir, aliases="claude-b*=b, claude-*=c,gpt=a") as pool:
        for name, meant in (
            ("claude-big", "b"),
            ("claude-x", "c"),
            ("gpt", "a"),
            ("gpt-4", "gpt-4"),
        ):
            assert pool.resolve(name) == meant
        assert pool.resolve("") == pool.resolve(None) == str(models_dir / "a")
        async with pool.lease("claude-x") as lease:
            assert lease.id == "c"


async def test_what_is_on_offer_or_loaded_is_meant_by_its_own_name_whatever_alias_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for name in "abc":
        make_tiny_model(tmp_path / name)
    async with open_pool(tmp_path, aliases="x=a,a=b,*=c") as pool:
        for name, meant in (("a", "a"), ("b", "b"), ("x", "a"), (None, str(tmp_path / "a"))):
            async with pool.lease(name) as lease:
                assert lease.id == pool.resolve(name) == meant
        shutil.rmtree(tmp_path / "b")
        pool.catalog.rescan()
        assert "b" in {status.id for status in await pool.models()}
        assert pool.resolve("b") == "b"
        await pool.unload("b")
        await pool.models()
        assert pool.resolve("b") == "c"
        async with tended(pool):
            said = "'a' is no alias of 'b': it is on offer itself"
            await until(lambda: said in caplog.messages)


async def test_a_model_that_comes_later_is_soon_meant_by_its_own_name(tmp_path: Path):
    for name in "ab":
        make_tiny_model(tmp_path / name)
    async with open_pool(tmp_path, aliases="new-*=a") as pool:
        assert pool.resolve("new-b") == "a"
        (tmp_path / "b").rename(tmp_path / "new-b")
        pool.catalog.rescan()
        await until(lambda: pool.resolve("new-b") == "new-b")


async def test_an_alias_may_stand_for_another_and_one_that_stands_for_itself_for_nothing(
    models_dir: Path,
):
    async with open_pool(models_dir, aliases="x=y,y=b,p=q,q=p,z-*=z-1,w=nope") as pool:
        for name, meant in (("x", "b"), ("p", "p"), ("q", "q"), ("z-2", "z-1"), ("w", "nope")):
            assert pool.resolve(name) == pool.resolve(pool.resolve(name)) == meant
        async with pool.lease("x") as lease:
            assert lease.id == "b"
        for name in ("p", "z-2", "w"):
            with pytest.raises(ModelNotFound, match=f"no model '{pool.resolve(name)}'"):
                await pool.get_model(name)


@pytest.mark.parametrize("aliases", ["a", "=b", "a=", "a=b,c"])
def test_an_alias_that_names_nothing_is_refused(aliases: str):
    with pytest.raises(ValidationError, match="NAME=MODEL"):
        MLXServerSettings(model_aliases=aliases)


@pytest.fixture
def wired(monkeypatch) -> list[int]:
    """Return the amounts that a Mac was told to keep in memory."""
    told: list[int] = []
    monkeypatch.setattr(worker_model, "wire", told.append)
    return told


async def test_weights_are_kept_in_memory_for_an_owner_who_wants_that_alone(
    models_dir: Path, wired: list[int]
):
    async with open_pool(models_dir, wire_weights=True) as pool:
        one = (await pool.get_model("a")).facts.nbytes
        other = (await pool.get_model("b")).facts.nbytes
        assert wired == [one, other]
    wired.clear()
    async with open_pool(models_dir) as pool:
        await pool.get_model("a")
    assert not wired


@pytest.fixture
def pressures(monkeypatch: pytest.MonkeyPatch) -> list[Pressure]:
    """The memory pressure that macOS reports, the last one set."""
    told = [Pressure.NORMAL]
    monkeypatch.setattr(loads_module, "PressureGauge", lambda: lambda: told[-1])
    return told


async def test_no_model_is_loaded_where_macos_is_about_to_end_programs(
    models_dir: Path, pressures: list[Pressure]
):
    async with open_pool(models_dir) as pool:
        pressures.append(Pressure.CRITICAL)
        with pytest.raises(OutOfMemory, match="critically short of memory"):
            await pool.get_model("a")
        pressures.append(Pressure.NORMAL)
        await answer(pool, "a")


async def test_what_is_kept_for_reuse_goes_where_other_programs_want_memory_and_nobody_asks(
    models_dir: Path, monkeypatch, pressures: list[Pressure]
):
    monkeypatch.setattr(pool_module, "is_told", lambda: True)
    monkeypatch.setattr(pool_module, "LOOK_AT_MEMORY", 0.01)

    async def cached(pool: ModelPoolManager) -> int:
        await pool.look()
        pages: int = pool.figures()["engines"]["a"]["pages_cached"]
        return pages

    async with open_pool(models_dir) as pool, tended(pool):
        await answer(pool, "a", tokens=40)
        assert await cached(pool)
        pressures.append(Pressure.WARNING)
        while await cached(pool):  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.01)

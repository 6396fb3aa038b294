from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from mlx_manager.mlx_server.config import MLXServerSettings, ResponseLimits
from mlx_manager.mlx_server.core import Progress
from mlx_manager.mlx_server.errors import MLXManagerError, ResponseNotFound, StorageFailed
from mlx_manager.mlx_server.services.response_store import (
    INDEX,
    TABLE,
    ResponseStore,
    StoredResponse,
    saving,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def stored(name: str, previous: str | None = None, size: int = 0) -> StoredResponse:
    response = {
        "id": name,
        "previous_response_id": previous,
        "output": [f"{name}-out" + "x" * size],
    }
    return StoredResponse(response, [f"{name}-in"])  # type: ignore[list-item]


async def ids(store: ResponseStore, *names: str) -> list[str]:
    found = []
    for name in names:
        with suppress(ResponseNotFound):
            found.append((await store.find(name)).id)
    return found


async def test_what_is_saved_is_found_until_it_is_deleted():
    store = ResponseStore(ResponseLimits())
    await store.save(stored("a"))
    assert await store.find("a") == stored("a")
    await store.delete("a")
    for missing in (store.find("a"), store.delete("a"), store.history("a")):
        with pytest.raises(ResponseNotFound, match="'a'"):
            await missing
    store.close()


async def test_a_history_is_the_whole_conversation_in_order():
    store = ResponseStore(ResponseLimits())
    for name, previous in (("a", None), ("b", "a"), ("x", "a"), ("c", "b")):
        await store.save(stored(name, previous))
    assert await store.history("c") == ["a-in", "a-out", "b-in", "b-out", "c-in", "c-out"]
    await store.delete("a")
    with pytest.raises(ResponseNotFound, match="all that it goes on from"):
        await store.history("c")
    store.close()


async def test_what_nobody_used_for_long_goes_and_use_keeps_what_came_before():
    clock = Clock()
    store = ResponseStore(ResponseLimits(max_age=100), clock)
    for name, previous in (("a", None), ("b", "a"), ("x", None)):
        await store.save(stored(name, previous))
    clock.now += 60
    await store.history("b")
    clock.now += 60
    assert await ids(store, "a", "b", "x") == ["a", "b"]
    store.close()


async def test_what_can_not_be_written_is_read_all_the_same():
    clock = Clock()
    store = ResponseStore(ResponseLimits(max_age=100), clock)
    await store.save(stored("old"))
    clock.now += 60
    await store.save(stored("a"))
    await store.save(stored("b", "a"))
    clock.now += 60
    # As on a disk that is full.
    store._database._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StorageFailed):
        await store.save(stored("c", "b"))
    assert await store.find("a") == stored("a")
    assert await store.history("b") == ["a-in", "a-out", "b-in", "b-out"]
    store._database._connection.execute("PRAGMA query_only = OFF")
    assert await ids(store, "old", "a", "b") == ["a", "b"]
    store.close()


async def test_the_least_recently_used_make_place():
    clock = Clock()
    store = ResponseStore(ResponseLimits(max_bytes=3500), clock)
    for name in "abc":
        clock.now += 1
        await store.save(stored(name, size=1000))
    clock.now += 1
    await store.history("a")
    clock.now += 1
    await store.save(stored("d", size=1000))
    assert await ids(store, "a", "b", "c", "d") == ["a", "c", "d"]
    store.close()


async def test_what_is_gone_leaves_its_room_to_others():
    clock = Clock()
    store = ResponseStore(ResponseLimits(max_bytes=3500, max_age=100), clock)
    for name in "abc":
        await store.save(stored(name, size=1000))
    await store.delete("c")
    await store.save(stored("d", size=1000))
    assert await ids(store, "a", "b", "d") == ["a", "b", "d"]
    clock.now += 101
    for name in "efg":
        await store.save(stored(name, size=1000))
    assert await ids(store, "e", "f", "g") == ["e", "f", "g"]
    store.close()


async def test_in_a_file_without_a_total_the_oldest_make_place_too(tmp_path: Path):
    path = tmp_path / "responses.db"
    with closing(sqlite3.connect(path)) as older, older:
        older.execute(TABLE)
        older.execute(INDEX)
        rows = [(name, None, 900.0, 1000, "{}", "[]") for name in "ab"]
        older.executemany("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", rows)
    with closing(ResponseStore(ResponseLimits(path, max_bytes=2500), Clock())) as store:
        await store.save(stored("c", size=1000))
        for name, there in (("a", 0), ("b", 1), ("c", 1)):
            query = "SELECT COUNT(*) FROM responses WHERE id = ?"
            with closing(sqlite3.connect(path)) as reader:
                assert reader.execute(query, (name,)).fetchone() == (there,)


async def test_to_keep_one_more_takes_no_longer_the_more_there_are():
    store = ResponseStore(ResponseLimits(), Clock())
    instructions = 0

    def count() -> int:
        nonlocal instructions
        instructions += 10
        return 0

    store._database._connection.set_progress_handler(count, 10)
    taken = []
    for index in range(1000):
        instructions = 0
        await store.save(stored(f"resp-{index}"))
        taken.append(instructions)
    assert taken[-1] < 2 * taken[10]
    store.close()


async def test_a_file_that_another_program_holds_keeps_only_its_own_waiting(tmp_path: Path):
    path = tmp_path / "responses.db"
    store = ResponseStore(ResponseLimits(path), Clock())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        # More than asyncio has threads.
        saves = [asyncio.create_task(store.save(stored(f"resp-{n}"))) for n in range(40)]
        await asyncio.sleep(0)
        # As chats have their prompts tokenised.
        await asyncio.to_thread(lambda: None)
        assert not any(save.done() for save in saves)
    await asyncio.gather(*saves)
    store.close()


async def test_what_could_not_be_kept_takes_nobodys_place():
    store = ResponseStore(ResponseLimits(max_bytes=3500), Clock())
    await store.save(stored("a", size=1000))
    with pytest.raises(StorageFailed, match="MLX_SERVER_RESPONSE_STORE_MB"):
        await store.save(stored("b", size=4000), "bob")
    assert await ids(store, "a", "b") == ["a"]
    store.close()


async def test_a_file_outlives_the_server(tmp_path: Path):
    limits = ResponseLimits(tmp_path / "responses.db")
    first = ResponseStore(limits)
    await first.save(stored("a"))
    first.close()
    second = ResponseStore(limits)
    assert await second.find("a") == stored("a")
    second.close()


def test_a_file_that_cant_be_used_is_named(tmp_path: Path):
    (tmp_path / "text").write_text("no database at all, " * 100)
    for path in (tmp_path / "text", tmp_path / "nowhere" / "x.db"):
        with pytest.raises(MLXManagerError, match=f"RESPONSE_STORE: {path}"):
            ResponseStore(ResponseLimits(path))


@pytest.mark.parametrize("complete", [True, False])
async def test_only_a_complete_answer_is_saved_and_after_its_last_step(complete: bool):
    seen: list[Any] = []

    async def progress() -> AsyncGenerator[Progress, None]:
        for row in range(3):
            yield [(row, [])]

    async def save() -> None:
        seen.append("saved")

    wrapped = saving(progress(), save)
    async for step in wrapped:
        seen.append(step)
        if not complete:
            await wrapped.aclose()
            break
    assert ("saved" in seen) == complete
    assert seen[-1] == "saved" if complete else True


async def test_a_key_finds_its_own_responses_alone():
    store = ResponseStore(ResponseLimits())
    await store.save(stored("a"), "alice")
    await store.save(stored("b", previous="a"), "alice")
    assert await store.find("a", "alice") == stored("a")
    assert await store.history("b", "alice") == ["a-in", "a-out", "b-in", "b-out"]
    for owner in ("bob", ""):
        for missing in (
            store.find("a", owner),
            store.history("b", owner),
            store.delete("a", owner),
        ):
            with pytest.raises(ResponseNotFound):
                await missing
    await store.delete("a", "alice")
    store.close()


def test_a_file_of_answers_is_for_its_owner_alone_and_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    ResponseStore(MLXServerSettings(response_store="~/answers.db").responses).close()
    assert (tmp_path / "answers.db").stat().st_mode & 0o777 == 0o600


def test_a_file_of_answers_that_cannot_be_made_is_named(tmp_path: Path):
    with pytest.raises(MLXManagerError, match=r"RESPONSE_STORE: .*no/file can't be used: No such"):
        ResponseStore(ResponseLimits(path=tmp_path / "no" / "file"))

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlx_manager.mlx_server.config import MLXServerSettings, ResponseLimits
from mlx_manager.mlx_server.core import TextDelta
from mlx_manager.mlx_server.engine.stream import Steps, steps
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


@pytest.mark.parametrize("jump", [1e9, -1e9])
async def test_a_clock_that_jumps_drops_nothing(tmp_path: Path, jump: float):
    """Neither while the server runs, by its own clock, nor between two of its starts."""
    clock, limits = Clock(), ResponseLimits(path=tmp_path / "kept", max_age=100)
    for name in "ab":
        store = ResponseStore(limits, clock)
        await store.save(stored(name))
        store.close()
        clock.now += jump
    store = ResponseStore(limits, clock)
    assert await ids(store, "a", "b") == ["a", "b"]
    clock.now += 60
    assert await ids(store, "b") == ["b"]
    clock.now += 60
    assert await ids(store, "a", "b") == []
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


def answer(name: str, asked: list[Any], answered: list[Any]) -> StoredResponse:
    response = {"id": name, "previous_response_id": None, "output": answered}
    return StoredResponse(response, asked)


QUESTION = {"id": "q", "text": "?"}
ANSWER = {"id": "a", "text": "!"}


async def test_an_item_is_found_by_its_id_for_as_long_as_its_response_is_kept():
    clock = Clock()
    store = ResponseStore(ResponseLimits(max_age=100), clock)
    await store.save(answer("one", [QUESTION], [ANSWER]))
    await store.save(answer("two", [{"id": "r"}], [{"id": "b"}]))
    assert await store.items(["a", "q", "a", "x"]) == {"a": ANSWER, "q": QUESTION}
    clock.now += 60
    assert await store.items(["a"])
    clock.now += 60
    # It was used, and the other one was not.
    assert await store.items(["a", "b", "r"]) == {"a": ANSWER}
    await store.delete("one")
    assert await store.items(["a", "q"]) == {}
    assert store._database.number("SELECT COUNT(*) FROM items") == 0
    store.close()


async def test_an_item_goes_with_the_response_that_makes_place():
    store = ResponseStore(ResponseLimits(max_bytes=3500), Clock())
    for name in "abcd":
        await store.save(answer(name, [], [{"id": f"of {name}", "text": "x" * 1000}]))
    assert list(await store.items([f"of {name}" for name in "dcba"])) == ["of d", "of c", "of b"]
    store.close()


async def test_an_item_that_is_sent_again_stays_the_one_of_its_own_response():
    store = ResponseStore(ResponseLimits(), Clock())
    await store.save(answer("one", [QUESTION], [ANSWER]))
    await store.save(answer("two", [ANSWER | {"text": "edited"}], [{"id": "b"}]))
    assert await store.items(["a"]) == {"a": ANSWER}
    await store.delete("two")
    assert await store.items(["a", "b"]) == {"a": ANSWER}
    store.close()


async def test_a_key_finds_the_items_of_its_own_responses_alone():
    store = ResponseStore(ResponseLimits(), Clock())
    mine, yours = {"id": "a", "text": "alice's"}, {"id": "a", "text": "bob's"}
    await store.save(answer("one", [], [mine]), "alice")
    await store.save(answer("two", [], [yours]), "bob")
    assert await store.items(["a"], "alice") == {"a": mine}
    assert await store.items(["a"], "bob") == {"a": yours}
    assert await store.items(["a"], "carol") == await store.items(["a"]) == {}
    store.close()


async def test_items_are_read_also_where_their_use_can_not_be_written():
    store = ResponseStore(ResponseLimits(), Clock())
    await store.save(answer("one", [QUESTION], [ANSWER]))
    # As on a disk that is full.
    store._database._connection.execute("PRAGMA query_only = ON")
    assert await store.items(["a"]) == {"a": ANSWER}
    store.close()


async def test_in_a_file_of_an_elder_server_items_are_found_too(tmp_path: Path):
    path = tmp_path / "responses.db"

    def row(name: str, owner: str, output: str) -> tuple[object, ...]:
        response = f'{{"id": "{name}", "previous_response_id": null, "output": {output}}}'
        return f"{owner}{name}", None, 1000.0, 100, response, json.dumps([QUESTION | {"of": name}])

    with closing(sqlite3.connect(path)) as elder, elder:
        elder.execute(TABLE)
        keep = "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)"
        elder.execute(keep, row("one", "bob/", json.dumps([ANSWER])))
        elder.execute(keep, row("two", "", '[{"id": "n", "value": nan}]'))
        elder.execute(keep, row("three", "", json.dumps([{"id": "c"}])))
    with closing(ResponseStore(ResponseLimits(path), Clock())) as store:
        assert await store.items(["a", "q"], "bob") == {"a": ANSWER, "q": QUESTION | {"of": "one"}}
        # What is no JSON to SQLite can be deleted, at least.
        assert await store.items(["n", "c", "q"]) == {
            "c": {"id": "c"},
            "q": QUESTION | {"of": "three"},
        }
        await store.delete("two")
        # The elder one, which knows nothing of items, keeps another beside this one.
        with closing(sqlite3.connect(path)) as elder, elder:
            elder.execute(keep, row("four", "bob/", json.dumps([{"id": "d"}])))
            elder.execute("DELETE FROM responses WHERE id = 'bob/one'")
        assert await store.items(["a", "d"], "bob") == {"d": {"id": "d"}}
    with closing(ResponseStore(ResponseLimits(path), Clock())) as again:
        assert await again.items(["a", "d"], "bob") == {"d": {"id": "d"}}


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

    async def work(inbox: Steps) -> None:
        for letter in "abc":
            inbox.put([(0, [TextDelta(letter)])])
        await inbox.taken()

    async def save() -> None:
        seen.append("saved")

    answer = steps(partial(saving, work, save))
    async for step in answer:
        await asyncio.sleep(0)
        seen.append(step)
        if not complete:
            break
    await answer.aclose()
    assert seen == [[(0, [TextDelta("abc")])], *(["saved"] if complete else [])]


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

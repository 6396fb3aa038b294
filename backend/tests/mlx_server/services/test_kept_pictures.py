from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pictures import picture

from mlx_manager.mlx_server.config import ResponseLimits
from mlx_manager.mlx_server.core import Image
from mlx_manager.mlx_server.errors import ResponseNotFound, StorageFailed
from mlx_manager.mlx_server.services.response_store import ResponseStore, StoredResponse


def image(name: str, size: int = 1000) -> Image:
    return Image(picture()[:20] + name.encode() + bytes(size), name * 8, 12, 8, "input")


def part(shown: Image) -> dict[str, Any]:
    return {"type": "input_image", "image_url": shown, "detail": "auto"}


def item(name: str, *shown: Image) -> dict[str, Any]:
    text = {"type": "input_text", "text": "Look:"}
    content = [text, *map(part, shown)]
    return {"id": f"msg_{name}", "type": "message", "role": "user", "content": content}


def stored(name: str, *items: dict[str, Any], previous: str | None = None) -> StoredResponse:
    return StoredResponse({"id": name, "previous_response_id": previous, "output": []}, list(items))


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as file:
        return int(file.execute("SELECT COUNT(*) FROM images").fetchone()[0])


def shown_in(items: list[dict[str, Any]]) -> list[bytes]:
    return [
        found["image_url"].data
        for each in items
        for found in each["content"]
        if found["type"] == "input_image"
    ]


async def test_pictures_come_back_whole_wherever_they_stood(tmp_path: Path):
    red, blue = image("r"), image("b")
    output = {"id": "o", "type": "function_call_output", "call_id": "c", "output": [part(blue)]}
    shot = {
        "id": "s",
        "type": "computer_call_output",
        "call_id": "d",
        "output": {"type": "computer_screenshot", "image_url": red},
    }
    kept = stored("a", item("1", red, blue, red), output, shot)
    path = tmp_path / "store.db"
    store = ResponseStore(ResponseLimits(path))
    await store.save(kept)
    assert await store.find("a") == kept
    store.close()
    again = ResponseStore(ResponseLimits(path))
    found = await again.find("a")
    assert found == kept
    assert shown_in(found.input[:1]) == [red.data, blue.data, red.data]
    assert (await again.items(["o"]))["o"] == output
    assert await again.history("a") == kept.input
    again.close()


async def test_a_picture_is_stored_once_and_goes_with_the_last_response_that_has_it(tmp_path: Path):
    path = tmp_path / "store.db"
    store = ResponseStore(ResponseLimits(path))
    red = image("r")
    await store.save(stored("a", item("1", red)))
    await store.save(stored("b", item("2", red), previous="a"), "")
    await store.save(stored("a", item("3", red)), "another")
    assert rows(path) == 1
    assert shown_in(await store.history("b")) == [red.data, red.data]
    await store.delete("a")
    await store.delete("b")
    assert rows(path) == 1
    assert shown_in((await store.find("a", "another")).input) == [red.data]
    await store.delete("a", "another")
    assert rows(path) == 0
    store.close()


async def test_pictures_take_no_room_of_the_texts():
    store = ResponseStore(ResponseLimits(max_bytes=2000))
    await store.save(stored("a", item("1", image("r", 500_000))))
    assert shown_in((await store.find("a")).input) == [image("r", 500_000).data]
    store.close()


async def test_the_least_recently_used_responses_with_pictures_make_place_and_texts_stay():
    store = ResponseStore(ResponseLimits(max_image_bytes=2500))
    await store.save(stored("text", item("t")))
    for name in "abc":
        await store.save(stored(name, item(name, image(name))))
    with pytest.raises(ResponseNotFound):
        await store.find("a")
    for name in ("text", "b", "c"):
        assert (await store.find(name)).id == name
    store.close()


async def test_pictures_that_never_fit_take_nobodys_place():
    store = ResponseStore(ResponseLimits(max_image_bytes=2500))
    await store.save(stored("a", item("1", image("a"))))
    with pytest.raises(StorageFailed, match="MLX_SERVER_RESPONSE_STORE_IMAGES_MB"):
        await store.save(stored("b", item("2", image("b", 3000))))
    assert (await store.find("a")).id == "a"
    store.close()


async def test_what_does_not_fit_leaves_no_picture_behind(tmp_path: Path):
    path = tmp_path / "store.db"
    store = ResponseStore(ResponseLimits(path, max_bytes=100))
    with pytest.raises(StorageFailed, match="MLX_SERVER_RESPONSE_STORE_MB"):
        await store.save(stored("b", item("2", image("b"))))
    store.close()
    assert rows(path) == 0


async def test_a_reference_that_a_client_wrote_shows_nobody_elses_picture():
    store = ResponseStore(ResponseLimits())
    await store.save(stored("a", item("1", image("r"))), "one")
    forged = {"type": "input_image", "image_url": {"kept_image": image("r").digest}}
    await store.save(
        stored("b", {"id": "x", "type": "message", "role": "user", "content": [forged]}), "two"
    )
    assert (await store.find("b", "two")).input[0]["content"] == [forged]
    store.close()

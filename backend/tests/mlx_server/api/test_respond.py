from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from mlx_manager.mlx_server.api.respond import BLOCK, LargeResponse


class Caller:
    """The other end of one response."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leaves = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def blocks(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    async def call(self, pieces: Iterator[str]) -> None:
        await LargeResponse(pieces, {"x-a": "b"})({"type": "http"}, self.receive, self.send)


def numbered(count: int, size: int) -> list[str]:
    return [f"{index:ü>{size}}"[-size:] for index in range(count)]


async def test_a_small_body_says_how_long_it_is():
    caller = Caller()
    await caller.call(iter(["[1,", '"ü"]']))
    assert caller.blocks == ['[1,"ü"]'.encode()]
    assert caller.sent[-1]["more_body"] is False
    assert caller.headers == {
        b"content-type": b"application/json",
        b"content-length": b"8",
        b"x-a": b"b",
    }


@pytest.mark.parametrize("size", [1, 1000, BLOCK // 4, BLOCK, 3 * BLOCK])
async def test_a_large_body_comes_whole_in_blocks_of_bounded_size(size: int):
    pieces = numbered(3 * BLOCK // size + 2, size)
    caller = Caller()
    await caller.call(iter(pieces))
    assert b"".join(caller.blocks).decode() == "".join(pieces)
    assert all(0 < len(block.decode()) < BLOCK + size for block in caller.blocks)
    assert [message.get("more_body") for message in caller.sent] == (
        [None] + [True] * (len(caller.blocks) - 1) + [False]
    )
    assert b"content-length" not in caller.headers


async def test_others_have_their_turn_between_the_blocks_of_a_large_body():
    written: list[int] = []
    seen: list[int] = []

    def pieces() -> Iterator[str]:
        for index, piece in enumerate(numbered(20, BLOCK)):
            written.append(index)
            yield piece

    async def look() -> None:
        while len(written) < 20:
            seen.append(len(written))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await Caller().call(pieces())
    await looking
    assert max(after - before for before, after in pairwise(seen)) == 1


async def test_nothing_more_is_written_for_who_has_hung_up():
    caller = Caller()
    written: list[str] = []

    def pieces() -> Iterator[str]:
        for piece in numbered(1000, BLOCK):
            if len(written) == 3:
                caller.leaves.set()
            written.append(piece)
            yield piece

    with pytest.raises(ClientDisconnect):
        await caller.call(pieces())
    assert 3 < len(written) < 20

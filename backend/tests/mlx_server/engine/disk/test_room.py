"""Room for blocks on their way: taken before a block is made, given back when it is gone."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.engine.disk.blocks import PrefixBlock, Tensor
from mlx_manager.mlx_server.engine.disk.names import picture_name
from mlx_manager.mlx_server.engine.disk.room import LEAST, MOST_BYTES, Room, room_of


def opened(limit: int, usual: int = 10) -> Room:
    room = Room()
    room.open(limit, usual)
    return room


def block(memory: NDArray[np.uint8]) -> PrefixBlock:
    return PrefixBlock(picture_name("one"), {"rows.0": Tensor("uint8", memory.shape, memory)})


def test_no_more_is_taken_than_there_is() -> None:
    room = opened(100)
    assert room.take(60)
    assert not room.take(41)
    assert room.take(40)
    room.give(60)
    assert room.has(60)
    assert not room.has(61)


def test_a_block_s_bytes_are_free_again_once_nobody_has_the_block() -> None:
    room = opened(100)
    assert room.take(70)
    memory = room.memory(70)
    kept = [block(memory)]
    room.lend(70, memory, kept[0])
    assert not room.has(50)
    kept.clear()
    assert room.taken == 0


def test_the_next_large_block_gets_the_memory_of_the_last_one() -> None:
    room = opened(100, usual=40)
    seen = []
    for nbytes in (40, 31, 5, 38):
        assert room.take(nbytes)
        memory = room.memory(nbytes)
        assert len(memory) >= nbytes
        seen.append(memory.ctypes.data)
        room.lend(nbytes, memory, block(memory))
    assert seen[0] == seen[1] == seen[3] != seen[2]
    assert room.taken == 0


def test_memory_that_is_kept_makes_room_for_other_blocks() -> None:
    room = opened(100, usual=40)
    assert room.take(40)
    assert room.take(40)
    for memory in [room.memory(40), room.memory(40)]:
        room.lend(40, memory, block(memory))
    del memory
    assert room.take(90)
    assert len(room.memory(90)) == 90
    assert room._kept == []


def test_who_waits_gets_what_is_given_back() -> None:
    room = opened(100)
    got: list[bool] = []
    assert room.take(80)
    waiting = threading.Thread(target=lambda: got.append(room.wait(50, lambda: True)))
    waiting.start()
    room.give(80)
    waiting.join(10)
    assert got == [True]
    assert room.taken == 50


def test_who_is_not_wanted_any_more_waits_no_longer() -> None:
    room, wanted = opened(100), [True]
    assert room.take(80)
    got: list[bool] = []
    waiting = threading.Thread(target=lambda: got.append(room.wait(50, lambda: bool(wanted))))
    waiting.start()
    wanted.clear()
    room.give(0)
    waiting.join(10)
    assert got == [False]
    assert room.taken == 80


def test_large_blocks_get_room_for_fewer() -> None:
    assert room_of(1 << 20) == 6 << 20
    assert room_of(MOST_BYTES // 4) == MOST_BYTES
    assert room_of(MOST_BYTES) == LEAST * MOST_BYTES

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from linux import needs_linux

from mlx_manager.mlx_server.devices.cpu import room
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore, Numbers

pytestmark = [
    needs_linux("memory comes when it is written to"),
    pytest.mark.skipif(not room.is_free(), reason="room takes memory here"),
]
SHAPE = LayerShape(2, 64, 64, mx.float32)


def address(array: mx.array) -> int:
    return int(np.array(array.view(mx.uint8), copy=False).ctypes.data)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_an_array_with_room_is_zeros_whatever_was_there_before(dtype: mx.Dtype) -> None:
    # Freed memory that is no zeros, of several sizes, for whoever asks next.
    mx.eval([mx.full((2, tokens, 64), float("nan")) for tokens in (10, 200, 3000)])
    for tokens in (1, 10, 200, 3000):
        array = room.blank((2, tokens, 64), dtype)
        assert (array.shape, array.dtype) == ((2, tokens, 64), dtype)
        assert bool((array == 0).all())


def test_room_takes_no_memory_until_it_is_written_to() -> None:
    before = resident()
    store = LayerStore(SHAPE, 16)
    store.resize(4, most=1 << 20)
    assert store.bytes_of(1 << 20) == 1 << 34
    for page in (0, 1 << 10, 1 << 19):
        numbers = Numbers(np.arange(16 * page, 16 * page + 16, dtype=np.int32))
        store.write(mx.ones((2, 16, 64)), mx.ones((2, 16, 64)), numbers)
        mx.eval(store.keys, store.values)
    assert resident() - before < 64 << 20


def test_pages_that_there_is_room_for_are_added_without_a_copy() -> None:
    store = LayerStore(SHAPE, 16)
    assert store.resize(4, most=100)
    begin = address(store.keys), address(store.values)
    store.write(mx.ones((2, 64, 64)), mx.ones((2, 64, 64)), slice(0, 64))
    assert not store.resize(60, most=100)
    store.write(mx.ones((2, 16, 64)), mx.ones((2, 16, 64)), slice(16 * 59, 16 * 60))
    mx.eval(store.keys, store.values)
    assert (address(store.keys), address(store.values)) == begin
    assert float(store.keys.sum()) == 2 * 80 * 64
    assert store.room_bytes == store.bytes_of(40)


def test_beyond_its_room_and_for_fewer_pages_a_store_is_copied() -> None:
    store = LayerStore(SHAPE, 16)
    store.resize(4, most=8)
    content = mx.random.normal((2, 64, 64))
    store.write(content, content, slice(0, 64))
    assert store.resize(9, most=20)
    assert mx.array_equal(store.keys[:, :64], content)
    assert not store.keys[:, 64:].any()
    assert store.resize(2, most=20)
    assert mx.array_equal(store.values[:, :32], content[:, :32])
    assert not store.values[:, 32:].any()
    assert store.resize(0)
    assert store.keys.nbytes == store.values.nbytes == store.room_bytes == 0

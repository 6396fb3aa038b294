from __future__ import annotations

import mmap
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.utils.allocator import gives_back, make_blank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems keep what they gave")
PAGE = mmap.PAGESIZE


def test_memory_that_is_given_back_comes_as_zeros_if_that_is_what_is_said() -> None:
    with mmap.mmap(-1, 4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        if gives_back():
            memory.madvise(mmap.MADV_DONTNEED)
            assert memory[:] == bytes(4 * PAGE)


@given(begin=st.integers(0, 3 * PAGE), size=st.integers(0, 3 * PAGE))
def test_just_what_is_named_becomes_zeros(begin: int, size: int) -> None:
    memory = mmap.mmap(-1, 6 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * len(memory))
    with memoryview(memory) as whole, whole[begin : begin + size] as part:
        make_blank(part)
    assert memory[:] == b"x" * begin + bytes(size) + b"x" * (6 * PAGE - begin - size)

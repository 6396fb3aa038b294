from __future__ import annotations

import mmap
import os
import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st
from linux import needs_linux

from mlx_manager.mlx_server.devices.cpu.allocator import (
    PARALLEL_TOKENIZERS,
    gives_back,
    keep_freed_memory,
    make_blank,
)

pytestmark = needs_linux("other systems keep what they gave")
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.parametrize(("said", "then"), [(None, "false"), ("true", "true")])
def test_texts_become_tokens_in_turn_unless_the_owner_says_otherwise(
    said: str | None, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set first: that is what is undone afterwards.
    monkeypatch.setenv(PARALLEL_TOKENIZERS, said or "")
    if said is None:
        del os.environ[PARALLEL_TOKENIZERS]
    assert keep_freed_memory()
    assert os.environ[PARALLEL_TOKENIZERS] == then

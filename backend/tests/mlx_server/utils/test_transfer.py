from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.utils.transfer import AT_ONCE, Stretch, Transfer, _read

ON_CUDA = mx.cuda.is_available() and mx.default_device().type == mx.gpu


@given(st.integers(0, 10**12), st.integers(1, 5 * AT_ONCE), st.integers(0, 2**48))
def test_a_stretch_is_the_sum_of_its_pieces(start, nbytes, address):
    whole = Stretch(Path("weights"), start, nbytes, address)
    pieces = list(whole.pieces())
    assert sum(piece.nbytes for piece in pieces) == nbytes
    assert max(piece.nbytes for piece in pieces) <= AT_ONCE
    done = 0
    for piece in pieces:
        assert (piece.file, piece.start, piece.address) == (
            whole.file, start + done, address + done,
        )  # fmt: skip
        done += piece.nbytes


def read_part(file: Path, start: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes + 5)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        _read(descriptor, Stretch(file, start, nbytes, 0), memoryview(buffer))
    finally:
        os.close(descriptor)
    assert buffer[nbytes:] == bytes(5)
    return bytes(buffer[:nbytes])


def test_a_part_of_a_file_is_read_and_nothing_else_touched(tmp_path):
    data = os.urandom(100_000)
    (tmp_path / "weights").write_bytes(data)
    assert read_part(tmp_path / "weights", 1_001, 70_003) == data[1_001:71_004]


def test_a_file_that_ends_early_is_named(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(1_000))
    with pytest.raises(OSError, match=r"weights ends before its byte 1,001"):
        read_part(tmp_path / "weights", 1, 1_000)


@pytest.mark.skipif(ON_CUDA, reason="there is an NVIDIA GPU")
def test_without_a_gpu_it_says_what_is_missing():
    with pytest.raises((OSError, RuntimeError, AttributeError), match=r"libcuda|CUDA"):
        Transfer().open()

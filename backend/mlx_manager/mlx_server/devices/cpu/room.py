"""Arrays of zeros that take memory only where something has been written to them.

So the KV pages of a model can be one array from the start, as large as its memory limit. Growing
the array instead would copy all pages while every request waits: a fresh gigabyte takes a virtual
machine one to three seconds.

Linux gives a process memory on the first write, but MLX writes zeros into every new array. The
exception is an array that MLX reads from a file: the file object fills it. So `Blank` is a file
object that claims to have read without writing anything.
"""

from __future__ import annotations

import io
import math
import resource
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cpu.allocator import gives_back, make_blank

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
# Value of `OVERCOMMIT` with which Linux counts memory that is not written to, too (proc(5)).
STRICT = "2"


def is_free() -> bool:
    """Return whether memory that nothing is written to is free.

    This is so on a CPU, on Linux, unless the owner limits address space or has set `STRICT`
    accounting.
    """
    return (
        mx.default_device() == mx.cpu
        and gives_back()
        and OVERCOMMIT.is_file()
        and OVERCOMMIT.read_text().strip() != STRICT
        and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    )


def blank(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return evaluated zeros that take memory only where they are written to, if `is_free`."""
    *outer, last = shape
    octets: mx.array = mx.load(Blank((*outer, last * dtype.size)), format="npy")  # type: ignore[assignment, arg-type]
    array = octets.view(dtype)
    del octets
    mx.eval(array)
    return array


class Blank(io.RawIOBase):
    """File in numpy's format of zero bytes with this shape; reading them writes to no memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        header = io.BytesIO()
        described = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        self._header = header.getvalue()
        self._place = 0
        self._end = len(self._header) + math.prod(shape)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._end}[whence]
        self._place = start + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]
        if self._place < len(self._header):
            part = self._header[self._place :][: len(into)]
            into[: len(part)] = part
            into = into[len(part) :]
            self._place += len(part)
            return len(part) + (self.readinto(into) if into else 0)
        make_blank(into)
        self._place += len(into)
        return len(into)

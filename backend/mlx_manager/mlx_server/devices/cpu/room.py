"""Arrays of zeros that take memory only where something has been written to them.

So the pages of a model can be one array for ever, as large as the memory that there may be for
them. A larger array for each page more would have to be copied into, while everybody waits: a fresh
gigabyte takes a virtual machine one to three seconds.

Linux gives a process memory when it first writes to it, but MLX writes zeros into every new array.
What it reads from a file it leaves to the file, however; and one that "has been read" without
anything being written is what is wanted here.
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
# Linux then promises no more than it has, whether it is written to or not (proc(5)).
STRICT = "2"


def is_free() -> bool:
    """Whether room that nothing is written to costs nothing: on a CPU, on Linux, unless the owner
    counts what programs ask for."""
    return (
        mx.default_device() == mx.cpu
        and gives_back()
        and OVERCOMMIT.is_file()
        and OVERCOMMIT.read_text().strip() != STRICT
        and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    )


def blank(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Zeros, evaluated, with memory for those alone that are written to. Where `is_free`."""
    *outer, last = shape
    octets: mx.array = mx.load(Blank((*outer, last * dtype.size)), format="npy")  # type: ignore[assignment, arg-type]
    array = octets.view(dtype)
    del octets
    mx.eval(array)
    return array


class Blank(io.RawIOBase):
    """A file of zeros in numpy's format, bytes of this shape, that are there without being read."""

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

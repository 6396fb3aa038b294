"""The C allocator, told to keep what MLX's CPU backend frees.

MLX allocates each result anew and its CPU build keeps no buffer cache. glibc serves anything over
128 KiB with fresh pages from the kernel and returns them at once, so a decode step spends more
time in page faults than in arithmetic: gathering 17 MB of keys took 9.0 ms, and 1.4 ms with this.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import partial

# mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
LARGEST_REUSED = 32 * 2**20  # glibc's own maximum
KEPT = 256 * 2**20
PARALLEL_TOKENIZERS = "TOKENIZERS_PARALLELISM"


def keep_freed_memory() -> bool:
    """Reuse freed memory, up to `KEPT` bytes of it, instead of returning it to the kernel.

    This applies to the whole process and needs glibc. Returns whether it was done. Threads then
    take turns for memory, so the tokenizers library is told to use one thread, unless the owner has
    set `PARALLEL_TOKENIZERS`: two threads that allocate for each word took twice as long as one.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    os.environ.setdefault(PARALLEL_TOKENIZERS, "false")
    # One arena, or what one thread frees would not be there for the next one.
    settings = {_MMAP_THRESHOLD: LARGEST_REUSED, _TRIM_THRESHOLD: KEPT, _ARENA_MAX: 1}
    return all(libc.mallopt(option, value) == 1 for option, value in settings.items())


def gives_back() -> bool:
    """Return whether `make_blank` frees memory and leaves zeros.

    It does not if memory is locked (mlockall(2)), nor on some systems that emulate Linux.
    """
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        page[0] = 1
        try:
            page.madvise(mmap.MADV_DONTNEED)
        except OSError:
            return False
        return page[0] == 0


def make_blank(memory: memoryview) -> None:
    """Fill `memory` with zeros, and free its physical pages where possible.

    Linux frees the pages of private memory and hands out zeros when they are next touched:
    madvise(2), MADV_DONTNEED. Parts that share a system page with other data are written to.
    """
    size = len(memory)
    begin = ctypes.addressof((ctypes.c_char * size).from_buffer(memory))
    first = min(-begin % mmap.PAGESIZE, size)
    whole = (size - first) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = partial(
        ctypes.CDLL(None).madvise, ctypes.c_void_p(begin + first), ctypes.c_size_t(whole)
    )
    # A huge page would take 2 MB for a few bytes, more than the memory accounting expects.
    advise(mmap.MADV_NOHUGEPAGE)
    left = first + whole if advise(mmap.MADV_DONTNEED) == 0 else first
    ctypes.memset(begin, 0, first)
    ctypes.memset(begin + left, 0, size - left)

"""Memory: what the device has, what is in use, and what is promised to whom. Sizes in bytes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.cuda.driver import Driver
from mlx_manager.mlx_server.errors import ModelLoadFailed, OutOfMemory
from mlx_manager.mlx_server.utils.pressure import Pressure, PressureGauge
from mlx_manager.mlx_server.utils.text import sized

CGROUP_ROOT = Path("/sys/fs/cgroup")
LIMIT_SHARE = 0.9
NO_MORE = (
    "out of memory",
    "insufficient memory",
    "[malloc] unable to allocate",
    "[metal::malloc] resource limit",
)
"""Texts, in lower case, in MLX's errors for a device that has no memory left.

Sources: CUDA; Metal's command buffers, `[METAL] Command buffer execution failed: Insufficient
Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)`; MLX's allocator; and its limit of
buffers on Metal, `[metal::malloc] Resource limit (499000) exceeded`
(mlx/backend/metal/device.cpp, allocator.cpp).
"""
HEADROOM = 2**30
"""Bytes that are left to other uses once a device has turned out to be full."""
INTEGRATED = 18
"""Number of CUDA's device attribute that is not 0 if the GPU shares the machine's memory."""

log = logging.getLogger(__name__)


def get_memory_usage() -> dict[str, int]:
    """Return MLX's own bytes: `active`, `peak`, `cache` (freed buffers for reuse) and `limit`."""
    return {
        "active": mx.get_active_memory(),
        "peak": mx.get_peak_memory(),
        "cache": mx.get_cache_memory(),
        "limit": mx.get_memory_limit(),
    }


def set_memory_limit(nbytes: int) -> Callable[[], None]:
    """Tell MLX's allocator to stay under `nbytes`; return a function that restores its old limit.

    On a Mac the allocator also keeps no more than a part of that in freed buffers, since other
    programs need memory, too.
    """
    part = devices.current().cache_part
    before = mx.set_memory_limit(nbytes)
    cache = None if part is None else mx.set_cache_limit(int(part * nbytes))

    def undo() -> None:
        mx.set_memory_limit(before)
        if cache is not None:
            mx.set_cache_limit(cache)

    return undo


def wire(nbytes: int) -> None:
    """Have macOS keep so many bytes of MLX's arrays in memory (0: none); do nothing elsewhere.

    This is only for owners who ask for it: a wired limit has led to panics of Apple's driver
    (ml-explore/mlx#3186).
    """
    if mx.metal.is_available():
        mx.set_wired_limit(min(nbytes, device_memory()))


def _move_limit(nbytes: int) -> None:
    """Raise the limit of MLX's allocator by `nbytes` (lower it, if negative)."""
    mx.set_memory_limit(max(0, mx.get_memory_limit() + nbytes))


def clear_cache() -> None:
    """Give MLX's buffer cache back to the system."""
    mx.clear_cache()


def device_name() -> str:
    """Return the default device with the backend that drives it: `Apple M4 Max (metal)`."""
    return f"{mx.device_info()['device_name']} ({devices.current().kind})"


def device_memory() -> int:
    """Return the memory that the default device can use: Metal's recommended working set, CUDA's
    total memory, or on a CPU the machine's, less where a cgroup allows less."""
    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory"):
        if key in info:
            return int(info[key])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *cgroup_limits(CGROUP_ROOT, Path("/proc/self/cgroup"))])


def default_limit() -> int:
    """Return the memory limit of a server whose owner set none."""
    total, others = device_memory(), taken_by_others()
    if others:
        log.info("of the device's %s, %s are in use already", sized(total), sized(others))
    return max(0, int(LIMIT_SHARE * total) - others)


def taken_by_others() -> int:
    """Return the bytes of an NVIDIA GPU that are neither MLX's nor free: other programs', and
    CUDA's own.

    The result is 0 elsewhere: others may hold a machine's memory for a moment, or as a cache.
    """
    free = mx.device_info().get("free_memory")
    if free is None or _is_the_machine_s():
        return 0
    held = mx.get_active_memory() + mx.get_cache_memory()
    return max(0, device_memory() - int(free) - held)


def shares_memory() -> bool:
    """Return whether the host's copies are in the same memory as the device's arrays: on a CPU, on
    a Mac, and on a GPU without memory of its own."""
    return "free_memory" not in mx.device_info() or _is_the_machine_s()


def _is_the_machine_s() -> bool:
    """Return whether the GPU has no memory of its own; True if that is not known."""
    try:
        return Driver().attribute(INTEGRATED) != 0
    except (OSError, AttributeError, RuntimeError) as error:
        log.debug("it is not known whose memory the GPU has: %s", error)
        return True


def cgroup_limits(root: Path, membership: Path) -> Iterator[int]:
    """Yield the memory limits of this process's cgroup (v1 and v2) and of the cgroups above it.

    membership: `/proc/self/cgroup`. Inside a container its paths may name folders that only the
    host sees; the container's own limit is then at the root.
    """
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        match controllers:
            case "":
                base, name = root, "memory.max"
            case "memory":
                base, name = root / "memory", "memory.limit_in_bytes"
            case _:
                continue
        leaf = base / path.lstrip("/")
        for folder in (leaf, *leaf.parents):
            if folder.is_relative_to(base) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                if text != "max":
                    yield int(text)


class Relief(IntEnum):
    """Sources of memory when the ledger is full, in the order in which they are used."""

    PAGES = 1
    BUFFER_CACHE = 2
    IDLE_MODELS = 3


WORKING = "working:"


def working_line(model_id: str) -> str:
    """Return the name of the ledger's line for the working memory of a model's steps."""
    return f"{WORKING}{model_id}"


class Ledger:
    """Reservations of the memory limit, by line: `lines + MLX's buffer cache <= limit`.

    Lines are named by their holders: `weights:<model>`, `pages:<model>`, `states:<model>` and
    `snapshots:<model>` of recurrent layers, `images:<model>` (pictures' features, and what their
    tower works on), `disk:<model>` (what is on its way to disk and back, where the device has the
    machine's memory), `working:<model>`. The last kind is the working memory of steps, which is in
    the buffer cache between steps. So only the part of the cache beyond these lines counts.
    The MLX thread owns the ledger: only there may `reserve`, `record` and relief run, since relief
    frees arrays. `available` and `figures` may be read from any thread.

    Attributes:
        limit: bytes that may be promised. total: bytes that all models of the machine may have.
        pressure: returns the memory pressure of the machine, whoever causes it.
        more_to_come: waits a moment for bytes that have been asked for elsewhere; False if none
            are on their way.
    """

    def __init__(
        self,
        limit: int,
        cache_bytes: Callable[[], int] = mx.get_cache_memory,
        drop_cache: Callable[[], None] = clear_cache,
        pressure: Callable[[], Pressure] | None = None,
    ) -> None:
        self.limit = self.total = limit
        self.pressure = pressure or PressureGauge()
        self.more_to_come: Callable[[], bool] = lambda: False
        self._cache_bytes = cache_bytes
        self._drop_cache = drop_cache
        self._lines: dict[str, int] = {}
        self._lock = threading.Lock()
        self._relief: list[tuple[Relief, Callable[[int], None], Callable[[], int]]] = []
        self.add_relief(Relief.BUFFER_CACHE, lambda lacking: drop_cache())

    def available(self) -> int:
        """Return the bytes that can be reserved without relief; negative when overdrawn."""
        with self._lock:
            return self.limit - self._taken()

    def _taken(self) -> int:
        return sum(self._lines.values()) + self._excess()

    def _excess(self) -> int:
        """Return the bytes in the buffer cache beyond the working memory of steps."""
        working = sum(n for line, n in self._lines.items() if line.startswith(WORKING))
        return max(0, self._cache_bytes() - working)

    def attainable(self) -> int:
        """Return the bytes that `reserve` could promise with all the relief there is."""
        with self._lock:
            promised = sum(self._lines.values())
        return self.limit - promised + self.relievable()

    def used(self) -> int:
        """Return the bytes that are promised, or in the buffer cache beyond that."""
        with self._lock:
            return self._taken()

    def kept(self) -> int:
        """Return the bytes that are only kept for reuse."""
        return sum(spare() for rank, _, spare in self._relief if rank is Relief.PAGES)

    def extend(self, nbytes: int) -> None:
        """Raise the limit by `nbytes` (lower it, if negative), and MLX's with it."""
        self.limit += nbytes
        _move_limit(nbytes)

    def free(self, nbytes: int) -> None:
        """Free memory that is only kept for reuse until `nbytes` are available."""
        for rank in (Relief.PAGES, Relief.BUFFER_CACHE):
            for release in [release for its, release, _ in self._relief if its is rank]:
                if (lacking := nbytes - self.available()) > 0:
                    release(lacking)

    def spare(self, nbytes: int) -> bool:
        """Return whether `nbytes` are available without relief by pages or models. The buffer cache
        is dropped if that helps."""
        if self.available() < nbytes <= self.available() + self._excess():
            self._drop_cache()
        return self.available() >= nbytes

    def trim(self) -> None:
        """Give the buffer cache back to the system if it is larger than steps need."""
        if self._excess():
            self._drop_cache()

    def reserve(self, line: str, nbytes: int) -> bool:
        """Promise `nbytes` more to `line`; relief is called until they are there.

        Return False, with nothing promised, if they can't be had. Much may then have been freed.
        """
        lacking = self._promise(line, nbytes)
        for rank in Relief:
            # The list has one rank only, so that it keeps no model alive that goes to make room.
            for free in [free for its, free, _ in self._relief if its is rank]:
                if lacking <= 0:
                    return True
                free(lacking)
                lacking = self._promise(line, nbytes)
        return lacking <= 0

    def reserve_if_attainable(self, line: str, nbytes: int) -> bool:
        """Reserve only if it can succeed: a vain attempt would cost others their caches."""
        return nbytes <= self.attainable() and self.reserve(line, nbytes)

    def _promise(self, line: str, nbytes: int) -> int:
        """Enter `nbytes` if there is room. Return the bytes that lack; 0 or less: entered."""
        with self._lock:
            lacking = self._taken() + nbytes - self.limit
            if lacking <= 0:
                self._lines[line] = self._lines.get(line, 0) + nbytes
            return lacking

    def release(self, line: str, nbytes: int) -> None:
        """Take back `nbytes` of the promise to `line`; a line that falls to 0 is removed."""
        with self._lock:
            left = self._lines[line] - nbytes
            if left < 0:
                raise ValueError(f"{line} gives back {nbytes} bytes of {left + nbytes}")
            if left:
                self._lines[line] = left
            else:
                del self._lines[line]

    def record(self, line: str, nbytes: int) -> None:
        """Set `line` to measured bytes, whatever it was promised; 0 removes it."""
        with self._lock:
            self._lines[line] = nbytes
            if not nbytes:
                del self._lines[line]

    def usage(self) -> dict[str, int]:
        """Return `get_memory_usage`."""
        return get_memory_usage()

    def heed(self, error: Exception) -> bool:
        """Lower the limit to the device's memory if `error` says that it was full. Return whether
        it says so.

        Other programs may have come since the limit was set. Memory of MLX's arrays counts as ours:
        the failed work has freed none yet.
        """
        said = str(error).lower()
        if not any(text in said for text in NO_MORE):
            return False
        had = max(0, device_memory() - taken_by_others() - HEADROOM)
        self._drop_cache()
        if had < self.limit:
            log.warning(
                "the device has no more memory: from now on weights and KV pages get %s bytes, not "
                "%s. Other programs use it, too.",
                f"{had:,}",
                f"{self.limit:,}",
            )
            self.total -= self.limit - had
            self.extend(had - self.limit)
        return True

    def add_relief(
        self, rank: Relief, free: Callable[[int], None], spare: Callable[[], int] = int
    ) -> None:
        """Have `free(lacking)` called when bytes lack; `free` must also release them from lines.

        Callbacks run by rank, and within a rank in the order in which they were added. spare:
        returns the bytes of lines that `free` could release now.
        """
        self._relief.append((rank, free, spare))

    def relievable(self, but: Callable[[int], None] | None = None) -> int:
        """Return the bytes of lines that relief could release now, other than by `but`."""
        return sum(spare() for _, free, spare in self._relief if free != but)

    def remove_relief(self, free: Callable[[int], None]) -> None:
        self._relief = [entry for entry in self._relief if entry[1] != free]

    def figures(self) -> dict[str, int]:
        """Return every line, with `buffer_cache` (beyond the working memory of steps), `limit` and
        `available`."""
        with self._lock:
            lines, cache = dict(self._lines), self._excess()
            rest = self.limit - sum(lines.values()) - cache
        return {**lines, "buffer_cache": cache, "limit": self.limit, "available": rest}


@contextmanager
def blaming_the_device(model_id: str, ledger: Ledger) -> Iterator[None]:
    """Turn an error in this context into one about the device if the device was full: the error
    says nothing about the model then.

    Raises:
        OutOfMemory: the device had no more memory.
    """
    try:
        yield None
    except (RuntimeError, ModelLoadFailed) as error:
        if not ledger.heed(error):
            raise
        raise OutOfMemory(
            f"The device has no more memory for {model_id}. Other programs use it, too: of its "
            f"{sized(device_memory())} models get {sized(ledger.total)} now.",
            retry_after=10,
        ) from error

"""Fast matrix products on a Linux CPU.

The `mlx-cpu` wheel carries the reference BLAS, which is tens of times slower than OpenBLAS or MKL.
`load_fast_blas` finds a better one, checks it, and points `libmlx.so`'s imports of `cblas_sgemm`
and its kin at it. Loading a library with RTLD_GLOBAL before `mlx.core` would do for one with those
very names, but the one on the package index (`scipy-openblas32`) prefixes its names.

`MLX_SERVER_BLAS` names a library to use, or `off`. OpenBLAS's own variables are honoured.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mlx_manager.mlx_server.devices.cpu.elf import imported_slots

log = logging.getLogger(__name__)

FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
PREFIXES = ("", "scipy_")
ROW_MAJOR, NO_TRANS, TRANS = 101, 111, 112
HOW_TO_GET_ONE = "pip install scipy-openblas32, or install your system's libopenblas0"


@dataclass(frozen=True, slots=True)
class BlasReport:
    """BLAS library that multiplies MLX's matrices on the CPU.

    name: name of the library. source: file that it comes from. reason: why it was chosen.
    """

    name: str
    source: str
    reason: str


class UnfitBlas(Exception):
    """A library that can't be used as BLAS; the message says why."""


@dataclass(frozen=True, slots=True)
class BlasLibrary:
    """A loaded BLAS with 32-bit integers. Its functions' names begin with `prefix`."""

    path: str
    library: ctypes.CDLL
    prefix: str

    @staticmethod
    def open(path: str) -> BlasLibrary:
        """Load the library at `path`.

        Raises:
            UnfitBlas: it can't be loaded, lacks a function, or takes 64-bit integers.
        """
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise UnfitBlas(str(error)) from error
        for prefix in PREFIXES:
            if all(hasattr(library, prefix + name) for name in FUNCTIONS):
                found = BlasLibrary(path, library, prefix)
                if "USE64BITINT" in found.name():
                    raise UnfitBlas(f"{path} takes 64-bit integers")
                return found
        raise UnfitBlas(f"{path} has no {', '.join(FUNCTIONS)}")

    def name(self) -> str:
        if not hasattr(self.library, f"{self.prefix}openblas_get_config"):
            return Path(self.path).name
        get_config = self.library[f"{self.prefix}openblas_get_config"]
        get_config.restype = ctypes.c_char_p
        config: bytes = get_config()
        return config.decode()

    def address(self, name: str) -> int:
        function = ctypes.cast(self.library[self.prefix + name], ctypes.c_void_p)
        assert function.value is not None
        return function.value

    def set_threads(self, count: int) -> None:
        for name in (f"{self.prefix}openblas_set_num_threads", "MKL_Set_Num_Threads"):
            if hasattr(self.library, name):
                self.library[name](ctypes.c_int(count))

    def product(self, rows: int, inner: int, columns: int) -> Product:
        """`x @ w.T` with x[i, k] = i - k and w[j, k] = j + k, in float32, as MLX asks for it."""
        function = self.library[f"{self.prefix}cblas_sgemm"]
        function.restype = None
        x = (i - k for i in range(rows) for k in range(inner))
        w = (j + k for j in range(columns) for k in range(inner))
        out = (ctypes.c_float * (rows * columns))()
        arguments = (
            *map(ctypes.c_int, (ROW_MAJOR, NO_TRANS, TRANS, rows, columns, inner)),
            ctypes.c_float(1),
            (ctypes.c_float * (rows * inner))(*x),
            ctypes.c_int(inner),
            (ctypes.c_float * (columns * inner))(*w),
            ctypes.c_int(inner),
            ctypes.c_float(0),
            out,
            ctypes.c_int(columns),
        )
        return Product(lambda: function(*arguments), out)


@dataclass(frozen=True, slots=True)
class Product:
    """A product that `compute` writes to `out`, row by row."""

    compute: Callable[[], None]
    out: ctypes.Array[ctypes.c_float]

    def is_right(self, rows: int, inner: int, columns: int) -> bool:
        self.compute()
        places = ((i, j) for i in range(rows) for j in range(columns))
        return list(self.out) == [sum((i - k) * (j + k) for k in range(inner)) for i, j in places]

    def seconds(self) -> float:
        """Return the shortest of five times."""
        times = []
        for _ in range(5):
            start = time.perf_counter()
            self.compute()
            times.append(time.perf_counter() - start)
        return min(times)


@cache
def load_fast_blas() -> BlasReport:
    """Route MLX's CPU products to the best BLAS found; once a process, the same report after that.

    May run before or after `mlx.core` is imported, but before other threads compute.
    """
    report = _fastest()
    log.info("CPU products by %s (%s)", report.name, report.reason)
    return report


def _fastest() -> BlasReport:
    libmlx = _libmlx_with_reference_blas()
    choice = os.environ.get("MLX_SERVER_BLAS", "")
    if libmlx is None:
        system = "Accelerate" if sys.platform == "darwin" else "as built"
        return BlasReport(system, "", "this build of MLX does not carry the reference BLAS")
    if choice == "off":
        return BlasReport("reference BLAS", str(libmlx), "MLX_SERVER_BLAS is off")
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    rejected: list[str] = []
    for path in _candidates(choice):
        try:
            report = _install(BlasLibrary.open(path), libmlx)
        except UnfitBlas as error:
            rejected.append(str(error))
        else:
            return replace(report, reason="; ".join([report.reason, *rejected]))
    return BlasReport(
        "reference BLAS", str(libmlx), "; ".join(rejected or [f"no other found: {HOW_TO_GET_ONE}"])
    )


def _install(blas: BlasLibrary, libmlx: Path) -> BlasReport:
    reference = BlasLibrary(str(libmlx), ctypes.CDLL(str(libmlx)), "")
    if not blas.product(3, 5, 7).is_right(3, 5, 7):
        raise UnfitBlas(f"{blas.path} multiplies wrongly")
    # One thread: on a busy machine the wait for a second one is no property of the library.
    blas.set_threads(1)
    size = (32, 256, 256)
    speedup = reference.product(*size).seconds() / blas.product(*size).seconds()
    if speedup < 1:
        raise UnfitBlas(f"{blas.path} is {1 / speedup:.1f}x slower than the reference BLAS")
    threads = _threads()
    blas.set_threads(threads)
    try:
        slots = imported_slots(libmlx, FUNCTIONS)
        for slot in slots:
            slot.point_to(blas.address(slot.name))
    except OSError as error:
        raise UnfitBlas(str(error)) from error
    if not slots:
        raise UnfitBlas(f"{libmlx} does not import {FUNCTIONS[0]} in a way known here")
    return BlasReport(
        blas.name(),
        blas.path,
        f"{speedup:.0f}x the reference BLAS on one thread, uses {threads}",
    )


def _libmlx_with_reference_blas() -> Path | None:
    try:
        importlib.metadata.distribution("mlx-cpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    return file_of_package("mlx", "lib/libmlx.so") if sys.platform == "linux" else None


def _candidates(choice: str) -> Iterator[str]:
    """Yield paths to try: the owner's, the wheel that our extra pins (tested), the system's."""
    if choice:
        yield choice
    wheel = file_of_package("scipy_openblas32", "lib/libscipy_openblas.so")
    if wheel is not None:
        yield str(wheel)
    for name in ("openblas", "mkl_rt"):
        found = ctypes.util.find_library(name)
        if found is not None:
            yield found
    mkl = Path(sys.prefix) / "lib" / "libmkl_rt.so.2"
    if mkl.exists():
        yield str(mkl)


def file_of_package(package: str, relative: str) -> Path | None:
    """Return the path of a file of an installed package; None if there is no such file.

    The package need not be imported.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return None
    paths = (Path(folder) / relative for folder in spec.submodule_search_locations)
    return next((path for path in paths if path.exists()), None)


def _threads() -> int:
    """Return the BLAS threads: the owner's setting, or all cores but two for the server's rest.

    Measured on two cores: a second thread takes a third to a half off a product while nobody else
    computes, and while somebody does, products wait for the preempted one and take ten times as
    long. So workers never outnumber the idle cores, and sleep at once (`OPENBLAS_THREAD_TIMEOUT`)
    where OpenBLAS lets them spin.
    """
    named = (os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
    chosen = next((int(count) for count in named if count and count.isdigit()), 0)
    return chosen or max(1, available_cores() - 2)


def available_cores() -> int:
    """Return how many physical cores this process may use, by affinity and cgroup quota."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = set()
    for cpu in cpus:
        siblings = Path(topology.format(cpu))
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    quota = Path("/sys/fs/cgroup/cpu.max")
    share = quota.read_text().split() if quota.exists() else ["max", "100000"]
    allowed = len(cores) if share[0] == "max" else -(-int(share[0]) // int(share[1]))
    return max(1, min(len(cores), allowed))

"""Environment variables for MLX: recording of steps (CUDA), and folders of compiled kernels (CUDA
and CPU)."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from mlx_manager.mlx_server.devices.cuda.driver import Driver

log = logging.getLogger(__name__)

SETTINGS = {
    # Graphs kept for steps of different shapes. The default is 400; after twice as many cache
    # misses the process is reported to abort.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4000",
    # A decode step is one graph. By default it is cut after 100 operations, or 1 000 million
    # elements of inputs, which a few layers of an 8B reach: 5.87 ms a step of 64 rows, not 5.59.
    "MLX_MAX_OPS_PER_BUFFER": "1000",
    "MLX_MAX_MB_PER_BUFFER": "1000000",
}
KERNELS = "MLX_PTX_CACHE_DIR"
TEMPORARY = "TMPDIR"

# Attributes of a device in the CUDA driver API: compute capability.
_MAJOR, _MINOR = 75, 76


def record_whole_steps() -> None:
    """Set the variables of `SETTINGS` that the owner has not set.

    Call this before MLX computes anything, and on an NVIDIA GPU only: Metal reads the same names,
    and macOS ends a recording that takes seconds.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def keep_kernels() -> None:
    """Have MLX keep the kernels that it compiles in the user's cache.

    The owner's setting of `KERNELS` has priority. Compiling MLX's own kernels takes some 17 s for a
    model (H200). MLX's default is a folder of temporary files: the folder is lost on restart, and
    other users can put code there that MLX would run. Call this before MLX computes anything.
    Without an NVIDIA GPU nothing is set.
    """
    if KERNELS in os.environ:
        return
    try:
        folder = _made(f"{version('mlx')}-{architecture()}")
    except (OSError, RuntimeError) as error:
        # There is no such GPU, most likely; or a home that is missing, or may not be written to.
        log.debug("MLX keeps its kernels where it likes: %s", error)
        return
    os.environ[KERNELS] = str(folder)


def keep_cpu_kernels() -> None:
    """Have MLX keep the kernels that it compiles for a CPU in the user's cache.

    MLX compiles with g++ into a fixed folder among the temporary files. The first user's folder
    there blocks every other user's server, and another user who makes the folder first can have the
    server run foreign code. So `TEMPORARY` is set to a folder in the user's cache, unless the owner
    has set it, or to a new temporary folder if there is no home. No other process uses the folder
    meanwhile, since it would load files that are still being written. Python's own temporary files
    stay where they are.

    Source: mlx/backend/cpu/compiled.cpp.
    """
    if TEMPORARY in os.environ:
        return
    # Python determines its folder once per process: do so before the variable changes.
    tempfile.gettempdir()
    try:
        folder = _of_this_process("cpu")
    except (OSError, RuntimeError) as error:
        log.debug("kernels are compiled anew in each process: %s", error)
        folder = Path(tempfile.mkdtemp(prefix="mlx-manager-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[TEMPORARY] = str(folder)


def cache_folder() -> Path:
    """Return the folder for compiled kernels in the user's cache.

    Raises:
        RuntimeError: there is no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlx-manager" / "kernels"


def _made(name: str) -> Path:
    """Return a folder in `cache_folder`; a new one is accessible to the user only.

    Raises:
        OSError, RuntimeError: the folder can't be made.
    """
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _of_this_process(name: str) -> Path:
    """Return the first folder `name`, or `name` with a number, that no other process holds.

    Raises:
        OSError, RuntimeError: the folder can't be made.
    """
    number = 1
    while True:
        folder = _made(name if number == 1 else f"{name}-{number}")
        # The file stays open, and the lock held, until the process ends.
        held = os.open(folder / ".held", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(held)
            if not isinstance(error, BlockingIOError):
                raise
        else:
            return folder
        number += 1


def architecture() -> str:
    """Return the architecture of the first NVIDIA GPU visible to this process, such as `sm_90`.

    Raises:
        OSError, RuntimeError: there is no NVIDIA GPU.
    """
    driver = Driver()
    return f"sm_{driver.attribute(_MAJOR)}{driver.attribute(_MINOR)}"

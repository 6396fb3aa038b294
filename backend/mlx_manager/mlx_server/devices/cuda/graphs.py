"""How MLX's CUDA build records steps, and where it keeps its kernels, on a CPU, too: it reads that
from the environment."""

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
    # Graphs kept for steps of different shapes. By default 400; beyond twice as many misses in its
    # life the process is reported to abort.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4000",
    # A decode step is one graph. By default it is cut after 100 operations, or 1 000 million
    # elements of inputs, which a few layers of an 8B reach: 5.87 ms a step of 64 rows, not 5.59.
    "MLX_MAX_OPS_PER_BUFFER": "1000",
    "MLX_MAX_MB_PER_BUFFER": "1000000",
}
KERNELS = "MLX_PTX_CACHE_DIR"
TEMPORARY = "TMPDIR"

# Of the CUDA driver API: attributes of a device.
_MAJOR, _MINOR = 75, 76


def record_whole_steps() -> None:
    """Set what the owner has not set. Before MLX computes anything, and on an NVIDIA GPU alone:
    Metal reads the same names, and macOS ends a recording that takes seconds."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def keep_kernels() -> None:
    """Have MLX keep the kernels that it compiles of its own, some 17 s of them for a model (H200),
    in the user's cache, unless the owner says where.

    Its own choice is a folder of temporary files: gone when the machine has been restarted, and
    open to others, whose code it would run. Before MLX computes anything; nothing elsewhere.
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
    """The same where MLX computes on a CPU: what it compiles, with g++, goes to the folder for
    temporary files and nowhere else.

    There the first user's folder is in the way of every other user's server, and whoever makes it
    before the server does has it run his code. So MLX gets a folder of the user's own, unless the
    owner says where temporary files go; a new one where there is no home. It has the folder for as
    long as it lives, as another would take for whole what it is still writing. Python's files stay
    where they are.

    Source: mlx/backend/cpu/compiled.cpp.
    """
    if TEMPORARY in os.environ:
        return
    # Asked for once a process, and kept.
    tempfile.gettempdir()
    try:
        folder = _of_this_process("cpu")
    except (OSError, RuntimeError) as error:
        log.debug("kernels are compiled anew in each process: %s", error)
        folder = Path(tempfile.mkdtemp(prefix="mlx-manager-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[TEMPORARY] = str(folder)


def cache_folder() -> Path:
    """
    Raises:
        RuntimeError: there is no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlx-manager" / "kernels"


def _made(name: str) -> Path:
    """A folder among the kernels, the user's alone, where there was none.

    Raises:
        OSError, RuntimeError: there is no place for it.
    """
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _of_this_process(name: str) -> Path:
    """The first folder by this name, or with a number behind it, that no other process has.

    Raises:
        OSError, RuntimeError: there is no place for it.
    """
    number = 1
    while True:
        folder = _made(name if number == 1 else f"{name}-{number}")
        # Open until the process ends, and the lock with it.
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
    """Of the first NVIDIA GPU that this process gets to see: `sm_90`.

    Raises:
        OSError, RuntimeError: there is none.
    """
    driver = Driver()
    return f"sm_{driver.attribute(_MAJOR)}{driver.attribute(_MINOR)}"

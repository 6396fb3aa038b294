"""A model's first load on this machine, by a process of its own, while others are answered.

MLX compiles for an NVIDIA GPU what a model's steps launch for the first time, on the thread that
steps: a minute for a model that is new to a machine, up to 11 s of it in one go. What has been
compiled is on disk from then on, for every process (`utils/graphs.py`, `utils/nvrtc.py`). So while
somebody is answered such a model is loaded by a process of its own first, which ends when it has
it; the load itself then finds all it needs.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from mlx_manager import __version__
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.settings import Recipe
from mlx_manager.mlx_server.utils.graphs import KERNELS, architecture, cache_folder
from mlx_manager.mlx_server.utils.steps import Steps, beside

log = logging.getLogger(__name__)

PROGRAM = "mlx_manager.rehearsal"
PACKAGES = ("mlx", "mlx-lm")
"""Whose other releases launch other kernels, as ours do."""
COMPILED_BY = ("weights", "max_rows", "page_size", "prefill_chunk")
"""The settings that decide what is launched."""
MOST = 1200
"""Seconds, after which it is given up: it takes a minute or two, and the load waits for it."""
LOOK = 0.2
"""Seconds between two looks whether the process has ended."""
LAST_LINES = 3


def machine() -> str:
    """What code that has been compiled is good for.

    Raises:
        OSError, RuntimeError: there is no NVIDIA GPU.
    """
    kept = os.environ.get(KERNELS, "")
    return " ".join([architecture(), __version__, *map(version, PACKAGES), kept])


def loaded_folder() -> Path:
    """Where it is noted what has been loaded.

    Raises:
        RuntimeError: there is no home.
    """
    return cache_folder() / "loaded"


class Rehearsals:
    """Knows which models have been loaded on this machine, and has others loaded by a process.

    settings: what that process goes by, as `MLXServerSettings` takes it. folder, machine: as the
    functions of these names say.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path, machine: str) -> None:
        self._settings = settings
        self._folder = folder
        self._machine = machine

    def is_due(self, source: ModelSource, recipe: Recipe) -> bool:
        """Whether no model of this configuration has been loaded here yet. Reads the disk."""
        try:
            return not (self._folder / self._key(source, recipe)).exists()
        except OSError as error:
            # The load will say what is wrong.
            log.debug("it is not known whether %s was loaded: %s", source.id, error)
            return False

    def note(self, source: ModelSource, recipe: Recipe) -> None:
        """It has been loaded."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._folder / self._key(source, recipe)).touch(mode=0o600)
        except OSError as error:
            log.debug("it is not noted that %s was loaded: %s", source.id, error)

    def _key(self, source: ModelSource, recipe: Recipe) -> str:
        assert source.path is not None
        settings = [str(self._settings.get(name)) for name in COMPILED_BY]
        parts = [self._machine, *settings, repr(recipe)]
        config = (source.path / "config.json").read_bytes()
        return sha256(b"\0".join([*map(str.encode, parts), config])).hexdigest()

    def running(self, model_id: str, nbytes: int) -> Steps[None]:
        """The process, from its start to its end. It gets `nbytes`, and ends with these steps."""
        log.info(
            "%s is new to this machine: a process of its own loads it first, so that answers go on "
            "while its kernels are compiled",
            model_id,
        )
        begun = time.monotonic()
        with tempfile.TemporaryFile() as said:
            try:
                process = yield from beside(partial(self._start, model_id, nbytes, said))
            except OSError as error:
                log.info("that can't be: %s", error)
                return
            try:
                while process.poll() is None and time.monotonic() - begun < MOST:
                    yield from beside(partial(time.sleep, LOOK))
            finally:
                process.kill()
                process.communicate()
            took = time.monotonic() - begun
            if process.returncode:
                log.info("that failed after %.1f s: %s", took, last_words(said))
            else:
                log.info("that took %.1f s; now %s is loaded", took, model_id)

    def _start(self, model_id: str, nbytes: int, said: IO[bytes]) -> subprocess.Popen[bytes]:
        """Its stdin is a pipe that stays open: when it is at its end, so is this process."""
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        settings = {**self._settings, "memory_limit_gb": nbytes / 2**30}
        told = {"model": model_id, "settings": settings}
        assert process.stdin is not None
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
        return process


def last_words(said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return " ".join(lines[-LAST_LINES:])

"""Places of an MPI group on this machine, for processes that mpirun has not started.

A worker is there before its model is spread, so mpirun can't start it. mpirun starts a process that
holds each rank's place instead, and the rank takes on its environment before it enters the group
(MPI_Init). By that Open MPI's daemon, which is mpirun itself, knows the rank. Source: Open MPI 4.1
and PMIx 4.2, which know a client by its namespace, its number and its user.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import monotonic, sleep
from typing import Final

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.workers.mpi_place import told_in
from mlx_manager.mlx_server.workers.process import ROOT

log = logging.getLogger(__name__)
PLACE = "mlx_manager.mlx_server.workers.mpi_place"
PROGRAMS: Final = ("mpirun", "mpiexec", "orterun")
OPTIONS = ("--oversubscribe", "--bind-to", "none")
"""More ranks than cores are the owner's choice, and ranks share all cores."""
PATIENCE = 30.0
"""Seconds within which mpirun has made all places."""
OFTEN = 0.02
"""Seconds between two looks for the places."""
PARTING = 2.0
"""Seconds that mpirun gets to remove its files."""
MAC_FILES = "/tmp"  # nosec B108  # a folder of its own is made there
"""Folder of mpirun's files on a Mac, where names of Open MPI's files are too long in the usual one
(open-mpi/ompi#7393)."""
LAST = 8
"""Lines of mpirun's that an error message has."""


class Mpirun:
    """A running mpirun, and the places that it has made.

    Raises:
        ModelLoadFailed: there is no mpirun, or it makes no places; the message has its words.
    """

    def __init__(self, size: int) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise ModelLoadFailed(
                "MPI (MLX_SERVER_DISTRIBUTED, or `backend` in the hostfile) needs Open MPI on this "
                "machine, and there is no mpirun on the PATH. `ring` needs nothing."
            )
        # One that ends removes the folder that all of a user's have together.
        short = MAC_FILES if sys.platform == "darwin" else None
        files = TemporaryDirectory(prefix="mpi-", dir=short, ignore_cleanup_errors=True)
        self._files = files
        place = [sys.executable, "-P", "-m", PLACE, files.name, str(os.getpid())]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                [program, *OPTIONS, "-n", str(size), *place],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": files.name},
            )
        except OSError as error:
            files.cleanup()
            raise ModelLoadFailed(f"{program} can't be started: {error}.") from error
        self._words: deque[str] = deque(maxlen=LAST)
        self._reader = Thread(target=self._read, name="mpirun", daemon=True)
        self._reader.start()
        try:
            self.places = self._made(size)
        except ModelLoadFailed:
            self.close()
            raise

    def close(self) -> None:
        """End mpirun, and with it the places."""
        self._process.terminate()
        try:
            self._process.wait(PARTING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._files.cleanup()

    def _made(self, size: int) -> list[Mapping[str, str]]:
        """Return the environment of each rank's place, which tells it in a file: mpirun mixes what
        several processes print."""
        files = [Path(self._files.name) / told_in(rank) for rank in range(size)]
        deadline = monotonic() + PATIENCE
        while not all(file.exists() for file in files):
            if self._process.poll() is not None or monotonic() > deadline:
                # Its last words may be on their way.
                self._reader.join(PARTING if self._process.poll() is not None else 0)
                words = " ".join(self._words) or f"nothing came in {PATIENCE:.0f} s"
                raise ModelLoadFailed(f"mpirun makes no places for {size} ranks: {words}")
            sleep(OFTEN)
        return [json.loads(file.read_text()) for file in files]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if said := line.strip(" \n-"):
                self._words.append(said)
                log.info("mpirun: %s", said)

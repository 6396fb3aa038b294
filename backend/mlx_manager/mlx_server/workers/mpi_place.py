"""The program that holds a rank's place in an MPI group: see `workers.mpirun`.

It writes the environment that mpirun has given it to a file, in the folder that is its first
argument, and stays until mpirun ends, or the process whose number is its second: a worker that is
killed ends no mpirun. Then it removes the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

PREFIXES = ("OMPI_", "PMIX_", "PRTE_")
"""Beginnings of the variables by which Open MPI's processes know their place."""
RANK = "OMPI_COMM_WORLD_RANK"
OFTEN = 0.5
"""Seconds between two looks whether mpirun and the worker are there."""


def told_in(rank: int) -> str:
    """Return the name of the file with a rank's environment."""
    return f"rank-{rank}.json"


def is_there(process: int) -> bool:
    """Return whether a process of this user has not ended."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    parent, folder, worker = os.getppid(), Path(sys.argv[1]), int(sys.argv[2])
    given = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    name = told_in(int(given[RANK]))
    # Whole, as soon as it has its name.
    half = folder / f"{name}.half"
    half.write_text(json.dumps(given))
    half.rename(folder / name)
    while os.getppid() == parent and is_there(worker):
        time.sleep(OFTEN)
    # Nobody else does so where the worker and mpirun have been killed.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

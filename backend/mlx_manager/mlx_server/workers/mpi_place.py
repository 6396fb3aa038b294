"""The program that holds a rank's place in an MPI group: see `workers.mpirun`.

It tells the environment that mpirun has given it, as a line of JSON, and stays until mpirun ends.
"""

from __future__ import annotations

import json
import os
import time

PREFIXES = ("OMPI_", "PMIX_", "PRTE_")
"""Beginnings of the variables by which Open MPI's processes know their place."""
OFTEN = 0.5
"""Seconds between two looks whether mpirun is there."""


def main() -> None:
    parent = os.getppid()
    given = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    print(json.dumps(given), flush=True)
    while os.getppid() == parent:
        time.sleep(OFTEN)


if __name__ == "__main__":
    main()

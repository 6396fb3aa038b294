"""Folders of the models of synthetic.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
_WRITE = """
import sys
from pathlib import Path
from synthetic import write
shape, folder, counts, *bits = sys.argv[1:]
write(shape, Path(folder), *map(int, bits), counts=bool(counts))
"""


def written(shape: str, folder: Path, *bits: int, counts: bool = False) -> Path:
    """The model's folder, made by a process of its own, whose memory is free again afterwards."""
    given = [shape, str(folder.absolute()), "counts" if counts else "", *map(str, bits)]
    command = [sys.executable, "-c", _WRITE, *given]
    subprocess.run(command, check=True, cwd=HERE)
    return folder

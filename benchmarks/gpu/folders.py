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
shape, folder, *bits = sys.argv[1:]
write(shape, Path(folder), *map(int, bits))
"""


def written(shape: str, folder: Path, *bits: int) -> Path:
    """The model's folder, made by a process of its own, whose memory is free again afterwards."""
    command = [sys.executable, "-c", _WRITE, shape, str(folder.absolute()), *map(str, bits)]
    subprocess.run(command, check=True, cwd=HERE)
    return folder

"""Programs that say when they are ready."""

from __future__ import annotations

import re
import subprocess


def announced(process: subprocess.Popen[str], said: re.Pattern[str], name: str) -> str:
    """The first group of `said`, once a line of the program's stderr has it."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := said.search(line):
            return found[1]
    raise AssertionError(f"{name} did not start:\n{''.join(lines)}")

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_http_rim_serves_its_stand_in_without_complaint():
    options = ("--in-process", "--streams", "2", "--tokens", "4", "--rounds", "1")
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "http_rim.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\nin process: best " in ended.stdout

"""The soak test in small; `benchmarks/soak.py` has what it does, and the 5 000."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from thorough import slow

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "soak.py"


@slow
def test_after_hundreds_of_requests_of_every_kind_nothing_is_left() -> None:
    # So few do not bring the allocator to where it stays: memory itself is the long version's.
    options = ("--requests", "300", "--warmup", "150", "--tolerance", "0.5")
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), *options], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert sum(report["ended"].values()) == 300
    assert report["growth"]["ledger"] == 0

"""The scripts that train the embedded models are no package: they are put on the path here."""

from __future__ import annotations

import sys
from pathlib import Path

BACKEND = Path(__file__).parents[2]
sys.path[:0] = [str(BACKEND / "training" / "demo"), str(BACKEND)]

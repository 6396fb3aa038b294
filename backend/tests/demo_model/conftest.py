"""The scripts that train the embedded model are no package: they are put on the path here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "training" / "demo"))

"""The dashboard's file, as those who test it read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "docs" / "grafana"
FILE = FOLDER / "mlx-manager.json"
RULES = FOLDER / "mlx-manager.rules.yml"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def panels() -> Iterator[dict[str, Any]]:
    """All of them, those in closed rows too; rows are none."""
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries() -> Iterator[tuple[str, str]]:
    """Every query's panel and expression."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']}: {target.get('legendFormat', 'value')}", target["expr"]

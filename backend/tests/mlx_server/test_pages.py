"""What docs/ and the README say there is, against what a server has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app

ROOT = Path(__file__).parents[3]
README, OPERATIONS = ((ROOT / page).read_text() for page in ("README.md", "docs/operations.md"))
HELPERS = ("_created", "_bucket", "_count", "_sum")


@pytest.fixture(scope="module")
def client():
    pool = ScriptedPool(ScriptedBackend(says("Hello")))
    with TestClient(create_app(MLXServerSettings(metrics_by_key=True), pool)) as opened:
        yield opened


def test_every_metric_is_in_the_table_of_metrics(client: TestClient):
    families = text_string_to_metric_families(client.get("/metrics").text)
    there = {
        family.name.removeprefix("mlx_manager_")
        for family in families
        if not family.name.endswith(HELPERS)
    }
    named = re.findall(r"`(\w+?)(?:_total)?(?:\{[\w,]+\})?`\*?", OPERATIONS)
    assert there
    assert there <= set(named)


def test_every_path_is_named_in_the_readme_or_for_who_runs_the_server(client: TestClient):
    paths = client.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths
    lacking = [path for path in paths if re.sub(r"{\w+}", "{id}", path) not in README + OPERATIONS]
    assert not lacking

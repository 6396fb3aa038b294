from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_manager.mlx_server.api import reference
from mlx_manager.mlx_server.main import create_app

PAGE = Path(__file__).parents[4] / "docs/api.md"


def test_the_page_of_parameters_is_up_to_date():
    written = PAGE.read_text()
    assert written == reference.page(), (
        "run: python -m mlx_manager.mlx_server.api.reference > docs/api.md"
    )


@pytest.mark.parametrize("route", reference.ROUTES, ids=lambda route: route.path)
def test_every_field_is_in_its_table(route: reference.Route):
    schema = route.body.model_json_schema()
    table = reference.page().partition(f"`POST {route.path}`")[2].partition("\n## ")[0]
    for name in schema["properties"]:
        assert f"| `{name}`" in table
    for name in route.refused.keys() & schema["properties"].keys():
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}`")]
        assert "**refused**" in row
    assert set(route.no_effect) - set(schema["properties"]) <= {"cache_control"}


def test_every_body_that_asks_a_model_something_has_a_table():
    paths = create_app().openapi()["paths"]
    asked = {path for path, methods in paths.items() if "post" in methods and "admin" not in path}
    assert asked == {route.path for route in reference.ROUTES}


def test_every_type_in_a_table_is_found_by_its_name_in_the_schemas():
    tables = reference.page().partition("\n## `POST")[2]
    named = set(re.findall(r"`([A-Z][a-z]\w+)`", tables))
    assert "StreamOptions" in named
    assert named <= create_app().openapi()["components"]["schemas"].keys()

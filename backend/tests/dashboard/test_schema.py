"""The dashboard's file against Grafana's own schemas, as grafana-foundation-sdk has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from dashboard import dashboard, panels
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import ConfigDict, TypeAdapter, ValidationError

ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


@pytest.fixture(scope="module")
def model() -> Dashboard:
    register_default_plugins()
    return Dashboard.from_json(dashboard())


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """What `ours` says and `theirs` does not; it may say more: the defaults."""
    match ours, theirs:
        case dict(), dict():
            for name, value in ours.items():
                if name not in theirs:
                    yield f"{path}.{name}"
                else:
                    yield from lost(value, theirs[name], f"{path}.{name}")
        case list(), list() if len(ours) == len(theirs):
            for i, pair in enumerate(zip(ours, theirs, strict=True)):
                yield from lost(*pair, f"{path}[{i}]")
        case _ if ours != theirs:
            yield f"{path}: {ours!r} became {theirs!r}"


def wrong(found: Any, path: str = "") -> Iterator[str]:
    """Values that are not what the schema's classes declare; they check nothing themselves."""
    match found:
        case list():
            for i, item in enumerate(found):
                yield from wrong(item, f"{path}[{i}]")
        case dict():
            for name, item in found.items():
                yield from wrong(item, f"{path}.{name}")
        case _ if type(found).__module__.startswith("grafana_foundation_sdk"):
            for name, hint in get_type_hints(type(found)).items():
                value = getattr(found, name)
                try:
                    TypeAdapter(hint, config=ANY_CLASS).validate_python(value)
                except ValidationError as error:
                    yield f"{path}.{name}: {error}"
                yield from wrong(value, f"{path}.{name}")


def test_grafana_knows_all_that_the_file_says(model: Dashboard) -> None:
    assert list(lost(dashboard(), json.loads(json.dumps(model, cls=JSONEncoder)))) == []


def test_every_value_is_one_that_grafana_takes(model: Dashboard) -> None:
    assert list(wrong(model)) == []


def test_what_grafana_does_not_know_or_take_is_noticed() -> None:
    """Otherwise the two above would say nothing."""
    register_default_plugins()
    changed = dashboard()
    panel = next(panel for panel in changed["panels"] if panel["type"] == "timeseries")
    panel["options"]["legends"] = {}
    panel["fieldConfig"]["defaults"]["custom"]["drawStyle"] = "doodle"
    model = Dashboard.from_json(changed)
    missing = list(lost(changed, json.loads(json.dumps(model, cls=JSONEncoder))))
    assert [path.rsplit(".", 1)[1] for path in missing] == ["legends"]
    assert ["draw_style" in error for error in wrong(model)] == [True]


def test_panels_have_ids_of_their_own_and_say_what_they_show() -> None:
    rows = [panel for panel in dashboard()["panels"] if panel["type"] == "row"]
    found = list(panels())
    ids = [panel["id"] for panel in rows + found]
    assert len(set(ids)) == len(ids)
    assert all(panel["title"] and panel["description"].endswith(".") for panel in found)


def test_no_panel_lies_on_another() -> None:
    for laid in [
        dashboard()["panels"],
        *(panel.get("panels", []) for panel in dashboard()["panels"]),
    ]:
        taken: set[tuple[int, int]] = set()
        for panel in laid:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24
            for x in range(at["x"], at["x"] + at["w"]):
                for y in range(at["y"], at["y"] + at["h"]):
                    assert (x, y) not in taken, panel["title"]
                    taken.add((x, y))

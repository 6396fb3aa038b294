"""The dashboard's queries and the alerts, asked of a real Prometheus that reads a real server."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from dashboard import RULES, dashboard, queries
from live import LiveServer, live_server
from minilm import minilm_folder
from prometheus import ask, needs_prometheus, prometheus, until
from traffic import talk

pytestmark = needs_prometheus
MODEL = "mlx-manager/demo"
QUERIES = list(queries())
CHOSEN = {"$instance": ".*", "$model": ".*", "$__rate_interval": "4s"}
"""What Grafana puts in: all that there are, and a span for so short a history."""


@dataclass(frozen=True, slots=True)
class Watched:
    """client: of Prometheus. server: what it reads. quiet: set to have the callers leave."""

    client: httpx.Client
    server: LiveServer
    quiet: threading.Event
    callers: threading.Thread


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server whom somebody asks something all the time."""
    folder = tmp_path_factory.mktemp("watched")
    shutil.copytree(minilm_folder(), folder / "models" / "minilm")
    settings = {"models_dir": folder / "models", "metrics_by_key": True, "max_rows": 4}
    with (
        live_server(folder / "log.txt", **settings) as server,
        prometheus(folder, [server.url], [RULES]) as client,
    ):
        quiet = threading.Event()
        asked = talk(server.url, quiet.is_set, 6, [MODEL], "minilm")
        callers = threading.Thread(target=asyncio.run, args=[asked])
        callers.start()
        try:
            yield Watched(client, server, quiet, callers)
        finally:
            quiet.set()
            callers.join()


def expression(written: str) -> str:
    for name, value in CHOSEN.items():
        written = written.replace(name, value)
    return written


@pytest.mark.parametrize(
    "written", [written for _, written in QUERIES], ids=[name for name, _ in QUERIES]
)
def test_every_query_finds_something(watched: Watched, written: str) -> None:
    asked = expression(written)
    assert "$" not in asked

    def numbers() -> list[str]:
        history = {"start": time.time() - 60, "end": time.time(), "step": 1}
        found = ask(watched.client, "query_range", query=asked, **history)["result"]
        values = [value for series in found for _, value in series["values"]]
        return [value for value in values if value not in ("NaN", "+Inf")]

    assert all(float(value) >= 0 for value in until(numbers))


def test_what_can_be_chosen_is_what_there_is(watched: Watched) -> None:
    offered = {}
    for variable in dashboard()["templating"]["list"][1:]:
        metric, label = re.fullmatch(
            r"label_values\((.+), (\w+)\)", variable["query"]["query"]
        ).groups()
        offered[variable["name"]] = ask(
            watched.client, f"label/{label}/values", **{"match[]": expression(metric)}
        )
    assert offered["instance"] == [watched.server.url.removeprefix("http://")]
    assert set(offered["model"]) == {MODEL, "minilm"}


def test_alerts_are_evaluated_and_a_server_that_ends_is_noticed(watched: Watched) -> None:
    def rules() -> list[dict[str, Any]]:
        [group] = ask(watched.client, "rules")["groups"]
        return group["rules"]

    def state(name: str) -> str:
        [found] = (rule["state"] for rule in rules() if rule["name"] == name)
        return found

    until(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert {rule["health"] for rule in rules()} == {"ok"}
    assert state("MLXManagerDown") == state("MLXManagerNotReady") == "inactive"
    watched.quiet.set()
    watched.callers.join()
    watched.server.process.terminate()
    until(lambda: state("MLXManagerDown") == "pending")

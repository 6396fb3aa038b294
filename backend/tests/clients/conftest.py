"""One server, in a process of its own, for all clients. It draws the likeliest token also for those
that can't ask for it. A second one has no models but the first one's, by `url`: each test runs on
one of the two, by turns, and with MLX_TEST_ALL=1 on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live import LiveServer, live_server, server_before
from talks import WAYS
from thorough import slow

CLIENTS = Path(__file__).parent
MODEL = "mlx-manager/demo"
OWN = f'[models."{MODEL}"]\naliases = ["claude-*", "gpt-*"]\nsampling = {{ top_k = 1 }}\n'


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[Path, dict[str, int]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (way := way_of(item)) is not None:
            of_file = cases.setdefault(item.path, {})
            number = of_file.setdefault(item.nodeid.replace(way, ""), len(of_file))
            if WAYS.index(way) != number % len(WAYS):
                item.add_marker(slow)


def way_of(item: pytest.Function) -> str | None:
    """Return where the models are in a test of a client that takes turns; None for another."""
    if not item.path.is_relative_to(CLIENTS):
        return None
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return given.get("server", given.get("seeing"))


@pytest.fixture(scope="session", params=WAYS)
def server(request: pytest.FixtureRequest) -> LiveServer:
    found: LiveServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    yield from serving(tmp_path_factory)


@pytest.fixture(scope="session")
def elsewhere(own: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with server_before(own, tmp_path_factory.mktemp("before"), OWN) as running:
        yield running


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One that serves no WebSockets."""
    yield from serving(tmp_path_factory, websockets=False)


def serving(tmp_path_factory: pytest.TempPathFactory, **settings: object) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("clients")
    log, models = folder / "log.txt", folder / "models.toml"
    models.write_text(OWN)
    with live_server(log, models_file=models, **settings) as running:
        yield running
    assert "Traceback" not in log.read_text(), log.read_text()
    assert running.process.returncode == 0

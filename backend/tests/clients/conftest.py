"""One server, in a process of its own, for all clients. It draws the likeliest token also for those
that can't ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live import LiveServer, live_server

MODEL = "mlx-manager/demo"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    yield from serving(tmp_path_factory)


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One that serves no WebSockets."""
    yield from serving(tmp_path_factory, websockets=False)


def serving(tmp_path_factory: pytest.TempPathFactory, **settings: object) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("clients")
    log, models = folder / "log.txt", folder / "models.toml"
    models.write_text(
        f'[models."{MODEL}"]\naliases = ["claude-*", "gpt-*"]\nsampling = {{ top_k = 1 }}\n'
    )
    with live_server(log, models_file=models, **settings) as running:
        yield running
    assert "Traceback" not in log.read_text(), log.read_text()
    assert running.process.returncode == 0

"""One server, in a process of its own, for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live import LiveServer, live_server

MODEL = "mlx-manager/demo"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("clients") / "log.txt"
    with live_server(log, model_aliases=f"claude-*={MODEL},gpt-*={MODEL}") as running:
        yield running
    assert "Traceback" not in log.read_text(), log.read_text()
    assert running.process.returncode == 0

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from linux import needs_linux
from live import live_server

from mlx_manager.mlx_server.utils.notify import READY, notify

pytestmark = needs_linux("systemd's sockets, abstract or with paths over 104 characters")


@pytest.fixture
def manager(tmp_path: Path, monkeypatch) -> Iterator[socket.socket]:
    """What a service manager listens at."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_a_service_manager_hears_when_the_server_is_ready(manager, tmp_path):
    with live_server(tmp_path / "log.txt") as server:
        assert manager.recv(1000).decode() == f"READY=1\nSTATUS=Ready: {server.url}/v1"


def test_an_abstract_socket_is_one_too(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("")
        name = listening.getsockname()
        listening.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name[1:].decode()}")
        notify(READY)
        assert listening.recv(100) == b"READY=1"


def test_a_manager_that_is_gone_stops_nobody(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify(READY)
    assert "could not be told READY=1" in caplog.text
    caplog.clear()
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify(READY)
    assert not caplog.text

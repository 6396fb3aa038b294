"""Clients that do nothing, next to nothing, or everything at once, beside eight answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from crowd import Crowd, connect, question
from linux import needs_linux
from live import LiveServer, live_server
from thorough import slow

CHAT = "/v1/chat/completions"
PATIENCE = 2
IDLERS = 500
BURST = 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("clients") / "log"
    settings = {"client_timeout_seconds": PATIENCE, "log_level": "warning"}
    with live_server(log, **settings) as running:
        yield running
    assert "Traceback" not in log.read_text()


@pytest.fixture
async def http(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        yield client


def open_files(server: LiveServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


async def closed_by_server(connection: socket.socket) -> bool:
    try:
        return not await asyncio.get_running_loop().sock_recv(connection, 1)
    except ConnectionResetError:
        return True
    finally:
        connection.close()


@needs_linux("/proc counts a server's open files")
@pytest.mark.parametrize(
    "first",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-",
        pytest.param(b"", marks=slow),
    ],
)
async def test_connections_that_send_no_request_are_closed_and_delay_nobody(
    server: LiveServer, http: httpx.AsyncClient, first: bytes
):
    before = open_files(server)
    idlers = await asyncio.gather(*(connect(server, first) for _ in range(IDLERS)))
    async with Crowd(http, 30) as crowd:
        pass
    assert all(told.well for told in crowd.told)
    assert all(await asyncio.gather(*map(closed_by_server, idlers)))
    # The crowd's own are kept alive.
    assert open_files(server) <= before + 16


async def test_a_client_that_reads_a_byte_a_second_is_dropped_and_delays_nobody(
    server: LiveServer, http: httpx.AsyncClient
):
    before = open_files(server)
    # Some megabytes: more than the system takes on for a reader who is slow.
    request = 100 * b"GET /openapi.json HTTP/1.1\r\nHost: here\r\n\r\n"
    slow = await connect(server, request, receive_buffer=2048)
    reading = asyncio.create_task(read_slowly(slow))
    async with Crowd(http, 30) as crowd:
        pass
    assert all(told.well for told in crowd.told)
    await http.aclose()
    async with asyncio.timeout(60):
        while open_files(server) > before:  # noqa: ASYNC110 another process's
            await asyncio.sleep(0.1)
    assert not reading.done()
    reading.cancel()
    slow.close()


async def read_slowly(connection: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(connection, 1):  # noqa: ASYNC110
        await asyncio.sleep(1)


@slow
async def test_a_thousand_requests_at_once_are_all_answered(tmp_path: Path):
    limits = httpx.Limits(max_connections=None)
    with live_server(tmp_path / "log", log_level="warning") as server:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http,
            Crowd(http, 30) as crowd,
        ):
            burst = await asyncio.gather(
                *(http.post(CHAT, json=question(1, n, stream=False)) for n in range(BURST))
            )
    assert [response.status_code for response in burst] == [200] * BURST
    assert all(told.well for told in crowd.told)

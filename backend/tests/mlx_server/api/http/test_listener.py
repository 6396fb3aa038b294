"""What a client may do to a connection, byte by byte, and what comes back."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from live import LiveServer, live_server
from scripted import ScriptedBackend, ScriptedPool, says
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mlx_manager.mlx_server.api.connection import UntilHangup
from mlx_manager.mlx_server.api.http.listener import Connection, configuration
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app
from mlx_manager.mlx_server.protocols.chat import ChatStream

KEY = "a-key-of-the-tests"
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
WEBSOCKET = (
    b"connection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
)
BODY = json.dumps({"content": "hello"}).encode()
SIZED = b"content-length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("listener") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[LiveServer]:
    with live_server(log, client_timeout_seconds=2, api_key=KEY) as running:
        yield running
    assert "Traceback" not in log.read_text()


def head(path: str = "/v1/tokenize", *, key: bool = True) -> bytes:
    """The beginning of a request: its first lines."""
    known = b"authorization: Bearer %s\r\n" % KEY.encode() if key else b""
    json_type = b"content-type: application/json\r\n"
    return b"POST %s HTTP/1.1\r\nhost: x\r\n%s%s" % (path.encode(), known, json_type)


def received(server: LiveServer, *pieces: bytes, patience: float = 60) -> bytes:
    """All that comes for `pieces`, sent one after the other, until the server hangs up."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=patience) as connection:
        for number, piece in enumerate(pieces):
            if number:
                # So that they come apart.
                time.sleep(0.2)
            connection.sendall(piece)
        found = b""
        while piece := connection.recv(65536):
            found += piece
        return found


def statuses(answers: bytes) -> list[int]:
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("offer", [OFFER, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize(
    "pieces",
    [
        (SIZED + BODY + LAST,),
        (SIZED, BODY, LAST),
        (SIZED + BODY[:5], BODY[5:] + LAST),
        (CHUNKED + CHUNK + b"\r\n" + LAST,),
        (CHUNKED, CHUNK + b"\r\n", LAST),
    ],
    ids=["at-once", "apart", "cut", "chunked", "chunked-apart"],
)
def test_an_offer_of_another_protocol_is_ignored(
    server: LiveServer, offer: bytes, pieces: tuple[bytes, ...]
) -> None:
    first, *others = pieces
    answers = received(server, head() + offer + first, *others)
    assert statuses(answers) == [200, 200]
    assert b'"tokens":[' in answers


def test_requests_that_offer_may_follow_each_other(server: LiveServer) -> None:
    one = head() + OFFER + SIZED + BODY
    assert statuses(received(server, one + one + one[:40], one[40:] + LAST)) == [200] * 4


def test_all_else_that_the_head_says_stays(server: LiveServer) -> None:
    named = head() + OFFER + b"x-request-id: upgrade\r\n" + SIZED + BODY + LAST
    assert b"x-request-id: upgrade\r\n" in received(server, named)


def test_any_number_of_requests_may_offer_at_once(server: LiveServer) -> None:
    one = b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: a\r\n\r\n"
    assert statuses(received(server, one * 2000 + LAST)) == [200] * 2001


def test_a_head_that_offers_may_come_in_pieces(server: LiveServer) -> None:
    whole = head() + OFFER + SIZED + BODY + LAST
    assert statuses(received(server, whole[:90], whole[90:170], whole[170:])) == [200, 200]


def test_nobody_is_connected_to_anywhere(server: LiveServer) -> None:
    asked = b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\n\r\n"
    assert statuses(received(server, asked)) == [400]


@pytest.mark.parametrize("apart", [False, True])
def test_what_follows_a_body_is_no_header(server: LiveServer, apart: bool) -> None:
    trailers = b"authorization: Bearer %s\r\nx-api-key: %s\r\n\r\n" % (KEY.encode(), KEY.encode())
    first, last = head(key=False) + CHUNKED + CHUNK, trailers + LAST
    answers = received(server, *((first, last) if apart else (first + last,)))
    assert statuses(answers) == [401, 200]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_stream_comes_in_whole_events_a_chunk_and_says_what_the_whole_answer_says(
    server: LiveServer, rows: int
) -> None:
    asked = {"prompt": "a", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "n": rows}
    texts = []
    for stream in (False, True):
        content = json.dumps({**asked, "stream": stream}).encode()
        more = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(content)
        told = received(server, head("/v1/completions") + more + content)
        texts.append(told.partition(b"\r\n\r\n")[2])
    whole, rest = json.loads(texts[0]), texts[1]
    said = [""] * rows
    events = 0
    while not rest.startswith(b"0\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        chunk, rest = rest[: int(size, 16)], rest[int(size, 16) :].removeprefix(b"\r\n")
        assert chunk.startswith(b"data: ")
        assert chunk.endswith(b"\n\n")
        for event in chunk.decode().split("\n\n")[:-1]:
            if event != "data: [DONE]":
                (choice,) = json.loads(event.removeprefix("data: "))["choices"]
                said[choice["index"]] += choice["text"]
                events += 1
    assert rest == b"0\r\n\r\n"
    assert said == [choice["text"] for choice in whole["choices"]]
    assert events > rows


def test_half_a_head_behind_a_request_is_not_waited_for_forever(server: LiveServer) -> None:
    # Far less than what an idle connection may stay.
    answers = received(server, head() + SIZED + BODY + b"GET /health HT", patience=40)
    assert statuses(answers) == [200]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_head_that_is_too_large_is_refused_in_its_protocols_shape_and_told_in_the_log(
    server: LiveServer, log: Path, path: str
) -> None:
    answer = received(server, head(path) + b"x: y\r\n" * 11_000)
    lines, _, body = answer.partition(b"\r\n\r\n")
    assert lines.startswith(b"HTTP/1.1 431 ")
    said = json.loads(body)
    assert ("type" in said) == (path == "/v1/messages")
    assert "64" in said["error"]["message"] or "65536" in said["error"]["message"]
    if path == "/v1/messages":
        assert f"request-id: {said['request_id']}".encode() in lines
    request_id = lines.partition(b"x-request-id: ")[2].partition(b"\r")[0].decode()
    assert f"({request_id}): {said['error']['message']}" in log.read_text()


@pytest.mark.parametrize(
    ("request_", "says_what"),
    [
        (head().replace(b"host: x\r\n", b"host: x\r\nHost: y\r\n") + SIZED + BODY, "one `Host`"),
        (head().replace(b"host: x\r\n", b"host: x\r\nhost: x\r\n") + SIZED + BODY, "one `Host`"),
        (b"GET /health HTTP/1.1\r\nhost x\r\n\r\n", "not valid HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "not valid HTTP"),
        (head() + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "not valid HTTP"),
    ],
    ids=["two hosts", "one host twice", "no header", "TLS", "no chunk"],
)
def test_broken_http_is_refused_with_an_id_that_is_in_the_log(
    server: LiveServer, log: Path, request_: bytes, says_what: str
) -> None:
    lines, _, body = received(server, request_).partition(b"\r\n\r\n")
    assert lines.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    said = json.loads(body)["error"]
    assert says_what in said["message"]
    request_id = lines.partition(b"x-request-id: ")[2].partition(b"\r")[0].decode()
    assert f"({request_id}): {said['message']}" in log.read_text()


@pytest.mark.parametrize("key", [True, False], ids=["keyed", "keyless"])
@pytest.mark.parametrize(
    ("beginning", "more"),
    [
        (head(), b"x"),
        (head() + b"content-length: 1000\r\n\r\n{", b" "),
        (head() + CHUNKED + b"1\r\n{\r\n", b"1\r\n \r\n"),
    ],
    ids=["headers", "body", "chunks"],
)
def test_who_sends_a_byte_now_and_then_is_hung_up_on(
    server: LiveServer, beginning: bytes, more: bytes, key: bool
) -> None:
    known = b"authorization: Bearer %s\r\n" % KEY.encode()
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=0.5) as connection:
        connection.sendall(beginning if key else beginning.replace(known, b""))
        answer, until = b"", time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(TimeoutError):
                try:
                    if not (piece := connection.recv(65536)):
                        break
                    answer += piece
                    connection.sendall(more)
                except ConnectionError:
                    break
            with suppress(ConnectionError):
                connection.sendall(more)
        else:
            pytest.fail("it is still connected")
    assert statuses(answer) in ([], [408] if key else [401])


@contextmanager
def here(settings: MLXServerSettings) -> Iterator[str]:
    """The address of a server in this process, with answers that are scripted."""
    app = create_app(settings, ScriptedPool(ScriptedBackend(lambda _: says("a", "b"))))
    server = uvicorn.Server(configuration(app, settings))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=[[listening]])
    thread.start()
    try:
        address, port = listening.getsockname()
        yield f"http://{address}:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(
    "asked",
    [{"stream": True}, {"stream": False}, {"max_tokens": -2}],
    ids=["streamed", "whole", "refused"],
)
def test_nothing_of_an_answered_request_stays_in_memory(asked: dict[str, Any]) -> None:
    kinds = {ChatStream, Connection, RequestResponseCycle, UntilHangup}

    def left() -> set[type]:
        return {type(each) for each in gc.get_objects()} & kinds

    gc.collect()
    assert not left()
    body = {"messages": [{"role": "user", "content": "hello"}], **asked}
    gc.disable()
    try:
        with here(MLXServerSettings()) as url, httpx.Client() as client:
            for _ in range(3):
                answer = client.post(f"{url}/v1/chat/completions", json=body, timeout=60)
                assert answer.status_code == (422 if "max_tokens" in asked else 200)
            client.close()
            deadline = time.monotonic() + 60
            while (found := left()) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not found
    finally:
        gc.enable()

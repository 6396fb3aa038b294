"""`/v1/responses` as a WebSocket, by the `websockets` client against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live import LiveServer, live_server
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

QUESTION = "How do I stop the server?"
ANSWER = "Press Ctrl-C in the terminal where the server runs."
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
Event = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("websocket") / "log.txt"
    with live_server(log, keepalive_seconds=0.2) as running:
        yield running
    assert "Traceback" not in log.read_text(), log.read_text()
    assert running.process.returncode == 0


def address(server: LiveServer) -> str:
    return f"{server.url.replace('http', 'ws', 1)}/v1/responses"


@asynccontextmanager
async def opened(server: LiveServer, **headers: str) -> AsyncIterator[ClientConnection]:
    async with connect(address(server), additional_headers=headers) as socket:
        yield socket


async def events(socket: ClientConnection) -> list[Event]:
    """The events up to the end of a response, signs of life left out."""
    found: list[Event] = []
    while not found or found[-1]["type"] not in ENDS:
        found.append(json.loads(await socket.recv()))
    return [event for event in found if event["type"] != "keepalive"]


async def turn(socket: ClientConnection, **body: Any) -> list[Event]:
    await socket.send(json.dumps({"type": "response.create", "temperature": 0} | body))
    return await events(socket)


async def begin(socket: ClientConnection, *, tokens: int) -> None:
    """Ask for an answer so long, and read how it begins."""
    long = {"type": "string", "minLength": 5 * tokens, "pattern": "^[a-z ]*$"}
    schema = {"type": "object", "properties": {"text": long}, "required": ["text"]}
    form = {"format": {"type": "json_schema", "name": "long", "schema": schema}}
    body = {"type": "response.create", "input": "Hi", "text": form, "max_output_tokens": tokens}
    await socket.send(json.dumps(body))
    while (kind := json.loads(await socket.recv())["type"]) != "response.output_text.delta":
        assert kind not in ENDS


def text(response: Event) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_events_are_those_of_the_stream(server: LiveServer):
    asked = {"input": QUESTION, "temperature": 0, "store": False}
    async with opened(server) as socket, httpx.AsyncClient() as client:
        told = await turn(socket, **asked)
        body = asked | {"stream": True}
        streamed = (await client.post(f"{server.url}/v1/responses", json=body)).text
    lines = [line.removeprefix("data: ") for line in streamed.split("\n") if "data: {" in line]
    # How many deltas a text comes in depends on when its reader reads.
    kinds = ([each["type"] for each in found] for found in (told, map(json.loads, lines)))
    one, other = ([kind for kind, _ in groupby(each)] for each in kinds)
    assert one == other
    assert text(told[-1]["response"]) == ANSWER


async def test_a_body_may_be_nested_in_its_event(server: LiveServer):
    async with opened(server) as socket:
        body = {"input": QUESTION, "temperature": 0}
        await socket.send(json.dumps({"type": "response.create", "response": body}))
        assert text((await events(socket))[-1]["response"]) == ANSWER


async def test_the_last_response_is_gone_on_from_though_it_is_not_kept(server: LiveServer):
    async with opened(server) as socket, httpx.AsyncClient() as client:
        first = (await turn(socket, input=QUESTION, store=False))[-1]["response"]
        onward = {"input": "And how do I start it?", "store": False}
        second = (await turn(socket, previous_response_id=first["id"], **onward))[-1]["response"]
        said = [{"role": "user", "content": QUESTION}, *first["output"]]
        whole = [*said, {"role": "user", "content": onward["input"]}]
        full = (await turn(socket, input=whole, store=False))[-1]["response"]
        assert second["usage"]["input_tokens"] == full["usage"]["input_tokens"]
        gone = (await turn(socket, previous_response_id=first["id"], **onward))[-1]
        assert (await client.get(f"{server.url}/v1/responses/{first['id']}")).status_code == 404
    assert gone["status"] == 400
    assert gone["error"]["code"] == "previous_response_not_found"
    assert gone["error"]["param"] == "previous_response_id"


async def test_what_one_connection_holds_another_does_not_find(server: LiveServer):
    async with opened(server) as one, opened(server) as other:
        first = (await turn(one, input=QUESTION, store=False))[-1]["response"]
        end = (await turn(other, previous_response_id=first["id"], input="And?"))[-1]
    assert end["error"]["code"] == "previous_response_not_found"


async def test_a_response_that_is_kept_is_found_by_any_connection_and_over_http(server: LiveServer):
    async with opened(server) as one:
        first = (await turn(one, input=QUESTION))[-1]["response"]
    async with opened(server) as other, httpx.AsyncClient() as client:
        end = (await turn(other, previous_response_id=first["id"], input="And?"))[-1]
        assert (await client.get(f"{server.url}/v1/responses/{first['id']}")).json() == first
    assert end["type"] == "response.completed"


@pytest.mark.parametrize("given", [[], [{"role": "user", "content": "Once upon a time"}]])
async def test_a_prewarmed_prompt_is_in_the_cache(server: LiveServer, given: list[Event]):
    rules = f"Rules {len(given)}: " + "be brief, be kind, " * 20
    async with opened(server) as socket:
        warm = await turn(socket, instructions=rules, input=given, generate=False, store=False)
        assert [event["type"] for event in warm][1:] == [
            "response.in_progress",
            "response.completed",
        ]
        done = warm[-1]["response"]
        assert done["output"] == []
        assert done["usage"]["input_tokens"] > 50
        assert done["usage"]["output_tokens"] == 0
        end = await turn(
            socket, instructions=rules, input=QUESTION, previous_response_id=done["id"], store=False
        )
    assert end[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 50


async def test_frames_are_answered_one_after_the_other(server: LiveServer):
    async with opened(server) as socket:
        for number in range(3):
            body = {"type": "response.create", "input": QUESTION, "metadata": {"n": str(number)}}
            await socket.send(json.dumps(body))
        ends = [(await events(socket))[-1]["response"]["metadata"] for _ in range(3)]
    assert ends == [{"n": "0"}, {"n": "1"}, {"n": "2"}]


async def test_what_is_wrong_is_an_error_with_its_status_and_the_connection_stays(
    server: LiveServer,
):
    async with opened(server) as socket:
        for body, status, code in (
            ({"input": 5}, 400, "invalid_parameter"),
            ({"input": "x", "model": "nobody/none"}, 404, "model_not_found"),
            ({"input": "x", "stream_id": "a"}, 400, "unsupported_parameter"),
            ({"input": "x", "top_p": 5}, 400, "invalid_parameter"),
        ):
            end = (await turn(socket, **body))[-1]
            assert (end["type"], end["status"], end["error"]["code"]) == ("error", status, code)
            assert end["headers"]["x-request-id"]
        assert (await turn(socket, input=QUESTION))[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    "frame",
    ["", "{", "[]", "5", "{}", '{"type": "response.steer"}', '{"type": 5}', b"{}"],
    ids=repr,
)
async def test_a_frame_that_is_no_request_is_refused(server: LiveServer, frame: str | bytes):
    async with opened(server) as socket:
        await socket.send(frame)
        end = json.loads(await socket.recv())
        assert (end["type"], end["status"]) == ("error", 400)
        assert (await turn(socket, input=QUESTION))[-1]["type"] == "response.completed"


async def test_codexs_receipt_for_a_response_is_no_error(server: LiveServer):
    async with opened(server) as socket:
        await socket.send(json.dumps({"type": "response.processed", "response_id": "resp_1"}))
        assert (await turn(socket, input=QUESTION))[0]["type"] == "response.created"


async def test_half_of_a_character_is_replaced(server: LiveServer):
    async with opened(server) as socket:
        await socket.send('{"type": "response.create", "input": "a \\ud83d half"}')
        assert (await events(socket))[-1]["type"] == "response.completed"


async def test_a_client_that_hangs_up_cancels_its_response(server: LiveServer):
    async with opened(server) as socket, httpx.AsyncClient() as client:
        await begin(socket, tokens=7000)
        running = f"{server.url}/v1/admin/requests"
        assert (await client.get(running)).json()["data"]
        socket.transport.abort()
        while (await client.get(running)).json()["data"]:
            pass


async def test_openais_sdk_connects(server: LiveServer):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
    async with client, client.responses.connect() as connection:
        await connection.response.create(model="mlx-manager/demo", input=QUESTION, temperature=0)
        async for event in connection:
            if event.type == "response.completed":
                assert event.response.output_text == ANSWER
                break


async def test_a_page_of_another_site_may_not_connect(server: LiveServer):
    with pytest.raises(InvalidStatus) as refused:
        async with connect(address(server), origin="https://evil.example"):  # type: ignore[arg-type]
            pass
    assert refused.value.response.status_code == 403
    async with connect(address(server), origin=server.url) as socket:  # type: ignore[arg-type]
        assert (await turn(socket, input=QUESTION))[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("path", "status"), [("/", 200), ("/v1/chat/completions", 405), ("/v1/responses/x", 404)]
)
async def test_no_other_path_is_a_websocket(server: LiveServer, path: str, status: int):
    with pytest.raises(InvalidStatus) as answered:
        async with connect(server.url.replace("http", "ws", 1) + path):
            pass
    assert answered.value.response.status_code == status


async def test_a_get_that_offers_nothing_is_405(server: LiveServer):
    async with httpx.AsyncClient() as client:
        response = await client.get(f"{server.url}/v1/responses")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


async def test_426_where_websockets_are_switched_off(serve):
    offer = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    async with serve(websockets=False) as client:
        refused = await client.get("/v1/responses", headers=offer)
        assert (await client.post("/v1/responses", json={"input": QUESTION})).status_code == 200
    assert (refused.status_code, refused.headers["upgrade"]) == (426, "websocket")
    assert refused.json()["error"]["code"] == "upgrade_required"


async def test_keys_and_their_limits_hold_for_each_response(tmp_path: Path):
    log = tmp_path / "log.txt"
    with live_server(log, api_key="secret", key_requests_per_minute=2) as server:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(address(server)):
                pass
        assert refused.value.response.status_code == 401
        async with opened(server, Authorization="Bearer secret") as socket:
            for _ in range(2):
                assert (await turn(socket, input=QUESTION))[-1]["type"] == "response.completed"
            end = (await turn(socket, input=QUESTION))[-1]
            assert (end["status"], end["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(end["headers"]["retry-after"]) >= 1
        async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}) as client:
            metrics = (await client.get(f"{server.url}/metrics")).text
    assert re.search(r'http_requests_total\{handler="/v1/responses",.*status="2.* 2\.0', metrics)
    lines = [line for line in log.read_text().splitlines() if "POST /v1/responses 200" in line]
    assert len(lines) == 2
    assert len({line.rsplit(" ", 1)[1] for line in lines}) == 2


async def test_a_server_that_goes_out_of_service_closes_connections(tmp_path: Path):
    with live_server(tmp_path / "log.txt", drain_seconds=20) as server:
        async with opened(server) as idle, opened(server) as busy:
            await begin(busy, tokens=200)
            server.process.terminate()
            with pytest.raises(ConnectionClosed) as closed:
                await idle.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
            # What has begun is finished first.
            assert (await events(busy))[-1]["type"] == "response.incomplete"
            with pytest.raises(ConnectionClosed) as closed:
                await busy.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012


async def test_silence_is_broken_by_signs_of_life(server: LiveServer):
    async with opened(server) as socket:
        body = {"type": "response.create", "input": "word " * 3000, "max_output_tokens": 8}
        await socket.send(json.dumps(body))
        kinds = [json.loads(await socket.recv())["type"] for _ in range(2)]
    assert "keepalive" in kinds

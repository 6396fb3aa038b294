"""Pictures on their way from a body of each protocol to a model that sees."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import data_url, in_base64, picture
from scripted import MODEL, ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.config import ImageLimits, MLXServerSettings
from mlx_manager.mlx_server.core import Conversation, Image
from mlx_manager.mlx_server.errors import InvalidRequest, UnsupportedParameter
from mlx_manager.mlx_server.images.hosts import Hosts
from mlx_manager.mlx_server.images.reader import ImageReader
from mlx_manager.mlx_server.main import create_app
from mlx_manager.mlx_server.observability import logs
from mlx_manager.mlx_server.protocols.images import places, replace_images, sources
from mlx_manager.mlx_server.services.inference import generate_chat_completion

RED, BLUE = picture(), picture("JPEG", (5, 9), (0, 0, 255))
NAMES = {RED: "RED", BLUE: "BLUE"}
MEDIA = {"RED": (RED, "image/png"), "BLUE": (BLUE, "image/jpeg")}
SHOT = {
    "type": "computer_call_output",
    "call_id": "d",
    "output": {"type": "computer_screenshot", "image_url": data_url(RED)},
}


def url(name: str) -> str:
    return data_url(*MEDIA[name])


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def of_chat(name: str, **beside: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(name)} | beside}


def of_responses(name: str, **beside: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url(name)} | beside


def of_messages(name: str, **beside: Any) -> dict[str, Any]:
    data, media = MEDIA[name]
    source = {"type": "base64", "media_type": media, "data": in_base64(data)}
    return {"type": "image", "source": source} | beside


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


CALL: dict[str, Any] = {
    "id": "c",
    "type": "function",
    "function": {"name": "look", "arguments": "{}"},
}
USE = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
}
FUNCTION_CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SEEN: dict[str, tuple[str, dict[str, Any], list[tuple[str, ...]]]] = {
    "chat": (
        CHAT,
        {"messages": [user(text("a"), text("b"), of_chat("RED"), text("c"), of_chat("BLUE"))]},
        [("user", "a\nb", "RED", "c", "BLUE")],
    ),
    "chat, a plain string and a detail": (
        CHAT,
        {
            "messages": [
                user({"type": "image_url", "image_url": url("RED")}, of_chat("BLUE", detail="low"))
            ]
        },
        [("user", "RED", "BLUE")],
    ),
    "chat, earlier messages and results": (
        CHAT,
        {
            "messages": [
                user(of_chat("RED"), text("What?")),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [text("here"), of_chat("BLUE")]},
            ]
        },
        [("user", "RED", "What?"), ("assistant",), ("tool", "here", "BLUE")],
    ),
    "responses": (
        RESPONSES,
        {
            "input": [
                user({"type": "input_text", "text": "a"}, of_responses("RED", detail="high")),
                FUNCTION_CALL,
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [of_responses("BLUE"), {"type": "input_text", "text": "there"}],
                },
                {
                    "type": "custom_tool_call_output",
                    "call_id": "e",
                    "output": [of_responses("RED")],
                },
            ]
        },
        [("user", "a", "RED"), ("assistant",), ("tool", "BLUE", "there"), ("tool", "RED")],
    ),
    "responses, a computer's screen": (
        RESPONSES,
        {"input": [{"role": "user", "content": "Click."}, SHOT]},
        [
            ("user", "Click."),
            (
                "user",
                'computer_call_output: {"output": {"type": "computer_screenshot", '
                '"image_url": "(an image)"}}',
                "RED",
            ),
        ],
    ),
    "messages": (
        MESSAGES,
        {
            "messages": [
                user(of_messages("RED"), text("What?")),
                {"role": "assistant", "content": "Red."},
                user(
                    text("And"), of_messages("BLUE", cache_control={"type": "ephemeral"}), text("?")
                ),
            ]
        },
        [("user", "RED", "What?"), ("assistant", "Red."), ("user", "And", "BLUE", "?")],
    ),
    "messages, a screenshot in a tool's result": (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "Look!"},
                USE,
                user(
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [text("a"), of_messages("RED"), text("b")],
                    },
                    text("See?"),
                ),
            ]
        },
        [("user", "Look!"), ("assistant",), ("tool", "a", "RED", "b"), ("user", "See?")],
    ),
    "messages, a result that is an error": (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "Look!"},
                USE,
                user(
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "is_error": True,
                        "content": [of_messages("RED")],
                    }
                ),
            ]
        },
        [("user", "Look!"), ("assistant",), ("tool", "Error: ", "RED")],
    ),
    "messages, neighbours of one role": (
        MESSAGES,
        {
            "messages": [
                user(text("a"), of_messages("RED")),
                {"role": "user", "content": "b"},
                user(of_messages("BLUE")),
            ]
        },
        [("user", "a", "RED", "b", "BLUE")],
    ),
    "messages, a document": (
        MESSAGES,
        {
            "messages": [
                user(
                    {
                        "type": "document",
                        "title": "Plan",
                        "source": {
                            "type": "content",
                            "content": [text("a"), of_messages("RED"), text("b")],
                        },
                    }
                )
            ]
        },
        [("user", "Title: Plan\na", "RED", "b")],
    ),
    "ollama": (
        "/api/chat",
        {
            "messages": [
                {"role": "user", "content": "What?", "images": [in_base64(RED), url("BLUE")]},
                {"role": "assistant", "content": "Red."},
                {"role": "user", "content": "", "images": [in_base64(BLUE)]},
            ]
        },
        [("user", "RED", "BLUE", "What?"), ("assistant", "Red."), ("user", "BLUE")],
    ),
    "ollama, by a name with a tag": (
        "/api/chat",
        {
            "model": "mlx-manager/demo:latest",
            "messages": [{"role": "user", "content": "What?", "images": [in_base64(RED)]}],
        },
        [("user", "RED", "What?")],
    ),
    "ollama generate": (
        "/api/generate",
        {"prompt": "What?", "system": "Be brief.", "images": [in_base64(RED)]},
        [("system", "Be brief."), ("user", "RED", "What?")],
    ),
    "ollama generate, without a prompt": (
        "/api/generate",
        {"images": [in_base64(RED)]},
        [("user", "RED")],
    ),
}


def few(path: str) -> dict[str, Any]:
    if path.startswith("/api"):
        return {"options": {"num_predict": 4}, "stream": False}
    return {"max_output_tokens" if path == RESPONSES else "max_tokens": 4}


def seen_by(pool: ScriptedPool) -> list[tuple[str, ...]]:
    """The last prompt: of each message the role, then its texts and pictures by their names."""
    prompt = pool.backend.requests[-1].prompt
    assert isinstance(prompt, Conversation)
    return [
        (
            message.role,
            *(NAMES[part.data] if isinstance(part, Image) else part for part in message.parts),
        )
        for message in prompt.messages
    ]


def seeing() -> ScriptedPool:
    return ScriptedPool(ScriptedBackend(lambda _: says("Red", ".")), seeing=True)


@pytest.mark.parametrize("name", SEEN)
async def test_pictures_reach_the_model_in_their_order(serve: Any, name: str):
    path, body, expected = SEEN[name]
    pool = seeing()
    async with serve(pool=pool) as client:
        answer = await client.post(path, json=body | few(path))
    assert answer.status_code == 200, answer.text
    assert seen_by(pool) == expected
    assert "x-unknown-fields" not in answer.headers


@pytest.mark.parametrize("name", ["chat", "responses", "messages", "ollama"])
async def test_streamed_answers_see_the_same(serve: Any, name: str):
    path, body, expected = SEEN[name]
    pool = seeing()
    async with serve(pool=pool) as client:
        answer = await client.post(path, json=body | few(path) | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert "Red" in answer.text
    assert seen_by(pool) == expected


BROKEN = picture(size=(300, 200))[:400]
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "cut short": ({"url": data_url(BROKEN)}, "url", "broken PNG"),
    "disguised": (
        {"url": data_url(BLUE)},
        "url",
        "declared as image/png, but its bytes are a JPEG",
    ),
    "no picture": ({"url": data_url(b"hello")}, "url", "is no picture"),
    "an SVG": (
        {"url": data_url(b"<svg/>", "image/svg+xml")},
        "url",
        "PNG, JPEG, WebP and GIF are read",
    ),
    "no base64": ({"url": "data:image/png;base64,?"}, "url", "not valid base64"),
    "a file": ({"url": "file:///etc/passwd"}, "url", "must be a data URL"),
    "an address": ({"url": "https://example.com/a.png"}, "url", "MLX_SERVER_IMAGE_HOSTS"),
    "too many bytes": ({"url": data_url(bytes(2**20 + 1))}, "url", "MLX_SERVER_MAX_IMAGE_MB"),
    "too many pixels": (
        {"url": data_url(picture(size=(400, 300)))},
        "url",
        "MLX_SERVER_MAX_IMAGE_MEGAPIXELS",
    ),
    "a detail": ({"url": data_url(RED), "detail": "sharp"}, "detail", "auto, low, high, original"),
    "no string": ({"url": 5}, "url", "should be a string"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_wrong_with_a_picture_is_said_with_its_place(serve: Any, name: str):
    given, field, said = WRONG[name]
    part = {"type": "image_url", "image_url": given}
    body = {
        "messages": [user(text("a")), {"role": "assistant", "content": "b"}, user(text("c"), part)]
    }
    pool = seeing()
    async with serve(pool=pool, max_image_mb=1, max_image_megapixels=0.1) as client:
        answer = await client.post(CHAT, json=body)
    assert answer.status_code in (400, 413), answer.text
    error = answer.json()["error"]
    assert error["param"] == f"messages[2].content[1].image_url.{field}"
    assert said in error["message"]
    assert not pool.backend.requests


RESULT = {"type": "tool_result", "tool_use_id": "c"}
PLACES = [
    (CHAT, {"messages": [user({"type": "image_url"})]}, "messages[0].content[0].image_url"),
    (
        CHAT,
        {"messages": [user({"type": "image_url", "image_url": "data:,"})]},
        "messages[0].content[0].image_url",
    ),
    (CHAT, {"messages": [user(of_responses("RED"))]}, "messages[0].content[0]"),
    (RESPONSES, {"input": [user(of_chat("RED"))]}, "input[0].content[0]"),
    (MESSAGES, {"messages": [user(of_chat("RED"))]}, "messages[0].content[0]"),
    (
        RESPONSES,
        {"input": [user({"type": "input_image", "file_id": "file_1"})]},
        "input[0].content[0].file_id",
    ),
    (
        RESPONSES,
        {"input": [user(of_responses("RED", file_id="file_1"))]},
        "input[0].content[0].file_id",
    ),
    (
        RESPONSES,
        {"input": [user({"type": "input_image", "image_url": data_url(BROKEN)})]},
        "input[0].content[0].image_url",
    ),
    (RESPONSES, {"input": [user({"type": "input_image"})]}, "input[0].content[0].image_url"),
    (
        RESPONSES,
        {
            "input": [
                FUNCTION_CALL,
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": "x"}],
                },
            ]
        },
        "input[1].output[0].image_url",
    ),
    (
        RESPONSES,
        {"input": [SHOT | {"output": {"type": "computer_screenshot", "file_id": "f"}}]},
        "input[0].output.file_id",
    ),
    (
        MESSAGES,
        {"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
        "messages[0].content[0].source.file_id",
    ),
    (
        MESSAGES,
        {"messages": [user({"type": "image", "source": {"type": "url", "url": "x"}})]},
        "messages[0].content[0].source.url",
    ),
    (MESSAGES, {"messages": [user({"type": "image"})]}, "messages[0].content[0].source"),
    (
        MESSAGES,
        {"messages": [user({"type": "image", "source": {"type": "base64", "data": "AAAA"}})]},
        "messages[0].content[0].source.media_type",
    ),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "a"},
                USE,
                user(
                    RESULT
                    | {
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": in_base64(BLUE),
                                },
                            }
                        ]
                    }
                ),
            ]
        },
        "messages[2].content[0].content[0].source.data",
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "a", "images": [in_base64(RED), "?"]}]},
        "messages[0].images[1]",
    ),
    ("/api/generate", {"prompt": "a", "images": [5]}, "images[0]"),
    ("/api/generate", {"prompt": "a", "raw": True, "images": [in_base64(RED)]}, "images"),
]


@pytest.mark.parametrize(("path", "body", "place"), PLACES)
async def test_each_protocol_names_the_place_of_a_wrong_picture(
    serve: Any, path: str, body: dict[str, Any], place: str
):
    pool = seeing()
    async with serve(pool=pool) as client:
        answer = await client.post(path, json=body | few(path))
    assert answer.status_code == 400, answer.text
    assert f"`{place}`" in answer.text
    assert not pool.backend.requests


HOSTED = [
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "a"},
                {"type": "mcp_call", "id": "m", "output": [of_responses("RED")], "name": "shot"},
                {"type": "web_search_call", "content": [of_responses("RED")], "id": "w"},
            ]
        },
    ),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "mcp_tool_result",
                            "tool_use_id": "c",
                            "content": [of_messages("RED")],
                        },
                        text("b"),
                    ],
                },
                {"role": "user", "content": "c"},
            ]
        },
    ),
]


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize(("path", "body"), HOSTED)
async def test_records_of_hosted_tools_stay_text(
    serve: Any, path: str, body: dict[str, Any], sees: bool
):
    pool = seeing()
    pool.seeing = sees
    async with serve(pool=pool) as client:
        answer = await client.post(path, json=body | few(path))
    assert answer.status_code == 200, answer.text
    prompt = pool.backend.requests[-1].prompt
    assert isinstance(prompt, Conversation)
    told = "".join(message.text for message in prompt.messages)
    assert in_base64(RED)[:40] not in told
    assert not any(message.images for message in prompt.messages)


_SHAPES: list[Any] = [
    *(
        "user",
        "assistant",
        "image",
        "image_url",
        "input_image",
        "tool_result",
        "document",
        "content",
    ),
    *("computer_call_output", "computer_screenshot", "base64", "file", "data:,", "http://a"),
]
ODD: list[Any] = [None, 5, "x", [], {}, [[]], {"type": []}, {"type": {}}, {"url": []}]


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["messages", "input", "images", "prompt", "model"]),
        st.recursive(
            st.sampled_from([*ODD, *_SHAPES]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["type", "role", "content", "output", "source", "images", "image_url"]
                    ),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        ),
    ),
    st.booleans(),
)
def test_any_json_has_its_places(body: dict[str, Any], beside: bool):
    """Or none: nothing but a refusal by name comes of it."""
    for policy in ("history", "always"):
        copied = copy.deepcopy(body)
        replace_images(places(copied, beside=beside), policy)
    found = places(body, beside=beside)
    named: str | None = "input"
    try:
        sources(found)
    except InvalidRequest as error:
        named = error.param
    assert named


async def test_pictures_of_a_model_that_sees_are_counted(serve: Any):
    pool = seeing()
    ollama = {"messages": [{"role": "user", "content": "a", "images": [in_base64(RED)] * 3}]}
    async with serve(pool=pool, max_images=2) as client:
        for path, body in (
            (CHAT, {"messages": [user(*[of_chat("RED")] * 3)]}),
            ("/api/chat", ollama),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 413, answer.text
            assert "`messages` has 3 images; this server accepts 2" in answer.text


async def test_counting_endpoints_read_pictures(serve: Any):
    pool = seeing()
    _, of_messages_, _ = SEEN["messages"]
    _, of_responses_, _ = SEEN["responses"]
    _, of_chat_, _ = SEEN["chat"]
    async with serve(pool=pool) as client:
        counted = await client.post("/v1/messages/count_tokens", json=of_messages_)
        assert counted.json() == {"input_tokens": 5}, counted.text
        counted = await client.post("/v1/responses/input_tokens", json=of_responses_)
        assert counted.json()["input_tokens"] == 5, counted.text
        counted = await client.post("/v1/tokenize", json=of_chat_)
        assert counted.json()["count"] == 4, counted.text


# -- kept responses -------------------------------------------------------------------------------


async def test_a_kept_conversation_brings_its_pictures_again(serve: Any):
    pool = seeing()
    said = [user(of_responses("RED"), {"type": "input_text", "text": "What?"}), SHOT]
    async with serve(pool=pool) as client:
        first = (await client.post(RESPONSES, json={"input": said})).json()
        items = (await client.get(f"{RESPONSES}/{first['id']}/input_items?order=asc")).json()[
            "data"
        ]
        assert items[0]["content"] == [
            {"type": "input_image", "image_url": url("RED"), "detail": "auto"},
            {"type": "input_text", "text": "What?"},
        ]
        assert items[1]["output"] == SHOT["output"]
        more = {"input": [user(of_responses("BLUE"))], "previous_response_id": first["id"]}
        second = (await client.post(RESPONSES, json=more)).json()
        begun = [("user", "RED", "What?"), seen_by(pool)[1], ("assistant", "Red.")]
        assert seen_by(pool) == [*begun, ("user", "BLUE")]
        again = {"input": "Sure?", "previous_response_id": second["id"]}
        assert (await client.post(RESPONSES, json=again)).status_code == 200
        assert seen_by(pool) == [*begun, ("user", "BLUE"), ("assistant", "Red."), ("user", "Sure?")]
        refers = {"input": [{"type": "item_reference", "id": items[0]["id"]}]}
        assert (await client.post(RESPONSES, json=refers)).status_code == 200
        assert seen_by(pool) == [("user", "RED", "What?")]
        sent_back = {"input": [*items, {"role": "user", "content": "Sure?"}]}
        assert (await client.post(RESPONSES, json=sent_back)).status_code == 200
        assert seen_by(pool)[0] == ("user", "RED", "What?")
        compacted = (await client.post(f"{RESPONSES}/compact", json={"input": said})).json()
        assert compacted["output"][0]["content"][0]["image_url"] == url("RED")


async def test_a_kept_conversation_counts_all_its_pictures(serve: Any):
    async with serve(pool=seeing(), max_images=2) as client:
        asked = {"input": [user(of_responses("RED"), of_responses("BLUE"))]}
        first = (await client.post(RESPONSES, json=asked)).json()
        more = {"input": [user(of_responses("RED"))], "previous_response_id": first["id"]}
        answer = await client.post(RESPONSES, json=more)
    assert answer.status_code == 413
    assert "`input` and `previous_response_id` have 3 images" in answer.text


async def test_a_model_that_sees_none_goes_on_from_kept_pictures_with_a_line(serve: Any):
    pool = seeing()
    async with serve(pool=pool) as client:
        said = {"input": [user(of_responses("RED"), {"type": "input_text", "text": "What?"}), SHOT]}
        first = (await client.post(RESPONSES, json=said)).json()
        pool.seeing = False
        more = {"input": "And?", "previous_response_id": first["id"]}
        answer = await client.post(RESPONSES, json=more)
        assert answer.status_code == 200, answer.text
        prompt = pool.backend.requests[-1].prompt
        assert isinstance(prompt, Conversation)
        assert "There is an image here" in prompt.messages[0].text
        assert "(an image)" in prompt.messages[1].text
        assert not any(message.images for message in prompt.messages)
        # What is kept stays whole for a model that sees.
        pool.seeing = True
        await client.post(RESPONSES, json=more)
        assert seen_by(pool)[0] == ("user", "RED", "What?")


async def test_a_model_that_sees_none_reads_that_there_is_a_screenshot(serve: Any):
    pool = seeing()
    pool.seeing = False
    async with serve(pool=pool) as client:
        answer = await client.post(
            RESPONSES, json={"input": [{"role": "user", "content": "a"}, SHOT]}
        )
    assert answer.status_code == 200, answer.text
    assert seen_by(pool)[1][1].endswith('"image_url": "(an image)"}}')


# -- hosts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
async def test_pictures_are_fetched_from_hosts_that_the_owner_allows(name: str):
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + RED)
        writer.close()

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    server = await asyncio.start_server(page, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    hosts = Hosts((f"pics.example:{port}",), resolve=resolve, permits=lambda address: True)
    pool = seeing()
    app = create_app(MLXServerSettings(), pool, images=ImageReader(ImageLimits(), hosts))
    place = f"http://pics.example:{port}/red"
    body = {
        "chat": (CHAT, "messages", {"type": "image_url", "image_url": {"url": place}}),
        "responses": (RESPONSES, "input", {"type": "input_image", "image_url": place}),
        "messages": (
            MESSAGES,
            "messages",
            {"type": "image", "source": {"type": "url", "url": place}},
        ),
    }
    path, field, part = body[name]
    async with (
        server,
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client,
    ):
        await app.state.server.started.wait()
        answer = await client.post(path, json={field: [user(part)]} | few(path))
    assert answer.status_code == 200, answer.text
    assert seen_by(pool) == [("user", "RED")]


# -- nothing shows a picture -----------------------------------------------------------------------


def as_configured(record: logging.LogRecord) -> bool:
    """As `logs.configure` has it: libraries whose talk is none of ours only warn."""
    return record.levelno >= logging.WARNING or not record.name.startswith(logs.NOISY)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.handler.addFilter(as_configured)
    with caplog.at_level(logging.DEBUG):
        yield caplog
    caplog.handler.removeFilter(as_configured)


async def test_the_log_of_prompts_names_a_picture_and_does_not_print_it(serve: Any, told: Any):
    async with serve(pool=seeing(), log_prompts=True) as client:
        await client.post(CHAT, json={"messages": [user(text("Look:"), of_chat("RED"))]})
    assert "Look:<image " in told.text
    assert in_base64(RED)[:40] not in told.text
    assert "IHDR" not in told.text


OWN = {CHAT: of_chat, RESPONSES: of_responses}
parts = st.one_of(
    st.sampled_from(["RED", "BLUE"]),
    st.sampled_from(["RED", "BLUE"]),
    st.just(of_chat("RED")),
    st.just(of_responses("RED")),
    st.just(
        of_messages("RED", source={"type": "base64", "media_type": "image/gif", "data": "A" * 99})
    ),
    st.just({"type": "input_file", "file_data": url("RED")}),
    st.just({"type": "document", "source": {"type": "base64", "data": in_base64(RED)}}),
    st.just({"type": "image_url", "image_url": {"url": [url("RED")]}}),
    st.just({"type": "image_url", "image_url": {"url": url("RED").replace("png", "gif")}}),
    st.just({"type": "image_url", "image_url": {"url": url("RED")[:-300]}}),
    st.just({"type": "image_url", "image_url": {"url": "x" + url("RED")}}),
    st.just({"type": "text", "text": 5, "image_url": url("RED")}),
    st.just(text("hello")),
)
MARKS = [in_base64(RED)[24:64], in_base64(BLUE)[24:64], "IHDR", "JFIF", "A" * 40]


@settings(max_examples=60, deadline=None)
@given(
    path=st.sampled_from([CHAT, RESPONSES, MESSAGES, "/api/chat", "/v1/messages/count_tokens"]),
    content=st.lists(parts, min_size=1, max_size=4),
    role=st.sampled_from(["user", "user", "assistant", "tool", "system"]),
    beside=st.sampled_from([{}, {"images": [in_base64(RED)]}, {"images": ["A" * 99]}]),
    wrong=st.sampled_from([{}, {"temperature": "x"}, {"stream": True}]),
    sees=st.booleans(),
)
def test_no_error_no_log_and_no_record_prints_a_picture(
    path: str, content: list[Any], role: str, beside: Any, wrong: Any, sees: bool
):
    """Errors, the log with prompts, the audit log, and what was asked lately."""
    field = "input" if path == RESPONSES else "messages"
    shape = OWN.get(path, of_messages)
    content = [shape(part) if isinstance(part, str) else part for part in content]
    body = {field: [{"role": role, "content": content} | beside]} | few(path) | wrong
    written: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: written.append(logging.Formatter().format(record))  # type: ignore[method-assign]

    async def ask() -> str:
        pool = seeing()
        pool.seeing = sees
        app = create_app(MLXServerSettings(log_prompts=True), pool)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("127.0.0.1", 1))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
        ):
            await app.state.server.started.wait()
            answer = await client.post(path, json=body)
            audit = await client.get("/v1/admin/audit")
            rows = await client.get("/v1/admin/requests")
            assert (audit.status_code, rows.status_code) == (200, 200)
        return answer.text + json.dumps(dict(answer.headers)) + audit.text + rows.text

    handler.addFilter(as_configured)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        shown = asyncio.run(ask())
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    for mark in MARKS:
        assert mark not in shown
        assert not any(mark in line for line in written)


# -- scripts --------------------------------------------------------------------------------------


async def test_scripts_bring_pictures_as_over_http():
    pool = seeing()
    await generate_chat_completion(MODEL, [user(text("a"), of_chat("RED"))], pool=pool)  # type: ignore[arg-type]
    assert seen_by(pool) == [("user", "a", "RED")]
    pool.seeing = False
    with pytest.raises(UnsupportedParameter, match="takes text only"):
        await generate_chat_completion(MODEL, [user(of_chat("RED"))], pool=pool)  # type: ignore[arg-type]


def test_the_pictures_of_this_file_are_what_they_say():
    assert base64.b64decode(url("RED").partition(",")[2]) == RED

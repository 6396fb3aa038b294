from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from here import served_here

from mlx_manager.mlx_server.protocols.images import LINE, places, replace_images

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
OF_CHAT = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
OF_RESPONSES = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
OF_MESSAGES = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
}
CALL: dict[str, Any] = {
    "id": "c",
    "type": "function",
    "function": {"name": "look", "arguments": "{}"},
}
USE = {"type": "tool_use", "id": "c", "name": "look", "input": {}}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


ANSWER = {"role": "assistant", "content": "I see."}
SEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, an earlier message": (
        "/v1/chat/completions",
        {"messages": [user(text("Look:"), OF_CHAT), ANSWER, user(text("And?"))]},
    ),
    "chat, a tool's result": (
        "/v1/chat/completions",
        {
            "messages": [
                user(text("Look!")),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [text("here"), OF_CHAT]},
            ]
        },
    ),
    "responses, an earlier message": (
        "/v1/responses",
        {"input": [user(OF_RESPONSES), ANSWER, {"role": "user", "content": "And?"}]},
    ),
    "responses, a tool's result": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "Look!"},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [OF_RESPONSES]},
            ]
        },
    ),
    "messages, an earlier message": (
        "/v1/messages",
        {"messages": [user(OF_MESSAGES), ANSWER, user(text("And?"))]},
    ),
    "messages, a tool's result": (
        "/v1/messages",
        {
            "messages": [
                user(text("Look!")),
                {"role": "assistant", "content": [USE]},
                user({"type": "tool_result", "tool_use_id": "c", "content": [OF_MESSAGES]}),
            ]
        },
    ),
    "ollama, an earlier message": (
        "/api/chat",
        {
            "messages": [
                {"role": "user", "content": "Look:", "images": [PIXEL]},
                ANSWER,
                {"role": "user", "content": "And?"},
            ]
        },
    ),
    "ollama, a tool's result": (
        "/api/chat",
        {
            "messages": [
                {"role": "user", "content": "Look!"},
                {"role": "assistant", "tool_calls": [{"function": CALL["function"]}]},
                {"role": "tool", "content": "here", "images": [PIXEL]},
            ]
        },
    ),
}
NEWEST: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [user(text("Look:"), OF_CHAT)]}),
    "responses": ("/v1/responses", {"input": [user(OF_RESPONSES)]}),
    "messages": ("/v1/messages", {"messages": [user(OF_MESSAGES)]}),
    "ollama chat": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "Look:", "images": [PIXEL]}]},
    ),
    "ollama generate": ("/api/generate", {"prompt": "Look:", "images": [PIXEL]}),
}


@pytest.fixture(scope="module", params=["history", "never", "always"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, httpx.Client]]:
    policy: str = request.param
    with served_here(images_as_text=policy) as client:
        yield policy, client


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    most = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    few = {"options": {"num_predict": 2}, "stream": False} if path.startswith("/api") else {most: 2}
    return client.post(path, json=body | few)


@pytest.mark.parametrize("name", SEEN)
def test_a_picture_of_the_past_is_a_line_unless_the_owner_forbids_it(
    served: tuple[str, httpx.Client], name: str
):
    policy, client = served
    path, body = SEEN[name]
    answer = post(client, path, body)
    assert answer.status_code == (400 if policy == "never" else 200), answer.text


@pytest.mark.parametrize("name", NEWEST)
def test_a_picture_of_the_newest_message_is_refused_unless_the_owner_allows_it(
    served: tuple[str, httpx.Client], name: str
):
    policy, client = served
    path, body = NEWEST[name]
    answer = post(client, path, body)
    assert answer.status_code == (200 if policy == "always" else 400), answer.text
    if policy != "always":
        assert "takes text only" in answer.text


def test_the_model_is_told_that_there_is_a_picture(served: tuple[str, httpx.Client]):
    policy, client = served
    _, body = SEEN["chat, an earlier message"]
    answer = client.post("/v1/apply-template", json=body)
    assert (LINE in answer.text) == (policy != "never")


def test_counting_reads_what_an_answer_would(served: tuple[str, httpx.Client]):
    policy, client = served
    _, body = SEEN["messages, a tool's result"]
    answer = client.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == (400 if policy == "never" else 200)


def test_beside_a_tools_result_a_users_own_picture_is_still_refused():
    result = {"type": "tool_result", "tool_use_id": "c", "content": [dict(OF_MESSAGES)]}
    body = {"messages": [user(result, OF_MESSAGES)]}
    replace_images(places(body), "history")
    assert body["messages"][0]["content"][1] == OF_MESSAGES
    assert result["content"] == [text(LINE)]


@pytest.mark.parametrize("body", [None, [], {"messages": [None, "x", {"content": [1, None]}]}])
def test_what_is_no_conversation_stays(body: object):
    assert places(body, beside=True) == []

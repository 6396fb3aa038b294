"""The number of pieces that a body may have."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_manager.mlx_server.api.connection import MOST_BRACKETS, MOST_ENTRIES, MOST_PIECES
from mlx_manager.mlx_server.config import MLXServerSettings, doubts

CHAT = "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "a"}
TEXT = {"type": "text", "text": "x"}
HALF = [TEXT] * (MOST_PIECES // 2)
DOCUMENT = {"type": "document", "source": {"type": "content", "content": HALF}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": HALF}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SPACE = {"type": "namespace", "name": "n", "tools": [{}] * MOST_PIECES}


async def refused(serve: Any, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a body with too many pieces."""
    async with serve() as client:
        answer = await client.post(path, json=fields)
    assert answer.status_code == 413
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "bot"}]}, "messages"),
        (CHAT, {"tools": [{}], "messages": [MESSAGE]}, "tools"),
        ("/v1/responses", {"input": [{"type": "message"}]}, "input"),
        ("/v1/responses", {"tools": [{}], "input": "a"}, "tools"),
        ("/v1/messages", {"messages": [{"role": "bot"}]}, "messages"),
        ("/v1/messages", {"tools": [{}], "messages": [MESSAGE], "max_tokens": 5}, "tools"),
        ("/v1/completions", {"prompt": [-1.5]}, "prompt"),
        ("/v1/embeddings", {"input": [{}]}, "input"),
        ("/v1/rerank", {"documents": [{}], "query": "a"}, "documents"),
        ("/api/embed", {"input": [{}]}, "input"),
    ],
)
async def test_pieces_are_counted_before_any_is_looked_at(
    serve: Any, path: str, fields: dict[str, Any], param: str
):
    many = fields | {param: fields[param] * (MOST_ENTRIES + 1)}
    async with serve() as client:
        answer = await client.post(path, json=many)
        few = await client.post(path, json=fields)
    assert answer.status_code == 413
    assert f"`{param}` has {MOST_ENTRIES + 1} entries" in answer.text
    assert few.status_code in (400, 422)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [MESSAGE, *[MESSAGE] * len(HALF)], "tools": [{}] * len(HALF)}),
        (CHAT, {"messages": [MESSAGE, {"role": "assistant", "tool_calls": [CALL] * MOST_PIECES}]}),
        ("/v1/messages", {"system": HALF, "messages": [{"role": "user", "content": HALF}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [RESULT, *HALF]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [DOCUMENT, *HALF]}]}),
    ],
    ids=["tools", "calls", "system", "tool_result", "document"],
)
async def test_pieces_are_counted_together_wherever_they_stand(
    serve: Any, path: str, fields: dict[str, Any]
):
    error = await refused(serve, path, fields | {"max_tokens": 5})
    assert f"`messages` has more than the {MOST_PIECES} messages" in error["message"]


async def test_tools_of_a_namespace_are_counted(serve: Any):
    error = await refused(serve, "/v1/responses", {"input": "a", "tools": [SPACE]})
    assert "The body has more than" in error["message"]


async def test_images_are_counted(serve: Any):
    image = {"type": "image_url", "image_url": {"url": "x"}}
    async with serve(max_images=1) as client:
        answer = await client.post(
            CHAT, json={"messages": [{"role": "user", "content": [image] * 2}]}
        )
    assert answer.status_code == 413
    assert "`messages` has 2 images; this server accepts 1" in answer.text
    assert "MLX_SERVER_MAX_IMAGES" in answer.text


@pytest.mark.parametrize("value", ["[]", "{}", "[{}]"])
async def test_millions_of_empty_lists_are_not_parsed(serve: Any, value: str):
    many = ",".join([value] * MOST_BRACKETS)
    async with serve() as client:
        answer = await client.post(
            CHAT,
            content=f'{{"messages": [{many}]}}',
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 413
    assert f"opening brackets; this server accepts {MOST_BRACKETS}" in answer.text


async def test_a_text_may_have_brackets(serve: Any):
    async with serve() as client:
        asked = {"messages": [MESSAGE | {"content": "[" * 100_000}], "max_tokens": 1}
        assert (await client.post(CHAT, json=asked)).status_code == 200


@pytest.mark.parametrize("name", ["MESSAGES", "PARTS", "TOOLS", "INPUTS"])
def test_limits_that_are_gone_are_named_as_no_setting(name: str):
    variable = f"MLX_SERVER_MAX_{name}"
    assert list(doubts(MLXServerSettings(), [variable])) == [f"{variable} is no setting"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prefix_disk_gb": 1, "prefix_cache": False}, ["PREFIX_DISK_GB", "PREFIX_CACHE"]),
        ({"prefix_write_gb_per_day": 1}, ["PREFIX_WRITE_GB_PER_DAY", "PREFIX_DISK_GB"]),
        ({"draft_model": "small", "speculation": "off"}, ["DRAFT_MODEL", "SPECULATION"]),
    ],
)
def test_settings_that_another_leaves_without_effect_are_named(
    given: dict[str, Any], said: list[str]
):
    settings = MLXServerSettings(**given)
    [doubt] = doubts(settings, [])
    assert [f"MLX_SERVER_{name}" in doubt for name in said] == [True, True]

"""Clients that show pictures to a model that sees: a tiny random one, whose words mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from live import LiveServer, live_server, server_before
from pictures import data_url, in_base64, picture
from talks import CLIENTS, WAYS, talk_in_node, talk_in_python
from tiny_vision import make_seeing_model

MODEL = "sees"
RED, BLUE = picture(size=(60, 40)), picture("JPEG", (40, 60), (0, 0, 255))
MEDIA = {RED: "image/png", BLUE: "image/jpeg"}
QUESTION = "What is this?"
FEW = 8
IN_NODE = sorted(found.stem for found in CLIENTS.glob("node/pictures/*.mjs"))


@pytest.fixture(scope="module", params=WAYS)
def seeing(request: pytest.FixtureRequest) -> LiveServer:
    found: LiveServer = request.getfixturevalue(f"seeing_{request.param}")
    return found


@pytest.fixture(scope="module")
def seeing_elsewhere(
    seeing_own: LiveServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("before")
    with server_before(seeing_own, folder, f"[models.{MODEL}]", model=MODEL) as running:
        yield running


@pytest.fixture(scope="module")
def seeing_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("seeing")
    make_seeing_model(folder / "models" / MODEL, "smolvlm")
    log = folder / "log.txt"
    with live_server(log, models_dir=folder / "models", model=MODEL) as running:
        yield running
    assert "Traceback" not in log.read_text(), log.read_text()
    assert running.process.returncode == 0


@pytest.fixture
def gpt(seeing: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(seeing: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0)


def in_chat(shown: bytes, question: str = QUESTION) -> Any:
    image = {"type": "image_url", "image_url": {"url": data_url(shown, MEDIA[shown])}}
    return {"role": "user", "content": [image, {"type": "text", "text": question}]}


def in_responses(shown: bytes, question: str = QUESTION) -> Any:
    image = {"type": "input_image", "image_url": data_url(shown, MEDIA[shown]), "detail": "auto"}
    return {"role": "user", "content": [image, {"type": "input_text", "text": question}]}


def block(shown: bytes) -> Any:
    source = {"type": "base64", "media_type": MEDIA[shown], "data": in_base64(shown)}
    return {"type": "image", "source": source}


def ask_chat(gpt: openai.OpenAI, *messages: Any, **fields: Any) -> Any:
    return gpt.chat.completions.create(
        model=MODEL, messages=list(messages), temperature=0, max_tokens=FEW, **fields
    )


def test_openais_package_shows_pictures_in_chat(gpt: openai.OpenAI):
    red = ask_chat(gpt, in_chat(RED), logprobs=True)
    blue = ask_chat(gpt, in_chat(BLUE), logprobs=True)
    bare = ask_chat(gpt, {"role": "user", "content": QUESTION})
    assert red.usage.prompt_tokens > bare.usage.prompt_tokens + 10
    first = [answer.choices[0].logprobs.content[0].logprob for answer in (red, blue)]
    assert first[0] != first[1]
    stream = ask_chat(gpt, in_chat(RED), stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == red.choices[0].message.content
    said = {"role": "assistant", "content": "Red."}
    more = ask_chat(gpt, in_chat(RED), said, {"role": "user", "content": "Sure?"})
    assert more.usage.prompt_tokens_details.cached_tokens > 10


def test_openais_package_shows_pictures_in_responses(gpt: openai.OpenAI):
    whole = gpt.responses.create(
        model=MODEL, input=[in_responses(RED)], temperature=0, max_output_tokens=FEW
    )
    chat = ask_chat(gpt, in_chat(RED))
    assert whole.output_text == chat.choices[0].message.content
    with gpt.responses.stream(
        model=MODEL, input=[in_responses(RED)], temperature=0, max_output_tokens=FEW
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text
    [kept] = gpt.responses.input_items.list(whole.id).data
    assert kept.content[0].image_url == data_url(RED)  # type: ignore[union-attr]
    more = gpt.responses.create(
        model=MODEL,
        input="Sure?",
        previous_response_id=whole.id,
        temperature=0,
        max_output_tokens=FEW,
    )
    assert more.usage is not None
    assert whole.usage is not None
    assert more.usage.input_tokens > whole.usage.input_tokens
    assert more.usage.input_tokens_details.cached_tokens > 10


def test_anthropics_package_shows_pictures(claude: anthropic.Anthropic, gpt: openai.OpenAI):
    asked: Any = {
        "model": MODEL,
        "max_tokens": FEW,
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": [block(RED), {"type": "text", "text": QUESTION}]}],
    }
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        assert stream.get_final_text() == whole.content[0].text  # type: ignore[union-attr]
    assert whole.content[0].text == ask_chat(gpt, in_chat(RED)).choices[0].message.content  # type: ignore[union-attr]
    counted = claude.messages.count_tokens(model=MODEL, messages=asked["messages"])
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_screenshot_in_a_tools_result_is_seen_as_claude_code_sends_it(
    claude: anthropic.Anthropic,
):
    """Claude Code's `Read` of a picture: a result whose content is the image alone."""
    kept = {"cache_control": {"type": "ephemeral"}}

    def asked(shown: bytes) -> Any:
        return {
            "model": MODEL,
            "max_tokens": FEW,
            "extra_body": {"temperature": 0},
            "system": [{"type": "text", "text": "You are an agent.", **kept}],
            "tools": [
                {
                    "name": "Read",
                    "description": "Read a file",
                    "input_schema": {
                        "type": "object",
                        "properties": {"file_path": {"type": "string"}},
                        "required": ["file_path"],
                    },
                }
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Look at shot.png."}]},
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "tool_use",
                            "id": "toolu_1",
                            "name": "Read",
                            "input": {"file_path": "shot.png"},
                        }
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [block(shown)],
                            **kept,
                        }
                    ],
                },
            ],
        }

    with claude.messages.stream(**asked(RED)) as stream:
        answer = stream.get_final_message()
    bare = asked(RED)
    bare["messages"][2]["content"][0]["content"] = "(nothing)"
    counted = [
        claude.messages.count_tokens(
            **{name: body[name] for name in ("model", "system", "tools", "messages")}
        ).input_tokens
        for body in (asked(RED), bare)
    ]
    assert counted[0] > counted[1] + 10
    usage = answer.usage
    read = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert read + (usage.cache_creation_input_tokens or 0) == counted[0]
    again = claude.messages.create(**asked(RED))
    assert (again.usage.cache_read_input_tokens or 0) > 10


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Paths of a red picture and a blue one."""
    for name, data in (("red.png", RED), ("blue.jpg", BLUE)):
        (tmp_path / name).write_bytes(data)
    return [str(tmp_path / "red.png"), str(tmp_path / "blue.jpg")]


def test_ollamas_python_package_shows_pictures(
    seeing: LiveServer, tmp_path: Path, files: list[str]
):
    talk_in_python("ollama", "pictures.py", seeing, tmp_path, *files)


@pytest.mark.parametrize("name", IN_NODE)
def test_node_packages_show_pictures(
    name: str, seeing: LiveServer, tmp_path: Path, files: list[str]
):
    talk_in_node(f"pictures/{name}.mjs", seeing, tmp_path, *files)

"""Pictures over HTTP, from each protocol to tiny random models that see."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, live_server
from pictures import data_url, in_base64, picture
from tiny_vision import SEEING, make_seeing_model
from websockets.sync.client import connect

RED, BLUE = picture(size=(60, 40)), picture("JPEG", (40, 60), (0, 0, 255))
MEDIA = {RED: "image/png", BLUE: "image/jpeg"}
FEW = 8
PLACEHOLDERS = {"smolvlm": "<image>", "qwen3_vl": "<|image_pad|>"}
KINDS = [kind for kind in PLACEHOLDERS if kind in SEEING]
SETTINGS = """
[models.smolvlm]
aliases = ["gpt-*"]

[models.brief]
base = "smolvlm"
system = "Be brief."
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("pictures")
    models = folder / "models"
    for kind in KINDS:
        make_seeing_model(models / kind, kind)
    blind(make_seeing_model(models / "blind", "smolvlm"))
    file, log = folder / "models.toml", folder / "log.txt"
    file.write_text(SETTINGS)
    with live_server(
        log, models_dir=models, model="smolvlm", models_file=file, log_prompts=True
    ) as running:
        yield running
    told = log.read_text()
    assert "Traceback" not in told, told
    assert "<image " in told
    for shown in (RED, BLUE):
        assert in_base64(shown)[24:64] not in told


def blind(folder: Path) -> None:
    """Take the tower's tensors away, as conversions of the language model alone do."""
    import mlx.core as mx

    file = folder / "model.safetensors"
    kept = {
        name: array
        for name, array in mx.load(str(file)).items()
        if "text_model" in name or "lm_head" in name
    }
    file.unlink()
    mx.save_safetensors(str(file), kept, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def chat(shown: bytes | None, text: str = "What is this?") -> list[Any]:
    url = [] if shown is None else [data_url(shown, MEDIA[shown])]
    images = [{"type": "image_url", "image_url": {"url": each}} for each in url]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def block(shown: bytes) -> Any:
    source = {"type": "base64", "media_type": MEDIA[shown], "data": in_base64(shown)}
    return {"type": "image", "source": source}


def asked(shown: bytes, text: str = "What is this?") -> dict[str, tuple[str, dict[str, Any]]]:
    """The same question in each protocol."""
    image = {"type": "input_image", "image_url": data_url(shown, MEDIA[shown])}
    beside = {"role": "user", "content": text, "images": [in_base64(shown)]}
    said = [{"role": "user", "content": [image, {"type": "input_text", "text": text}]}]
    blocks = [{"role": "user", "content": [block(shown), {"type": "text", "text": text}]}]
    options = {"options": {"temperature": 0, "num_predict": FEW}}
    few = {"temperature": 0, "max_tokens": FEW}
    return {
        "chat": ("/v1/chat/completions", {"messages": chat(shown, text), **few}),
        "responses": (
            "/v1/responses",
            {"input": said, "temperature": 0, "max_output_tokens": FEW},
        ),
        "messages": ("/v1/messages", {"messages": blocks, **few}),
        "ollama": ("/api/chat", {"messages": [beside], **options}),
        "generate": ("/api/generate", {"prompt": text, "images": [in_base64(shown)], **options}),
    }


def text_of(name: str, body: dict[str, Any]) -> str:
    match name:
        case "chat":
            return str(body["choices"][0]["message"]["content"])
        case "responses":
            return "".join(part["text"] for part in body["output"][0]["content"])
        case "messages":
            return "".join(part["text"] for part in body["content"])
        case "ollama":
            return str(body["message"]["content"])
    return str(body["response"])


def streamed(name: str, answer: str) -> str:
    events = re.findall(r"^(?:data: )?(\{.*\})$", answer, re.MULTILINE)
    pieces = []
    for event in map(json.loads, events):
        match name, event:
            case "chat", {"choices": [{"delta": {"content": str(text)}}]}:
                pieces.append(text)
            case "responses", {"type": "response.output_text.delta", "delta": text}:
                pieces.append(text)
            case "messages", {"type": "content_block_delta", "delta": {"text": text}}:
                pieces.append(text)
            case "ollama", {"message": {"content": text}}:
                pieces.append(text)
            case "generate", {"response": text}:
                pieces.append(text)
    return "".join(pieces)


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens(client: httpx.Client, model: str, messages: list[Any]) -> int:
    found = post(client, "/v1/tokenize", {"model": model, "messages": messages})
    return int(found["count"])


@pytest.mark.parametrize("model", KINDS)
def test_a_question_about_a_picture_has_one_answer_in_every_protocol(
    client: httpx.Client, model: str
):
    told: set[str] = set()
    for name, (path, body) in asked(RED).items():
        told.add(text_of(name, post(client, path, body | {"model": model, "stream": False})))
        answer = client.post(path, json=body | {"model": model, "stream": True})
        assert answer.status_code == 200, answer.text
        told.add(streamed(name, answer.text))
    assert len(told) == 1


@pytest.mark.parametrize("model", KINDS)
def test_the_picture_is_what_is_answered_about(client: httpx.Client, model: str):
    def first(shown: bytes | None) -> float:
        body = {"model": model, "messages": chat(shown), "max_tokens": 1, "logprobs": True}
        answer = post(client, "/v1/chat/completions", body | {"temperature": 0})
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])

    assert len({first(RED), first(BLUE), first(None)}) == 3
    assert first(RED) == pytest.approx(first(RED), abs=1e-5)


@pytest.mark.parametrize("model", KINDS)
def test_pictures_count_as_tokens_everywhere(client: httpx.Client, model: str):
    with_it, without = tokens(client, model, chat(RED)), tokens(client, model, chat(None))
    assert with_it > without + 3
    counted = post(
        client,
        "/v1/messages/count_tokens",
        {"model": model, "messages": asked(RED)["messages"][1]["messages"]},
    )
    assert counted["input_tokens"] == with_it
    counted = post(
        client,
        "/v1/responses/input_tokens",
        {"model": model, "input": asked(RED)["responses"][1]["input"]},
    )
    assert counted["input_tokens"] == with_it
    path, body = asked(RED)["chat"]
    assert post(client, path, body | {"model": model})["usage"]["prompt_tokens"] == with_it


@pytest.mark.parametrize("model", KINDS)
def test_order_counts(client: httpx.Client, model: str):
    red, text = chat(RED)[0]["content"]
    blue, _ = chat(BLUE)[0]["content"]

    def first(*content: Any) -> float:
        body = {"model": model, "messages": [{"role": "user", "content": list(content)}]}
        more = {"max_tokens": 1, "logprobs": True, "temperature": 0}
        answer = post(client, "/v1/chat/completions", body | more)
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])

    orders = [(red, text), (text, red), (red, blue, text), (blue, red, text), (red, text, blue)]
    assert len({first(*order) for order in orders}) == len(orders)


@pytest.mark.parametrize("model", KINDS)
def test_several_answers_to_one_picture_share_it(client: httpx.Client, model: str):
    body = {"model": model, "messages": chat(BLUE), "max_tokens": FEW, "temperature": 0, "n": 3}
    answer = post(client, "/v1/chat/completions", body)
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1


def test_a_second_question_about_the_picture_finds_it(client: httpx.Client):
    shown = picture(size=(64, 64), colour=(1, 2, 3))
    MEDIA[shown] = "image/png"
    said = [*chat(shown), {"role": "assistant", "content": "It is dark."}]
    more = {"model": "smolvlm", "max_tokens": 2, "temperature": 0}
    post(client, "/v1/chat/completions", {"messages": chat(shown), **more})
    second = [*said, {"role": "user", "content": "Sure?"}]
    usage = post(client, "/v1/chat/completions", {"messages": second, **more})["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 16


@pytest.mark.parametrize("model", KINDS)
def test_a_placeholder_that_a_user_writes_is_text(client: httpx.Client, model: str):
    written = PLACEHOLDERS[model]
    body = {"model": model, "max_tokens": 2, "temperature": 0}
    alone = {"role": "user", "content": f"Write {written} here."}
    post(client, "/v1/chat/completions", body | {"messages": [alone]})
    post(client, "/v1/chat/completions", body | {"messages": chat(RED, f"Not {written}!")})
    more = tokens(client, model, chat(RED, f"Not {written}!"))
    assert more > tokens(client, model, chat(RED, "Not !")) + 5


def test_models_say_what_they_read(client: httpx.Client):
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    expected = {**dict.fromkeys([*KINDS, "brief"], True), "blind": False}
    for model, sees in expected.items():
        assert ("image" in cards[model]["input_modalities"]) == sees, model
        assert ("image" in cards[model]["architecture"]["input_modalities"]) == sees
        shown = post(client, "/api/show", {"model": model})
        assert ("vision" in shown["capabilities"]) == sees
    assert cards["mlx-manager/demo"]["input_modalities"] == ["text"]


@pytest.mark.parametrize("name", ["gpt-4o", "brief", "smolvlm:brief", "smolvlm", "default", ""])
def test_other_names_of_a_model_see_as_well(client: httpx.Client, name: str):
    more = {"max_tokens": 2, "temperature": 0}
    body = {"model": name, "messages": chat(RED), **more}
    usage = post(client, "/v1/chat/completions", body)["usage"]
    assert usage["prompt_tokens"] >= tokens(client, "smolvlm", chat(RED))
    ollama = {"messages": asked(RED)["ollama"][1]["messages"], "stream": False}
    tagged = f"{name or 'smolvlm'}:latest" if ":" not in name else name
    post(client, "/api/chat", {"model": tagged, "options": {"num_predict": 2}, **ollama})


@pytest.mark.parametrize("model", ["blind", "mlx-manager/demo"])
def test_models_that_see_none_do_as_ever(client: httpx.Client, model: str):
    more = {"model": model, "max_tokens": 2}
    newest = client.post("/v1/chat/completions", json={"messages": chat(RED), **more})
    assert newest.status_code == 400
    assert "takes text only" in newest.text
    past = [*chat(RED), {"role": "assistant", "content": "Red."}, {"role": "user", "content": "?"}]
    post(client, "/v1/chat/completions", {"messages": past, **more})


def test_a_conversation_of_responses_keeps_its_picture(client: httpx.Client):
    path, body = asked(RED)["responses"]
    first = post(client, path, body)
    more = {"temperature": 0, "max_output_tokens": FEW}
    second = post(client, path, {"input": "And?", "previous_response_id": first["id"], **more})
    said = text_of("responses", first)
    whole = [
        *body["input"],
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And?"},
    ]
    again = post(client, path, {"input": whole, **more})
    assert text_of("responses", second) == text_of("responses", again)
    items = client.get(f"{path}/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][0]["image_url"] == data_url(RED)


def test_a_picture_comes_over_a_websocket(client: httpx.Client, server: LiveServer):
    path, body = asked(RED)["responses"]
    url = server.url.replace("http", "ws") + path

    def ask(socket: Any, **fields: Any) -> dict[str, Any]:
        socket.send(json.dumps({"type": "response.create", **body, **fields}))
        while True:
            event: dict[str, Any] = json.loads(socket.recv(timeout=60))
            assert event["type"] != "error", event
            if event["type"] in ("response.completed", "response.incomplete"):
                return dict(event["response"])

    with connect(url) as socket:
        first = ask(socket, store=False)
        assert text_of("responses", first) == text_of("responses", post(client, path, body))
        more = ask(socket, store=False, previous_response_id=first["id"], input="And?")
        assert more["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        # A turn of a model that sees none takes nothing from the conversation.
        going_on = {"store": False, "input": "And?"}
        unseen = ask(socket, **going_on, previous_response_id=more["id"], model="blind")
        again = ask(socket, **going_on, previous_response_id=unseen["id"])
        found = again["usage"]["input_tokens_details"]["cached_tokens"]
        assert found > first["usage"]["input_tokens"] - 17, "the picture is not where it was"


def test_pictures_and_texts_are_answered_side_by_side_as_alone(server: LiveServer):
    bodies = [
        {"model": "smolvlm", "messages": messages, "max_tokens": FEW, "temperature": 0}
        for messages in (
            chat(RED),
            chat(BLUE),
            chat(None, "Tell me a story."),
            [*chat(RED), {"role": "assistant", "content": "Red."}, *chat(BLUE)],
            chat(None, "Count."),
        )
    ]

    async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return text_of("chat", answer.json())

    async def both() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            alone = [await ask(client, body) for body in bodies]
            return alone, await asyncio.gather(*(ask(client, body) for body in bodies))

    alone, together = asyncio.run(both())
    assert together == alone


def test_a_screenshot_in_a_tools_result_is_seen(client: httpx.Client):
    tools = [{"name": "shot", "description": "Take one", "input_schema": {"type": "object"}}]

    def counted(result: Any) -> int:
        messages = [
            {"role": "user", "content": "Take one."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "shot", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}],
            },
        ]
        body = {"messages": messages, "tools": tools, "max_tokens": 2, "temperature": 0}
        usage = post(client, "/v1/messages", body)["usage"]
        return int(usage["input_tokens"]) + int(usage["cache_read_input_tokens"])

    assert counted([block(RED)]) > counted([{"type": "text", "text": "x"}]) + 3


def test_a_model_that_is_not_loaded_sees_the_first_picture(client: httpx.Client):
    unloaded = client.post("/v1/admin/models/unload", json={"model": KINDS[-1]})
    assert unloaded.status_code == 200, unloaded.text
    path, body = asked(RED)["chat"]
    assert post(client, path, body | {"model": KINDS[-1]})["usage"]["prompt_tokens"] > 10

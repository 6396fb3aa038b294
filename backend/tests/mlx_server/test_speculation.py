"""Drafts over HTTP: predictions, grammars and repetitions change how fast an answer comes, and
nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from here import served_here

DEMO = "mlx-manager/demo"
SETTINGS = f"""
[models."{DEMO}"]

[models.plain]
base = "{DEMO}"
speculation = "off"
"""
QUESTION = "How do I stop the server?"
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "occupation": {"enum": ["carpenter", "cartographer"]},
        "years_of_experience": {"type": "integer", "maximum": 60, "minimum": 0},
    },
    "required": ["first_name", "occupation", "years_of_experience"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather_of_a_city",
        "parameters": {
            "type": "object",
            "properties": {"city_name": {"type": "string", "maxLength": 12}},
            "required": ["city_name"],
            "additionalProperties": False,
        },
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    "penalised": {"temperature": 0.7, "seed": 6, "frequency_penalty": 0.5},
    "stopped": {"temperature": 0, "stop": ["Ctrl", "server"]},
    "cut": {"temperature": 0, "max_tokens": 7},
    "schema": {"temperature": 0, "response_format": FORM},
    "call": {"temperature": 0, "tools": [TOOL], "tool_choice": "required"},
    "least": {"temperature": 0, "min_tokens": 60, "max_tokens": 64},
    "scored": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file = tmp_path_factory.mktemp("speculation") / "models.toml"
    file.write_text(SETTINGS)
    with served_here(models_file=file, speculation="on") as client:
        yield client


def chat(client: httpx.Client, model: str = DEMO, **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    answer = client.post("/v1/chat/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Return the events without calls' random ids and the rounding of logprobs."""
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    scored = (choice.get("logprobs") or {}).get("content") or ()
    scores = [(each["token"], round(each["logprob"], 1)) for each in scored]
    counted = answer["usage"]["completion_tokens"]
    return message["content"], calls, scores, choice["finish_reason"], counted


def details(answer: dict[str, Any]) -> tuple[int, int]:
    found = answer["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def counter(client: httpx.Client, name: str, model: str = DEMO) -> float:
    lines = client.get("/metrics").text
    found = re.search(rf'^mlx_manager_{name}_total{{model_name="{model}"}} (.*)$', lines, re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("way", WAYS)
def test_a_prediction_changes_nothing_but_the_usage(client: httpx.Client, way: str) -> None:
    asked = WAYS[way]
    plain = chat(client, **asked, speculation="off")
    assert details(plain) == (0, 0)
    text = plain["choices"][0]["message"]["content"] or ""
    for guess in (text, text[:9] + "@" + text[9:], "nothing of the kind " * 3):
        prediction = {"type": "content", "content": guess}
        assert said(chat(client, **asked, prediction=prediction)) == said(plain)


def test_tokens_of_a_prediction_are_counted(client: httpx.Client) -> None:
    asked = {"temperature": 0}
    text = chat(client, **asked)["choices"][0]["message"]["content"]
    right = chat(client, **asked, prediction={"type": "content", "content": text})
    accepted, rejected = details(right)
    # Each step gives a token besides those of its draft.
    assert accepted >= 0.8 * right["usage"]["completion_tokens"] - 2
    assert rejected == 0
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    assert details(chat(client, **asked, prediction={"type": "content", "content": parts})) == (
        accepted,
        rejected,
    )
    wrong = {"type": "content", "content": "zebra " + text[:30] + "zebra zebra"}
    assert details(chat(client, **asked, prediction=wrong))[1] > 0


def test_a_stream_says_the_same_and_so_does_the_usage_at_its_end(client: httpx.Client) -> None:
    whole = chat(client, temperature=0)
    text = whole["choices"][0]["message"]["content"]
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prediction": {"type": "content", "content": text},
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    pieces = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(pieces) == text
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert details(chunks[-1])[0] > 0


def test_what_a_schema_leaves_no_choice_about_takes_no_steps(client: httpx.Client) -> None:
    before = counter(client, "engine_steps")
    answer = chat(client, temperature=0, response_format=FORM)
    steps = counter(client, "engine_steps") - before
    found = json.loads(answer["choices"][0]["message"]["content"])
    assert found.keys() == SCHEMA["properties"].keys()
    assert steps < 0.7 * answer["usage"]["completion_tokens"]


def test_what_was_tried_is_counted_and_shown(client: httpx.Client) -> None:
    names = [f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    before = [counter(client, name) for name in names]
    text = chat(client, temperature=0)["choices"][0]["message"]["content"]
    chat(client, temperature=0, prediction={"type": "content", "content": text})
    drafts, drafted, accepted = (
        counter(client, name) - b for name, b in zip(names, before, strict=True)
    )
    assert 0 < drafts < accepted <= drafted
    (model,) = (m for m in client.get("/v1/admin/models").json()["data"] if m["id"] == DEMO)
    tried = counter(client, names[1])
    assert model["acceptance"] == pytest.approx(counter(client, names[2]) / tried)


def test_an_owner_switches_it_off_for_a_model_and_a_request_on_again(client: httpx.Client) -> None:
    text = chat(client, temperature=0)["choices"][0]["message"]["content"]
    asked = {"temperature": 0, "prediction": {"type": "content", "content": text}}
    assert details(chat(client, "plain", **asked)) == (0, 0)
    assert details(chat(client, "plain", **asked, speculation="auto"))[0] > 0


def responded(client: httpx.Client, **more: Any) -> str:
    body = {"model": DEMO, "input": QUESTION, "temperature": 0, "store": False}
    answer = client.post("/v1/responses", json=body | more)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["output"][-1]["content"][0]["text"]
    return text


def messaged(client: httpx.Client, **more: Any) -> str:
    body = {"model": DEMO, "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
    answer = client.post("/v1/messages", json=body | more)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["content"][-1]["text"]
    return text


def completed(client: httpx.Client, **more: Any) -> str:
    body = {"model": DEMO, "prompt": "To stop it, press", "temperature": 0, "max_tokens": 40}
    answer = client.post("/v1/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("answered", [responded, messaged, completed])
def test_every_protocol_takes_predictions_and_may_go_without(
    client: httpx.Client, answered: Callable[..., str]
) -> None:
    text = answered(client)
    prediction = {"type": "content", "content": text}

    def drafts(**more: Any) -> float:
        before = counter(client, "spec_decode_num_accepted_tokens")
        assert answered(client, prediction=prediction, **more) == text
        return counter(client, "spec_decode_num_accepted_tokens") - before

    assert drafts() > 0
    assert drafts(speculation="auto") > 0
    assert drafts(speculation="off") == 0


def test_a_response_counts_tokens_of_its_prediction(client: httpx.Client) -> None:
    body = {"model": DEMO, "input": QUESTION, "temperature": 0}
    body["prediction"] = {"type": "content", "content": responded(client)}
    found = client.post("/v1/responses", json=body).json()["usage"]["output_tokens_details"]
    assert found["accepted_prediction_tokens"] > 0
    assert found["rejected_prediction_tokens"] == 0


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_option_switches_it_off_for_clients_of_ollama(client: httpx.Client, path: str) -> None:
    schema = {"type": "object", "properties": SCHEMA["properties"], "required": ["occupation"]}
    body: dict[str, Any] = {"model": DEMO, "stream": False, "format": schema}
    body |= {"prompt": QUESTION, "messages": [{"role": "user", "content": QUESTION}]}
    del body["messages" if path == "/api/generate" else "prompt"]

    def drafts(**options: Any) -> float:
        before = counter(client, "spec_decode_num_drafts")
        answer = client.post(path, json=body | {"options": {"temperature": 0, **options}})
        assert answer.status_code == 200, answer.text
        assert "x-unknown-fields" not in answer.headers
        return counter(client, "spec_decode_num_drafts") - before

    assert drafts() > 0
    assert drafts(speculation="off") == 0


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/responses", {"input": "x", "speculation": "never"}, "speculation"),
        ("/v1/messages", {"max_tokens": 1, "prediction": "x"}, "prediction"),
        ("/api/chat", {"options": {"speculation": "never"}}, "options.speculation"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    client: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    asked = {"model": DEMO} if "input" in body else {"model": DEMO, "messages": MESSAGES}
    answer = client.post(path, json=asked | body)
    assert answer.status_code == 400
    assert f"`{field}`" in answer.text


def test_completions_may_go_without(client: httpx.Client) -> None:
    def completed(**more: Any) -> tuple[str, float]:
        before = counter(client, "spec_decode_num_drafts")
        choices = ["a table for two, please", "nothing, thank you"]
        body = {"model": DEMO, "prompt": "I would like", "temperature": 0, "guided_choice": choices}
        answer = client.post("/v1/completions", json=body | more).json()
        return answer["choices"][0]["text"], counter(client, "spec_decode_num_drafts") - before

    (with_drafts, some), (without, none) = completed(), completed(speculation="off")
    assert with_drafts == without
    assert some > 0
    assert none == 0

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from here import served_here

NAMES = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
    "first_token_ms",
}
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is the sea?"}]})
COMPLETIONS = ("/v1/completions", {"prompt": "What is the sea like in winter, and why?"})
BOTH = pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETIONS], ids=["chat", "completions"])


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with served_here() as client:
        yield client


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json=body | {"stream": True, "max_tokens": 8})
    assert answer.status_code == 200
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line)
    return [json.loads(line) for line in lines if line.startswith("{")]


@BOTH
def test_a_whole_answer_tells_its_times_where_they_are_asked_for(
    http: httpx.Client, path: str, body: dict[str, Any]
):
    plain = http.post(path, json=body | {"max_tokens": 8}).json()
    assert "timings" not in plain
    for name in ("include_timings", "timings_per_token"):
        answer = http.post(path, json=body | {"max_tokens": 8, name: True})
        assert "x-unknown-fields" not in answer.headers
        timed, usage = answer.json()["timings"], answer.json()["usage"]
        assert timed.keys() == NAMES
        assert timed["predicted_n"] == usage["completion_tokens"]
        assert timed["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timed["prompt_n"] + timed["cache_n"] == usage["prompt_tokens"]
        assert timed["first_token_ms"] > 0


@BOTH
def test_answers_side_by_side_are_counted_together(
    http: httpx.Client, path: str, body: dict[str, Any]
):
    answer = http.post(path, json=body | {"n": 3, "max_tokens": 8, "include_timings": True}).json()
    timed, usage = answer["timings"], answer["usage"]
    assert timed["predicted_n"] == usage["completion_tokens"]
    assert timed["prompt_n"] + timed["cache_n"] == usage["prompt_tokens"]


@BOTH
def test_a_streams_last_chunk_of_a_choice_tells_its_times(
    http: httpx.Client, path: str, body: dict[str, Any]
):
    for fields in ({"include_timings": True}, {"stream_options": {"include_timings": True}}):
        found = chunks(http, path, body | fields)
        assert ["timings" in chunk for chunk in found] == [*[False] * (len(found) - 1), True]
        assert found[-1]["timings"].keys() == NAMES


@BOTH
def test_every_chunk_tells_the_times_so_far_by_llamacpps_name(
    http: httpx.Client, path: str, body: dict[str, Any]
):
    found = chunks(http, path, body | {"timings_per_token": True})
    assert all(chunk["timings"].keys() == NAMES for chunk in found)
    drawn = [chunk["timings"]["predicted_n"] for chunk in found]
    assert drawn == sorted(drawn)


@BOTH
def test_cached_tokens_are_told(http: httpx.Client, path: str, body: dict[str, Any]):
    text = "The sea is wide and the hills are green. " * 8
    said: dict[str, Any] = {"prompt": text}
    if "messages" in body:
        said = {"messages": [{"role": "user", "content": text}]}
    http.post(path, json=said | {"max_tokens": 1})
    usage = http.post(path, json=said | {"max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 16
    last = chunks(http, path, said | {"stream_options": {"include_usage": True}})[-1]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_cached_tokens_are_told_by_every_protocol(http: httpx.Client):
    text = "The moon is round and the night is long. " * 8
    said = [{"role": "user", "content": text}]

    def twice(path: str, **body: Any) -> dict[str, Any]:
        http.post(path, json=body)
        found: dict[str, Any] = http.post(path, json=body).json()
        return found

    responses = twice("/v1/responses", input=said, max_output_tokens=2)["usage"]
    assert responses["input_tokens_details"]["cached_tokens"] >= 16
    messages = twice("/v1/messages", messages=said, max_tokens=2)["usage"]
    assert messages["cache_read_input_tokens"] >= 16
    chat = twice("/api/chat", messages=said, stream=False, options={"num_predict": 2})
    assert chat["prompt_eval_cached_count"] >= 16
    generated = twice("/api/generate", prompt=text, stream=False, options={"num_predict": 2})
    assert generated["prompt_eval_cached_count"] >= 16

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai_spec import check
from timelines import timeline

from mlx_manager.mlx_server.core import (
    Finished,
    GenerationRequest,
    Progress,
    Started,
    Text,
    TextDelta,
    TokenLogprob,
    Tokens,
    Usage,
)
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.protocols import completions, sse
from mlx_manager.mlx_server.protocols.answer import AnswerHead
from mlx_manager.mlx_server.protocols.completions import (
    MAX_ROWS,
    CompletionAnswer,
    CompletionStream,
)
from mlx_manager.mlx_server.schemas.openai import CompletionRequest


def ask(prompt: Any = "once", **fields: Any) -> list[GenerationRequest]:
    body = CompletionRequest.model_validate({"prompt": prompt} | fields)
    return completions.requests(body, completions.head(body, "mlx-manager/demo"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("once", [Text("once")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([1, 2], [Tokens((1, 2))]),
        ([[1, 2], [3]], [Tokens((1, 2)), Tokens((3,))]),
        (["a", [3]], [Text("a"), Tokens((3,))]),
    ],
)
def test_each_prompt_is_a_row(prompt: object, expected: list[object]):
    assert [row.prompt for row in ask(prompt)] == expected


def test_the_answers_to_a_prompt_stand_side_by_side():
    rows = ask(["a", "b"], n=2, seed=4)
    assert [row.prompt for row in rows] == [Text("a"), Text("a"), Text("b"), Text("b")]
    assert [row.sampling.seed for row in rows] == [4, 5, 4, 5]


def test_sixteen_tokens_unless_told_otherwise():
    assert ask()[0].max_tokens == 16
    assert ask(max_tokens=3)[0].max_tokens == 3


def test_no_tokens_at_all_make_sense_only_with_echo():
    assert ask(max_tokens=0, echo=True)[0].echo
    with pytest.raises(InvalidParameter, match="echo"):
        ask(max_tokens=0)


def test_a_flood_of_rows_is_refused():
    assert len(ask(["a"] * MAX_ROWS)) == MAX_ROWS
    with pytest.raises(InvalidParameter, match="at most"):
        ask(["a"] * (MAX_ROWS // 2 + 1), n=2)


HEAD = AnswerHead(id="cmpl-1", model="m", n=2, rows=4, include_usage=True)
STEPS: list[Progress] = [
    [(0, [Started(3)]), (1, [Started(3, 3)]), (2, [Started(5)])],
    [(0, [TextDelta("a")]), (2, [TextDelta("c")]), (3, [Started(5, 5)])],
    [
        (0, [Finished("length", Usage(3, 1))]),
        (1, [TextDelta("b"), Finished("stop", Usage(3, 2, 3))]),
    ],
    [(3, [TextDelta("d"), Finished("stop", Usage(5, 4, 5))])],
    [(2, [Finished("stop", Usage(5, 1))])],
]
COUNTS = {
    "prompt_tokens": 8,
    "completion_tokens": 8,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}


def test_the_stream_tells_rows_apart_and_counts_each_prompt_once():
    writer = CompletionStream(HEAD, timeline(HEAD.rows))
    data = b"".join(writer.write(step) for step in STEPS) + writer.end()
    *chunks, last = sse.parse(data)
    for chunk in [*chunks, last]:
        if chunk["usage"] is None:
            del chunk["usage"]
        check("CreateCompletionResponse", chunk)
    choices = [chunk["choices"][0] for chunk in chunks]
    for row, text, reason in [
        (0, "a", "length"),
        (1, "b", "stop"),
        (2, "c", "stop"),
        (3, "d", "stop"),
    ]:
        own = [choice for choice in choices if choice["index"] == row]
        assert "".join(choice["text"] for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None, reason]
    assert last["choices"] == []
    assert last["usage"] == COUNTS
    assert data.endswith(b"data: [DONE]\n\n")


def test_the_body_tells_rows_apart_and_counts_each_prompt_once():
    answer = CompletionAnswer(HEAD, timeline(HEAD.rows))
    for step in STEPS:
        answer.add(step)
    body = json.loads("".join(answer.body()))
    check("CreateCompletionResponse", body)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "a", "length"),
        (1, "b", "stop"),
        (2, "c", "stop"),
        (3, "d", "stop"),
    ]
    assert body["usage"] == COUNTS


# The best of several


def scored(token: int, logprob: float) -> TextDelta:
    return TextDelta(chr(token), (TokenLogprob(token, bytes([token]), logprob),))


def test_the_likeliest_answers_are_given_best_first_and_all_are_counted():
    body = CompletionRequest(prompt=["p", "q"], n=2, best_of=3)
    head = completions.head(body, "m")
    assert (head.n, head.rows, head.best) == (3, 6, 2)
    assert [row.logprobs for row in completions.requests(body, head)] == [0] * 6
    answer = CompletionAnswer(head, timeline(head.rows))
    for row, logprob in enumerate([-3.0, -1.0, -2.0, -1.0, -2.0, -3.0]):
        events = [Started(1), scored(65 + row, logprob), Finished("length", Usage(1, 1))]
        answer.add([(row, events)])
    whole = json.loads("".join(answer.body()))
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "B"),
        (1, "C"),
        (2, "D"),
        (3, "E"),
    ]
    assert all(choice["logprobs"] is None for choice in whole["choices"])
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["usage"]["prompt_tokens"] == 2


def test_what_is_echoed_makes_no_answer_likelier():
    head = completions.head(CompletionRequest(prompt="p", n=1, best_of=3, echo=True), "m")
    answer = CompletionAnswer(head, timeline(head.rows))
    prompt = (TokenLogprob(1, b"p", None), TokenLogprob(2, b"q", -0.1))
    # Of the second nothing is shown, of the third one token: the others belong to a stop string.
    for row, (logprobs, drawn) in enumerate([([-3.0, -3.0], 2), ([], 4), ([-2.0], 3)]):
        shown = [scored(65 + row, logprob) for logprob in logprobs]
        end = Finished("stop", Usage(2, drawn), "S")
        events = [Started(2), TextDelta("pq", prompt), *shown, end]
        answer.add([(row, events)])
    body = json.loads("".join(answer.body()))
    assert [choice["text"] for choice in body["choices"]] == ["pqC"]


def test_what_ends_an_echoed_answer_makes_it_no_likelier():
    head = completions.head(CompletionRequest(prompt="p", n=1, best_of=2, echo=True), "m")
    answer = CompletionAnswer(head, timeline(head.rows))
    prompt = (TokenLogprob(1, b"p", None),)
    for row, (logprob, of_end) in enumerate([(-1.0, -9.0), (-2.0, -0.1)]):
        end = TextDelta("", (TokenLogprob(2, b"<|end|>", of_end),))
        drawn = [scored(65 + row, logprob), end, Finished("stop", Usage(1, 2))]
        answer.add([(row, [Started(1), TextDelta("p", prompt), *drawn])])
    body = json.loads("".join(answer.body()))
    assert [choice["text"] for choice in body["choices"]] == ["pA"]


def test_best_of_must_make_sense():
    with pytest.raises(InvalidParameter, match="best_of"):
        ask(n=3, best_of=2)
    with pytest.raises(InvalidParameter, match="streamed"):
        ask(n=1, best_of=2, stream=True)
    assert len(ask(n=2, best_of=2, stream=True)) == 2


# Scores and ids


@pytest.mark.parametrize("least", [-20000.0, -math.inf, math.nan])
def test_scores_are_written_as_openai_does(least: float):
    head = AnswerHead(id="cmpl-1", model="m", logprobs=1)
    first = TokenLogprob(1, b"a", None)
    second = TokenLogprob(2, "é".encode()[:1], least, ((3, b"b", -0.5),))
    third = TokenLogprob(4, "é".encode()[1:], -0.25, ((4, "é".encode()[1:], -0.25),))
    answer, stream = (
        CompletionAnswer(head, timeline(head.rows)),
        CompletionStream(head, timeline(head.rows)),
    )
    steps = [
        [(0, [Started(1), TextDelta("a", (first,))])],
        [(0, [TextDelta("é", (second, third)), Finished("length", Usage(1, 2))])],
    ]
    chunks = []
    for step in steps:
        answer.add(step)
        chunks += sse.parse(stream.write(step))
    body = json.loads("".join(answer.body()))
    # A prompt's first token has no score: OpenAI sends null there, against its own description.
    expected = {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [None, -9999.0, -0.25],
        "top_logprobs": [None, {"b": -0.5, "bytes:\\xc3": -9999.0}, {"bytes:\\xa9": -0.25}],
        "text_offset": [0, 1, 1],
    }
    assert body["choices"][0]["logprobs"] == expected
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:2]]
    assert {key: parts[0][key] + parts[1][key] for key in expected} == expected


def test_token_ids_are_given_when_asked_for():
    head = AnswerHead(id="cmpl-1", model="m", return_ids=True)
    answer, stream = (
        CompletionAnswer(head, timeline(head.rows)),
        CompletionStream(head, timeline(head.rows)),
    )
    end = Finished("length", Usage(2, 1), ids=(7,))
    step: Progress = [(0, [Started(2, ids=(5, 6)), TextDelta("x"), end])]
    answer.add(step)
    choice = json.loads("".join(answer.body()))["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [7])
    last = list(sse.parse(stream.write(step)))[-1]["choices"][0]
    assert (last["prompt_token_ids"], last["token_ids"]) == ([5, 6], [7])


def test_a_suffix_belongs_to_a_text():
    assert ask("a", suffix="z")[0].prompt == Text("a", "z")
    with pytest.raises(InvalidParameter, match="suffix"):
        ask([1, 2], suffix="z")

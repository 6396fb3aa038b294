from __future__ import annotations

from typing import Any

import pytest
from openai_spec import check

from mlx_manager.mlx_server.core import (
    Finished,
    GenerationRequest,
    Progress,
    Started,
    Text,
    TextDelta,
    Tokens,
    Usage,
)
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.protocols import completions, sse
from mlx_manager.mlx_server.protocols.answer import Head
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


HEAD = Head(id="cmpl-1", model="m", n=2, rows=4, include_usage=True)
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
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def test_the_stream_tells_rows_apart_and_counts_each_prompt_once():
    writer = CompletionStream(HEAD)
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
    answer = CompletionAnswer(HEAD)
    for step in STEPS:
        answer.add(step)
    body = answer.body().model_dump(exclude_unset=True)
    check("CreateCompletionResponse", body)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "a", "length"),
        (1, "b", "stop"),
        (2, "c", "stop"),
        (3, "d", "stop"),
    ]
    assert body["usage"] == COUNTS

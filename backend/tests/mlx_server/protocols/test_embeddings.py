from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.core import Encoded
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.protocols import embeddings
from mlx_manager.mlx_server.schemas.embeddings import (
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EncodingUsage,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
IDS_AND_TEXTS: list[Any] = [([1, 2], 0), ([[1, 2]], 0), (["a", [1, 2]], 1)]
NAMES = st.text() | st.sampled_from(['"data":[]', '{"results":[]}', "[]", "\\"])


@pytest.mark.parametrize(("given", "index"), IDS_AND_TEXTS)
def test_a_prompt_is_not_put_before_token_ids(given: Any, index: int):
    body = EmbeddingsRequest(input=given, prompt_name="query")
    with pytest.raises(InvalidParameter, match=rf"`prompt_name` .* `input\[{index}\]`") as error:
        embeddings.embedding(body, "m", "embd-1")
    assert error.value.param == "prompt_name"
    assert embeddings.embedding(EmbeddingsRequest(input=given), "m", "embd-1").prompt is None


@given(rows=st.lists(st.lists(NUMBERS, min_size=1), min_size=1), name=NAMES)
@pytest.mark.parametrize("form", ["float", "base64"])
def test_vectors_are_written_one_at_a_time_and_together_are_the_response(
    rows: list[list[float]], name: str, form: Any
):
    encoded = Encoded(tuple(array("f", row) for row in rows), 7)
    body = EmbeddingsRequest(input="x", encoding_format=form)
    expected = EmbeddingsResponse(
        data=[
            Embedding(
                index=index,
                embedding=row.tolist() if form == "float" else embeddings.base64(row),
            )
            for index, row in enumerate(encoded.rows)
        ],
        model=name,
        usage=EncodingUsage(prompt_tokens=7, total_tokens=7),
    )
    pieces = list(embeddings.vectors(body, name, encoded))
    assert "".join(pieces) == expected.model_dump_json()
    assert max(piece.count('"index":') for piece in pieces) == min(1, len(rows))


@given(scores=st.lists(NUMBERS, min_size=1, max_size=9), name=NAMES, text=NAMES, top=st.integers(0, 9))  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
def test_results_are_written_one_at_a_time_and_together_are_the_response(
    scores: list[float], name: str, text: str, top: int, whole: bool
):
    encoded = Encoded(tuple(array("f", [score]) for score in scores), 7)
    documents = [f"{text}{index}" for index in range(len(scores))]
    body = RerankRequest(query="q", documents=documents, top_n=top, return_documents=whole)
    asked = embeddings.ranking(body, name, "rerank-1")
    best = sorted(enumerate(encoded.rows), key=lambda one: -one[1][0])[: top or None]
    expected = RerankResponse(
        id="rerank-1",
        model=name,
        results=[RerankResult(index=index, relevance_score=row[0]) for index, row in best],
        usage=EncodingUsage(prompt_tokens=7, total_tokens=7),
    )
    if whole:
        for result in expected.results:
            result.document = RerankDocument(text=documents[result.index])
    pieces = list(embeddings.ranked(body, asked, encoded))
    assert json.loads("".join(pieces)) == expected.model_dump(exclude_unset=True)
    assert max(piece.count('"index":') for piece in pieces) == 1

"""The wire types of `/v1/embeddings` (OpenAI's) and `/v1/rerank` (Cohere's and Jina's).

Source: OpenAI's API description, and vLLM's for `truncate_prompt_tokens`, `use_activation` and the
shape of a ranking.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from mlx_manager.mlx_server.schemas.openai import TokenId
from mlx_manager.mlx_server.schemas.wire import (
    Many,
    ModelName,
    Timed,
    Wire,
    choose,
    shape,
    text_or_ids,
)

TokenIds = Annotated[Many[TokenId], Field(min_length=1)]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[TokenIds, Tag("<ids>")],
    choose(text_or_ids, "a string or a list of token ids"),
]
Inputs = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[Many[Input], Field(min_length=1), Tag("<list>")],
    choose(shape, "a string, a list of token ids, or a list of either"),
]
Truncation = Annotated[
    int | None,
    Field(
        ge=-1,
        description="Tokens that are kept of an input that is longer; -1: as many as the model "
        "takes. Without it such an input is refused",
    ),
]

NO_EFFECT = frozenset({"user"})


class EmbeddingsRequest(Timed):
    """`POST /v1/embeddings`."""

    model: ModelName | None = Field(None, description="Model id; the server's default when absent")
    input: Inputs = Field(description="Text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Lists of numbers (default), or base64 of little-endian float32"
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Keep that many of a vector's first numbers, for models whose config.json has "
        "`is_matryoshka` or `matryoshka_dimensions`",
    )
    truncate_prompt_tokens: Truncation = None
    prompt_name: str | None = Field(
        None,
        description="Which of the model's own prompts (config_sentence_transformers.json) to put "
        "before texts, such as `query`; not with token ids",
    )
    user: Any = None


class RerankDocument(Wire):
    text: str


Document = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[RerankDocument, Tag("<object>")],
    choose(shape, "a string or an object with a `text`"),
]


class RerankRequest(Timed):
    """`POST /v1/rerank`."""

    model: ModelName | None = Field(None, description="Model id; the server's default when absent")
    query: str = Field(description="What the documents are to answer")
    documents: Annotated[Many[Document], Field(min_length=1)] = Field(
        description="Texts, or objects with a `text`"
    )
    top_n: int | None = Field(
        None, ge=0, description="How many of the best are returned; null and 0: all"
    )
    return_documents: bool | None = Field(
        None, description="Whether results repeat their documents; default true"
    )
    truncate_prompt_tokens: Truncation = None
    use_activation: bool | None = Field(
        None,
        description="Scores by the model's activation (a sigmoid, say; default), or its logits",
    )
    instruction: str | None = Field(
        None,
        description="What makes a document fit the query, in a sentence, for models that take an "
        "instruction (Qwen3-Reranker); default the model's own",
    )
    max_tokens_per_doc: Any = None
    max_chunks_per_doc: Any = None
    rank_fields: Any = None
    user: Any = None


# ---------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------


class EncodingUsage(Wire):
    prompt_tokens: int
    total_tokens: int


class Embedding(Wire):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(Wire):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EncodingUsage


class RerankResult(Wire):
    """`index` is the document's place in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(Wire):
    """Results come best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EncodingUsage

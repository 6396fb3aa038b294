"""Every field that changes something on one endpoint is honoured or refused on every other."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_manager.mlx_server.errors import UnsupportedParameter
from mlx_manager.mlx_server.protocols import embeddings, messages, responses, tokens
from mlx_manager.mlx_server.protocols.dialects import (
    INSTEAD,
    KNOWN,
    OF_ANSWERS,
    OF_PROMPTS,
    OF_VECTORS,
    Refusal,
)
from mlx_manager.mlx_server.protocols.parameters import (
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    refuse_unsupported,
)
from mlx_manager.mlx_server.schemas.anthropic import CountTokensRequest, MessagesRequest
from mlx_manager.mlx_server.schemas.embeddings import EmbeddingsRequest, RerankRequest
from mlx_manager.mlx_server.schemas.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    PromptRequest,
    TokenizeRequest,
)
from mlx_manager.mlx_server.schemas.responses import InputTokensRequest, ResponsesRequest
from mlx_manager.mlx_server.schemas.wire import Wire

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
GENERATING: dict[str, tuple[type[Wire], dict[str, Any], dict[str, Refusal]]] = {
    "chat": (ChatCompletionRequest, {"messages": HELLO}, UNSUPPORTED_IN_CHAT),
    "completions": (CompletionRequest, {"prompt": "hi"}, UNSUPPORTED_IN_COMPLETIONS),
    "responses": (ResponsesRequest, {"input": "hi"}, responses.UNSUPPORTED),
    "messages": (MessagesRequest, {"messages": HELLO, "max_tokens": 1}, messages.UNSUPPORTED),
}
READING: dict[str, tuple[type[Wire], dict[str, Any], dict[str, Refusal]]] = {
    "input_tokens": (InputTokensRequest, {"input": "hi"}, responses.UNSUPPORTED_IN_COUNTING),
    "count_tokens": (CountTokensRequest, {"messages": HELLO}, messages.UNSUPPORTED_IN_COUNTING),
    "tokenize": (TokenizeRequest, {"prompt": "hi"}, tokens.UNSUPPORTED_IN_TOKENIZE),
    "template": (PromptRequest, {"messages": HELLO}, tokens.UNSUPPORTED_IN_TEMPLATES),
}
ENCODING: dict[str, tuple[type[Wire], dict[str, Any], dict[str, Refusal]]] = {
    "embeddings": (EmbeddingsRequest, {"input": "hi"}, embeddings.UNSUPPORTED_IN_EMBEDDINGS),
    "rerank": (
        RerankRequest,
        {"query": "q", "documents": ["d"]},
        embeddings.UNSUPPORTED_IN_RERANK,
    ),
}
FIELDS = {"asks": "for something"}


@pytest.mark.parametrize(
    ("endpoint", "names"),
    [
        *((endpoint, KNOWN) for endpoint in GENERATING),
        *((endpoint, OF_PROMPTS) for endpoint in READING),
        *((endpoint, OF_VECTORS) for endpoint in ENCODING),
    ],
)
def test_no_field_that_changes_something_elsewhere_counts_for_nothing(
    endpoint: str, names: frozenset[str]
):
    kind, given, refusals = (GENERATING | READING | ENCODING)[endpoint]
    for name in sorted(names - kind.model_fields.keys()):
        body = kind.model_validate(given | {name: FIELDS})
        with pytest.raises(
            UnsupportedParameter, match=f"`{name}` is not supported by /v1"
        ) as caught:
            refuse_unsupported(body, refusals)
        assert caught.value.param == name


def test_null_and_what_is_done_anyway_ask_for_nothing():
    for kind, given, refusals in (GENERATING | READING | ENCODING).values():
        for name, refusal in refusals.items():
            for value in (None, *refusal.harmless):
                body = kind.model_validate(given | {name: value})
                refuse_unsupported(body, {name: refusal})


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        ("user", "me"),
        ("metadata", {}),
        ("store", False),
        ("service_tier", "auto"),
        ("prompt_cache_key", "x"),
        ("verbosity", "low"),
    ],
)
def test_hints_are_refused_nowhere(hint: str, value: object):
    for kind, given, refusals in GENERATING.values():
        refuse_unsupported(kind.model_validate(given | {hint: value}), refusals)


def test_what_is_to_be_used_instead_is_a_field_there():
    kinds = {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": MessagesRequest,
        "/v1/embeddings": EmbeddingsRequest,
        "/v1/rerank": RerankRequest,
        "/v1/tokenize": TokenizeRequest,
        "/v1/apply-template": PromptRequest,
    }
    for endpoint, table in INSTEAD.items():
        for sentence in table.values():
            for name in sentence.split("`")[1::2]:
                field, _, _ = name.partition(".")
                assert field in kinds[endpoint].model_fields or field == "message", sentence


def test_names_of_other_servers_are_none_of_ours():
    honoured = {name for kind, _, _ in GENERATING.values() for name in kind.model_fields}
    assert not honoured & (OF_ANSWERS - {"output_format", "output_config"})

from __future__ import annotations

from typing import Any

from mlx_manager.mlx_server.main import create_app


def references(value: Any) -> set[str]:
    match value:
        case {"$ref": str(name)}:
            return {name}
        case dict():
            return set().union(*map(references, value.values()))
        case list():
            return set().union(*map(references, value))
    return set()


def test_the_docs_describe_every_body_and_refer_to_nothing_that_is_missing():
    described = create_app().openapi()
    for path, name in (
        ("/v1/chat/completions", "ChatCompletionRequest"),
        ("/v1/completions", "CompletionRequest"),
        ("/v1/messages", "MessagesRequest"),
        ("/v1/responses", "ResponsesRequest"),
        ("/v1/responses/input_tokens", "InputTokensRequest"),
        ("/v1/messages/count_tokens", "CountTokensRequest"),
    ):
        content = described["paths"][path]["post"]["requestBody"]["content"]
        reference = {"$ref": f"#/components/schemas/{name}"}
        assert content["application/json"]["schema"] == reference
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert references(described) <= known

"""Contents of `/docs` and `/openapi.json` that the routes' types do not give.

Bodies that the routes read themselves, every failure that a route may answer with, from the tree in
`errors`, and how a key is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mlx_manager.mlx_server import errors
from mlx_manager.mlx_server.api.auth import OPEN_PATHS
from mlx_manager.mlx_server.api.errors import ANTHROPIC_PATH, OLLAMA_PATHS, status_of
from mlx_manager.mlx_server.api.owner import ADMIN_PATHS
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.protocols import ollama
from mlx_manager.mlx_server.schemas.anthropic import MessagesErrorBody
from mlx_manager.mlx_server.schemas.ollama import OllamaErrorBody
from mlx_manager.mlx_server.schemas.openai import ErrorBody

REFERENCE = "#/components/schemas/{model}"
RESPONSES_PATH = "/v1/responses"

ANY = (errors.MLXManagerError, errors.ServerNotReady)
CLOSED = (errors.AuthenticationFailed, errors.PermissionDenied)
FOUND = (errors.InvalidParameter, errors.OutOfRange, errors.ModelNotFound, errors.ResponseNotFound)
"""Errors of operations with parameters, in the path or the query."""

OWNERS = (
    errors.WrongAdminToken,
    errors.RequestNotFound,
    errors.ModelInUse,
    errors.InvalidSettings,
)
"""Errors of the admin API."""

KEPT = (errors.ResponseNotFound, errors.ItemNotFound)
"""Errors of bodies that continue from stored responses or name stored items."""

BODY = tuple(
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, MLXManagerError)
    and kind not in (*ANY, *CLOSED, *OWNERS, *KEPT)
)
"""Errors of requests to a model: all that are in no other group."""

EVENT = {
    "type": "object",
    "description": "Server-sent events, if `stream` is true",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}

LINE = {"type": "object", "description": "An object a line, unless `stream` is false"}

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is a `kind`."""
    content = {"application/json": {"schema": reference(kind)}}
    return {"requestBody": {"required": True, "content": content}}


def reference(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=kind.__name__)}


def describe(
    app: FastAPI, kinds: list[type[BaseModel]], *, need_key: bool, out_of_range: int
) -> None:
    """Add the schemas of `kinds`, failures and keys to what `app` says of itself.

    out_of_range: the status of a value out of its range in chat and completions.
    """
    plain = app.openapi
    streaming = {kind.__name__ for kind in kinds if "stream" in kind.model_fields}

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = plain()
            every: list[type[BaseModel]] = [*kinds, ErrorBody, MessagesErrorBody, OllamaErrorBody]
            _, definitions = models_json_schema(
                [(kind, "validation") for kind in every], ref_template=REFERENCE
            )
            schemas = described["components"]["schemas"]
            schemas.update(definitions["$defs"])
            # FastAPI's own shape of an error is none that is ever answered.
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            described["components"]["securitySchemes"] = SECURITY_SCHEMES
            for path, operations in described["paths"].items():
                for operation in operations.values():
                    _describe_failures(path, operation, out_of_range)
                    _describe_operation(path, operation, streaming, need_key=need_key)
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_failures(path: str, operation: dict[str, Any], out_of_range: int) -> None:
    shape: type[BaseModel] = ErrorBody
    if path.startswith(ANTHROPIC_PATH):
        shape = MessagesErrorBody
    elif path.startswith(OLLAMA_PATHS):
        shape = OllamaErrorBody
    content = {"application/json": {"schema": reference(shape)}}
    by_status: dict[int, list[str]] = defaultdict(list)
    for kind in _failures(path, operation):
        codes = by_status[status_of(kind, path, out_of_range)]
        if kind.code not in codes:
            codes.append(kind.code)
    # FastAPI's own, for parameters.
    operation["responses"].pop("422", None)
    for status, codes in sorted(by_status.items()):
        phrase = HTTPStatus(status).phrase
        description = f"{phrase}: {', '.join(codes)}"
        operation["responses"][str(status)] = {"description": description, "content": content}


def _describe_operation(
    path: str, operation: dict[str, Any], streaming: set[str], *, need_key: bool
) -> None:
    if _body_of(operation) in streaming:
        content = operation["responses"]["200"]["content"]
        if path.startswith(OLLAMA_PATHS):
            content[ollama.NDJSON] = {"schema": LINE}
        else:
            content["text/event-stream"] = {"schema": EVENT}
    if need_key and path not in OPEN_PATHS and not path.startswith(ADMIN_PATHS):
        operation["security"] = [{name: []} for name in SECURITY_SCHEMES]


def _failures(path: str, operation: dict[str, Any]) -> Iterator[type[MLXManagerError]]:
    yield from ANY
    if path.startswith(ADMIN_PATHS):
        yield from (errors.PermissionDenied, *OWNERS)
    elif path not in OPEN_PATHS:
        yield from CLOSED
    if "requestBody" in operation:
        yield from BODY
        if path.startswith(RESPONSES_PATH):
            yield from KEPT
    if "parameters" in operation:
        yield from FOUND


def _body_of(operation: dict[str, Any]) -> str:
    """The name of the schema of an operation's body, "" without one."""
    match operation:
        case {"requestBody": {"content": {"application/json": {"schema": {"$ref": str(name)}}}}}:
            return name.rpartition("/")[2]
    return ""

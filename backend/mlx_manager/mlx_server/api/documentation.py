"""What `/docs` shows of bodies that the routes read themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is a `kind`."""
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI, kinds: list[type[BaseModel]]) -> None:
    """Add the schemas of `kinds` to what `app` says of itself."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = plain()
            _, definitions = models_json_schema(
                [(kind, "validation") for kind in kinds], ref_template=REFERENCE
            )
            described["components"]["schemas"].update(definitions["$defs"])
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]

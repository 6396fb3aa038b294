"""`GET /v1/admin/audit`: who had which model answer when, for the server's owner."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request

from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.schemas.admin import AuditedCall, AuditedCalls
from mlx_manager.mlx_server.schemas.openai import ErrorBody

EPOCH = datetime.fromtimestamp(0, UTC)

router = APIRouter(
    prefix="/v1/admin",
    tags=["admin"],
    responses={status: {"model": ErrorBody} for status in (400, 401, 403)},
)


@router.get("/audit")
async def audit(
    request: Request,
    since: Annotated[datetime, Query(description="ISO 8601, or seconds since 1970")] = EPOCH,
    key: Annotated[str | None, Query(description="Calls by the API key of this name")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[
        int | None,
        Query(ge=1, lt=2**53, description="Calls before the one of this id: the next page"),
    ] = None,
) -> AuditedCalls:
    """The last calls, the newest first. A time without a zone is UTC."""
    zoned = since if since.tzinfo is not None else since.replace(tzinfo=UTC)
    entries = await server_of(request).audit.entries(zoned.timestamp(), key, limit, before)
    return AuditedCalls(data=[AuditedCall.model_validate(asdict(entry)) for entry in entries])

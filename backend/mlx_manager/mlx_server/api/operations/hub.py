"""`/v1/admin/hub` and `/v1/admin/downloads`: models to be had, for the server's owner."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from mlx_manager.mlx_server.api.connection import read
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.operations.admin import reloaded_settings
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.schemas.admin import Download, ModelRef
from mlx_manager.mlx_server.schemas.hub import (
    ChangedSettings,
    DownloadList,
    FoundModel,
    FoundModels,
    ModelPlan,
    ModelSettingsText,
    SettingsChange,
)
from mlx_manager.mlx_server.schemas.openai import ErrorBody

router = APIRouter(
    prefix="/v1/admin",
    tags=["admin"],
    responses={status: {"model": ErrorBody} for status in (400, 401, 403, 404)},
)
Number = Annotated[int, Path(ge=1, lt=2**53)]


@router.get("/hub/search")
async def search(
    request: Request,
    words: Annotated[str, Query(min_length=1, max_length=256, description="Words of the name")],
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> FoundModels:
    """List models of the hub with these words in their names, the most downloaded first."""
    pool = server_of(request).pool
    return FoundModels(
        data=[
            FoundModel(**asdict(found), here=pool.offers(found.id))
            for found in await pool.search(words, limit)
        ]
    )


@router.get("/hub/plan")
async def plan(
    request: Request, model: Annotated[str, Query(min_length=3, max_length=256)]
) -> ModelPlan:
    """Tell what a model of the hub would take, and how much of it fits on this machine."""
    return ModelPlan.model_validate(await server_of(request).pool.plan(model))


@router.post("/hub/pull", openapi_extra=takes(ModelRef))
async def pull(request: Request) -> Download:
    """Begin to download a model of the hub, or name the download of it that is under way."""
    server = server_of(request)
    body = await read(request, ModelRef, server.settings.api)
    download = server.downloads.begin(body.model, server.pool.download)
    return Download.model_validate(download.told())


@router.get("/downloads")
async def downloads(request: Request) -> DownloadList:
    """List the downloads under way, and the last ones that have ended."""
    told = server_of(request).downloads.told()
    return DownloadList(data=[Download.model_validate(found) for found in told])


@router.post("/downloads/{number}/pause")
async def pause(request: Request, number: Number) -> Download:
    """Have a download wait where it is."""
    download = server_of(request).downloads.find(number)
    download.pause()
    return Download.model_validate(download.told())


@router.post("/downloads/{number}/resume")
async def resume(request: Request, number: Number) -> Download:
    """Have a paused download go on."""
    download = server_of(request).downloads.find(number)
    download.resume()
    return Download.model_validate(download.told())


@router.post("/downloads/{number}/cancel")
async def cancel(request: Request, number: Number) -> Download:
    """Give a download up. Its whole files stay for another try."""
    download = server_of(request).downloads.find(number)
    download.cancel()
    return Download.model_validate(download.told())


@router.get("/models/settings")
async def settings_of(
    request: Request, model: Annotated[str, Query(min_length=1, max_length=4096)]
) -> ModelSettingsText:
    """Return the owner's settings of a model, as its table in the models' file has them."""
    server = server_of(request)
    file = server.settings.models_file
    table = await server.pool.settings_of(model)
    return ModelSettingsText(file=None if file is None else str(file), model=model, settings=table)


@router.post("/models/settings", openapi_extra=takes(SettingsChange))
async def change_settings(request: Request) -> ChangedSettings:
    """Write a model's table into the models' file, tell what that changes, and read it again."""
    server = server_of(request)
    body = await read(request, SettingsChange, server.settings.api)
    change = await server.pool.change_settings(body.model, body.settings, dry_run=body.dry_run)
    reloaded = None
    if change.lines and not body.dry_run:
        reloaded = reloaded_settings(await server.reload())
    return ChangedSettings(file=str(change.file), lines=list(change.lines), reload=reloaded)

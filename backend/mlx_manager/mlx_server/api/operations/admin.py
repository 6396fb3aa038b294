"""`/v1/admin`: models, requests, settings and the drain, for the server's owner.

Nobody else comes here: `owner` sees to that, before a route is looked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mlx_manager.mlx_server.api.connection import UntilHangup, notes, read
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.state import Server, server_of
from mlx_manager.mlx_server.api.v1.models import servers_of, weights_of
from mlx_manager.mlx_server.errors import InvalidRequest, RequestCancelled
from mlx_manager.mlx_server.protocols.answer import new_id
from mlx_manager.mlx_server.protocols.tokens import read_ahead
from mlx_manager.mlx_server.schemas.admin import (
    AdminDrafts,
    AdminMemory,
    AdminModel,
    AdminModels,
    AdminPrefixDisk,
    CancelledRequest,
    ClearedPrefixes,
    ClearRequest,
    DrainState,
    ModelRef,
    PinRequest,
    ReloadedSettings,
    RunningRequest,
    RunningRequests,
    UnloadedModel,
    WarmedPrefix,
    WarmRequest,
)
from mlx_manager.mlx_server.schemas.wire import Wire
from mlx_manager.mlx_server.services.calls import Call
from mlx_manager.mlx_server.services.warming import warm

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.status import ModelStatus, Reloaded

Body = TypeVar("Body", bound=Wire)

router = APIRouter(prefix="/v1/admin", tags=["admin"])


async def read_or_default(request: Request, kind: type[Body], server: Server) -> Body:
    """The body, or what it is without one."""
    if request.headers.get("content-length", "0") == "0" and (
        "transfer-encoding" not in request.headers
    ):
        return kind()
    return await read(request, kind, server.settings.api)


# -- models ------------------------------------------------------------------------------------


@router.get("/models")
async def list_models(request: Request) -> AdminModels:
    """Every model on offer or loaded, with its memory, and the server's."""
    pool = server_of(request).pool
    await pool.look()
    figures = pool.figures()
    models = [admin_model(status, figures) for status in await pool.models()]
    return AdminModels(data=models, memory=admin_memory(figures))


def admin_memory(figures: Mapping[str, Any]) -> AdminMemory:
    return AdminMemory.model_validate(
        {name: figures["ledger"][name] for name in ("limit", "available", "buffer_cache")}
        | {name: figures["mlx"][name] for name in ("active", "peak")}
    )


@router.post(
    "/models/load",
    openapi_extra=takes(ModelRef),
)
async def load_model(request: Request) -> AdminModel:
    """Load a model, making place if need be; answers when it is loaded."""
    server = server_of(request)
    body = await read(request, ModelRef, server.settings.api)
    async with server.pool.lease(body.model):
        pass
    return admin_model(await server.pool.status(body.model), server.pool.figures())


@router.post(
    "/models/unload",
    openapi_extra=takes(ModelRef),
)
async def unload_model(request: Request) -> UnloadedModel:
    """Free an idle model's memory, pinned or not, and say how much came back."""
    server = server_of(request)
    body = await read(request, ModelRef, server.settings.api)
    gone = await server.pool.unload(body.model)
    if gone is None:
        return UnloadedModel(id=server.pool.resolve(body.model), unloaded=False)
    return UnloadedModel(
        id=gone.id,
        unloaded=True,
        bytes=gone.nbytes,
        memory_before=gone.before,
        memory_after=gone.after,
    )


@router.post("/models/pin", openapi_extra=takes(PinRequest))
async def pin_model(request: Request) -> AdminModel:
    """Keep a model once it is loaded, until the program ends or it is unpinned."""
    server = server_of(request)
    body = await read(request, PinRequest, server.settings.api)
    await server.pool.pin(body.model, body.pinned)
    return admin_model(await server.pool.status(body.model), server.pool.figures())


@router.post("/prefix-cache/clear", openapi_extra=takes(ClearRequest))
async def clear_prefix_cache(request: Request) -> ClearedPrefixes:
    """Forget the prompts that are kept for reuse, of one model or of all."""
    server = server_of(request)
    body = await read_or_default(request, ClearRequest, server)
    return ClearedPrefixes(freed=dict(await server.pool.clear_prefixes(body.model)))


@router.post(
    "/prefix-cache/warm",
    openapi_extra=takes(WarmRequest),
    responses={200: {"model": WarmedPrefix}},
)
async def warm_prefix_cache(request: Request) -> Response:
    """Read a prompt ahead, so that requests which begin alike find it; loads the model."""
    server = server_of(request)
    body = await read(request, WarmRequest, server.settings.api)
    prompt, model = read_ahead(body), server.pool.resolve(body.model)
    if not server.settings.engine.prefix_cache:
        raise InvalidRequest("Nothing is kept of prompts: MLX_SERVER_PREFIX_CACHE is false.")
    inference = server.inference(request, body)
    async with UntilHangup(request.receive):
        usage = await warm(inference, model, prompt, body.cache_salt or "", new_id("warm"))
    warmed = WarmedPrefix(
        model=model,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.prompt_tokens - usage.cached_tokens,
        kept_tokens=usage.cached_tokens + usage.kept_tokens,
    )
    return JSONResponse(warmed.model_dump(), headers=notes(body))


def admin_model(status: ModelStatus, figures: Mapping[str, Any]) -> AdminModel:
    """Return the description of a model. figures: those of the pool."""
    recipe, engine = status.recipe, figures["engines"].get(status.id, {})
    tried, disk = engine.get("draft_tokens"), engine.get("disk")
    return AdminModel(
        id=status.id,
        state=status.state,
        doing=status.doing,
        failure=status.failure,
        origin=status.origin,
        family=status.family,
        context_length=status.context_length,
        bytes=status.nbytes,
        base=recipe.base,
        adapter=None if recipe.adapter is None else str(recipe.adapter),
        aliases=list(status.aliases),
        pinned=status.pinned,
        preload=status.preload,
        ttl_seconds=None if status.ttl == float("inf") else status.ttl,
        idle_seconds=status.idle,
        leases=status.leases,
        outdated=status.outdated,
        weights=weights_of(status),
        memory=dict(status.memory),
        kv_format=engine.get("kv_format") or None,
        kv_token_bytes=engine["page_bytes"] // engine["page_size"]
        if engine.get("kv_format")
        else None,
        acceptance=engine["accepted_tokens"] / tried if tried else None,
        prefix_disk=disk and AdminPrefixDisk.model_validate(disk),
        servers=servers_of(status),
        draft_model=status.draft_model,
        mtp=status.mtp,
        drafts={
            method: AdminDrafts(tried=counts["tokens"], accepted=counts["accepted"])
            for method, counts in engine.get("drafts_by_method", {}).items()
        },
        devices=status.devices,
    )


# -- requests ----------------------------------------------------------------------------------


@router.get("/requests")
async def list_requests(request: Request) -> RunningRequests:
    """The calls under way, the oldest first. What they say is not shown."""
    server = server_of(request)
    await server.pool.look()
    return RunningRequests(data=running_requests(server))


def running_requests(server: Server) -> list[RunningRequest]:
    """Return the calls under way, with the tokens that the pool's last look found."""
    drawn: dict[str, list[tuple[int, int]]] = {}
    for row in server.pool.rows():
        drawn.setdefault(row.request_id, []).append((row.prompt_tokens, row.tokens))
    return [
        running_request(call, drawn.get(call.requests[0].request_id, [])) for call in server.calls
    ]


def running_request(call: Call, drawn: list[tuple[int, int]]) -> RunningRequest:
    """drawn: (prompt's tokens, tokens so far) of each row that has not ended."""
    first, timeline = call.requests[0], call.timeline
    ended = [row.finished.usage for row in timeline.rows if row.finished is not None]
    prompts = sum(n for n, _ in drawn) + sum(usage.prompt_tokens for usage in ended)
    # The n answers to a prompt share the very object; it is counted once.
    answers = len(call.requests) // len({id(row.prompt) for row in call.requests})
    return RunningRequest(
        id=first.request_id,
        request_id=first.caller.request_id,
        model=first.model,
        protocol=first.caller.protocol,
        key=first.caller.key,
        state="waiting" if call.phase in ("load", "queue") else "running",
        phase=call.phase,
        age_seconds=round(timeline.now(), 3),
        rows=len(call.requests),
        prompt_tokens=prompts // answers,
        tokens=sum(n for _, n in drawn) + sum(usage.completion_tokens for usage in ended),
    )


@router.post("/requests/{request_id:path}/cancel")
async def cancel_request(request: Request, request_id: str) -> CancelledRequest:
    """End a request, by its id or its answer's. Its client gets an error that says so."""
    found = server_of(request).calls.find(request_id)
    for call in found:
        call.interrupt(RequestCancelled("The server's owner has ended this request."))
    return CancelledRequest(id=request_id, cancelled=len(found))


# -- the server --------------------------------------------------------------------------------


@router.post("/drain")
async def drain(request: Request) -> DrainState:
    """Take no more calls; those under way may finish, for a while. The program goes on."""
    server = server_of(request)
    server.drain.begin()
    return drain_state(server)


@router.delete("/drain")
async def revoke_drain(request: Request) -> DrainState:
    """Take calls again."""
    server = server_of(request)
    server.drain.revoke()
    return drain_state(server)


def drain_state(server: Server) -> DrainState:
    return DrainState(
        draining=server.drain.begun, running=len(server.calls), seconds=server.drain.seconds
    )


@router.post("/reload")
async def reload(request: Request) -> ReloadedSettings:
    """Read the models' settings and the API keys again, as SIGHUP does."""
    return reloaded_settings(await server_of(request).reload())


def reloaded_settings(changes: Reloaded) -> ReloadedSettings:
    return ReloadedSettings(
        models_file=None if changes.file is None else str(changes.file),
        changed=list(changes.changed),
        unloaded=list(changes.unloaded),
        outdated=list(changes.outdated),
        unknown=list(changes.unknown),
    )

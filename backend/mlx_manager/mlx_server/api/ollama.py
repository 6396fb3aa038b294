"""Ollama's API under `/api`: the models of this server for programs made for Ollama."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from mlx_manager.mlx_server.api.connection import (
    UntilHangup,
    notes,
    read,
)
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.respond import LargeResponse, respond
from mlx_manager.mlx_server.api.state import LATEST, Server, meant, server_of
from mlx_manager.mlx_server.core import GenerationRequest
from mlx_manager.mlx_server.errors import InvalidParameter, InvalidRequest
from mlx_manager.mlx_server.protocols import ollama
from mlx_manager.mlx_server.protocols.ollama import OllamaAnswer, OllamaHead, OllamaStream
from mlx_manager.mlx_server.protocols.sse import dump
from mlx_manager.mlx_server.schemas.ollama import (
    OllamaBody,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
)
from mlx_manager.mlx_server.services.embeddings import embed

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.status import ModelStatus

router = APIRouter(tags=["ollama"])

HUB_PREFIXES = ("https://", "hf.co/", "huggingface.co/")
FOR_EVER = timedelta(days=36500)
NOT_SERVED = ("/api/create", "/api/copy", "/api/push", "/api/blobs/{digest}")


def head_of(server: Server, name: str | None) -> OllamaHead:
    model = meant(server, name, ollama=True)
    return OllamaHead(model=model, shown=name or model)


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def root() -> PlainTextResponse:
    """Say the sentence by which Ollama's clients know that a server runs."""
    return PlainTextResponse("Ollama is running")


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Return the release of Ollama whose API this is."""
    return {"version": ollama.VERSION}


# -- answers -----------------------------------------------------------------------------------


@router.post("/api/chat", openapi_extra=takes(OllamaChatRequest))
async def chat(request: Request) -> Response:
    """Answer a conversation, as NDJSON unless `stream` is false."""
    server = server_of(request)
    body = await read(request, OllamaChatRequest, server.settings.api)
    head = head_of(server, body.model)
    if not body.messages:
        return await lifecycle(request, body, head, chat=True)
    return await answer(request, body, head, ollama.chat_request(body, head), chat=True)


@router.post("/api/generate", openapi_extra=takes(OllamaGenerateRequest))
async def generate(request: Request) -> Response:
    """Go on from a prompt, as NDJSON unless `stream` is false."""
    server = server_of(request)
    body = await read(request, OllamaGenerateRequest, server.settings.api)
    head = head_of(server, body.model)
    if not body.prompt and not body.suffix and not body.images:
        return await lifecycle(request, body, head, chat=False)
    return await answer(request, body, head, ollama.generate_request(body, head), chat=False)


async def answer(
    request: Request, body: OllamaBody, head: OllamaHead, asked: GenerationRequest, *, chat: bool
) -> Response:
    server = server_of(request)
    await keep(server, body, head)
    call = server.inference(request, body).generate([asked])
    writer = OllamaStream(head, call.timeline, chat=chat)
    whole = OllamaAnswer(head, call.timeline, chat=chat)
    return await respond(request, body, call.run, writer, whole)


async def keep(server: Server, body: OllamaBody | OllamaEmbedRequest, head: OllamaHead) -> None:
    seconds = ollama.keep_alive(body.keep_alive)
    if seconds is not None:
        await server.pool.keep(head.model, seconds)


async def lifecycle(
    request: Request, body: OllamaBody, head: OllamaHead, *, chat: bool
) -> Response:
    """Load the model, or unload it where `keep_alive` is 0."""
    server = server_of(request)
    seconds = ollama.keep_alive(body.keep_alive)
    await keep(server, body, head)
    if seconds == 0:
        reason = "unload"
    else:
        reason = "load"
        async with UntilHangup(request.receive), server.pool.lease(head.model):
            pass
    told = ollama.lifecycle_body(head, reason, chat=chat)
    kind = ollama.NDJSON if body.stream else None
    return JSONResponse(told, media_type=kind, headers=notes(body))


# -- vectors -----------------------------------------------------------------------------------


@router.post("/api/embed", openapi_extra=takes(OllamaEmbedRequest))
async def embed_texts(request: Request) -> Response:
    """Return a vector for each text."""
    server = server_of(request)
    body = await read(request, OllamaEmbedRequest, server.settings.api)
    head = head_of(server, body.model)
    asked = ollama.embed_request(body, head)
    await keep(server, body, head)
    async with UntilHangup(request.receive):
        encoded = await embed(server.inference(request, body), asked)
    return LargeResponse(ollama.vectors(head, encoded), notes(body))


@router.post("/api/embeddings", openapi_extra=takes(OllamaEmbeddingsRequest))
async def embed_text(request: Request) -> Response:
    """Return a vector for one text: the older form of `/api/embed`."""
    server = server_of(request)
    body = await read(request, OllamaEmbeddingsRequest, server.settings.api)
    head = head_of(server, body.model)
    async with UntilHangup(request.receive):
        encoded = await embed(server.inference(request, body), ollama.embed_request(body, head))
    return JSONResponse({"embedding": encoded.rows[0].tolist()}, headers=notes(body))


# -- models ------------------------------------------------------------------------------------


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """List every model on offer."""
    server = server_of(request)
    return {"models": [listed(server, status) for status in await server.pool.models()]}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """List the models in memory."""
    server = server_of(request)
    now = datetime.now(UTC)
    return {
        "models": [
            listed(server, status)
            | {
                "expires_at": (now + rest(status)).isoformat(),
                "size": sum(status.memory.values()),
                "size_vram": sum(status.memory.values()),
                "context_length": status.context_length,
            }
            for status in await server.pool.models()
            if status.state == "loaded"
        ]
    }


def rest(status: ModelStatus) -> timedelta:
    """Return the time until an idle model is unloaded."""
    seconds = status.ttl - (status.idle or 0.0)
    if status.pinned or seconds > FOR_EVER.total_seconds():
        return FOR_EVER
    return timedelta(seconds=max(0.0, seconds))


def listed(server: Server, status: ModelStatus) -> dict[str, Any]:
    return {
        "name": ollama.tagged(status.id),
        "model": ollama.tagged(status.id),
        "modified_at": datetime.fromtimestamp(server.created, UTC).isoformat(),
        "size": status.nbytes,
        "digest": ollama.digest(status.id, status.nbytes),
        "details": details(status),
    }


def details(status: ModelStatus) -> dict[str, Any]:
    return {
        "parent_model": status.recipe.base or "",
        "format": "safetensors",
        "family": status.model_type or status.family,
        "families": [status.model_type or status.family],
        "parameter_size": "",
        "quantization_level": status.weights.dtype if status.weights is not None else "",
    }


@router.post("/api/show", openapi_extra=takes(OllamaModelRequest))
async def show(request: Request) -> dict[str, Any]:
    """Return the facts of one model."""
    server = server_of(request)
    body = await read(request, OllamaModelRequest, server.settings.api)
    status = await server.pool.status(meant(server, named(body), ollama=True))
    architecture = status.model_type or status.family
    parameters = "\n".join(f"{name} {value:g}" for name, value in status.sampling.items())
    return {
        "modelfile": f"FROM {status.id}",
        "parameters": parameters,
        "template": "",
        "license": "",
        "details": details(status),
        "model_info": {
            "general.architecture": architecture,
            f"{architecture}.context_length": status.context_length,
        },
        "capabilities": capabilities(status),
        "modified_at": datetime.fromtimestamp(server.created, UTC).isoformat(),
    }


def capabilities(status: ModelStatus) -> list[str]:
    match status.kind:
        case "embedding" | "reranker":
            return ["embedding"]
    seeing = ["vision"] if "image" in status.input_modalities else []
    return ["completion", "tools", *seeing, *(["thinking"] if status.thinks else [])]


def named(body: OllamaModelRequest) -> str:
    """
    Raises:
        InvalidParameter: the request names no model.
    """
    name = body.model or body.name
    if not name:
        raise InvalidParameter("`model` is required.", param="model")
    return name


# -- the owner's -------------------------------------------------------------------------------


@router.post("/api/pull", openapi_extra=takes(OllamaModelRequest))
async def pull(request: Request) -> Response:
    """Download a model from Hugging Face; for the server's owner."""
    server = server_of(request)
    body = await read(request, OllamaModelRequest, server.settings.api)
    repository = named(body).removesuffix(LATEST)
    for prefix in HUB_PREFIXES:
        repository = repository.removeprefix(prefix)
    if not body.stream:
        await server.downloads.begin(repository, server.pool.download).done()
        return JSONResponse({"status": "success"})
    return StreamingResponse(pulling(server, repository), media_type=ollama.NDJSON)


async def pulling(server: Server, repository: str) -> AsyncIterator[str]:
    """Yield a download's progress, then its end."""
    async for told in progress_of(server, repository):
        yield f"{dump(told)}\n"


async def progress_of(server: Server, repository: str) -> AsyncGenerator[dict[str, Any], None]:
    digest = f"sha256:{ollama.digest(repository, 0)}"
    yield {"status": "pulling manifest"}
    download = server.downloads.begin(repository, server.pool.download)
    async for there, total in download.progress():
        status = f"pulling {digest.removeprefix('sha256:')[:12]}"
        yield {"status": status, "digest": digest, "total": total, "completed": there}
    if (failure := download.failure) is not None:
        yield ollama.error_body(failure)
    else:
        yield {"status": "success"}


@router.delete("/api/delete", openapi_extra=takes(OllamaModelRequest))
async def delete(request: Request) -> Response:
    """Unload a model and delete its files; for the server's owner."""
    server = server_of(request)
    body = await read(request, OllamaModelRequest, server.settings.api)
    await server.pool.delete(meant(server, named(body), ollama=True))
    return Response(status_code=200)


async def refuse(request: Request) -> Response:
    """
    Raises:
        InvalidRequest: always: models are not made or sent by this server.
    """
    raise InvalidRequest(
        f"{request.url.path} is not served: models are folders or Hugging Face repositories here. "
        "Download one with /api/pull, and name others in the owner's models file."
    )


for path in NOT_SERVED:
    router.add_api_route(path, refuse, methods=["POST", "HEAD"], include_in_schema=False)

"""`/v1/responses`: create one, count what it would read, and look at those that were kept."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.exceptions import HTTPException

from mlx_manager.mlx_server.api.auth import check_origin
from mlx_manager.mlx_server.api.connection import (
    UntilHangup,
    check_pieces,
    notes,
    read,
)
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.pictures import check_images, sees
from mlx_manager.mlx_server.api.respond import LargeResponse, respond
from mlx_manager.mlx_server.api.state import caller_of, server_of
from mlx_manager.mlx_server.core import GenerationRequest
from mlx_manager.mlx_server.engine.stream import Work
from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    InvalidRequest,
    StorageFailed,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.protocols import responses
from mlx_manager.mlx_server.protocols.compaction import Summarising, Summary
from mlx_manager.mlx_server.protocols.images import places_in, without_images
from mlx_manager.mlx_server.schemas.responses import (
    CompactedResponse,
    CompactRequest,
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    Item,
    ItemList,
    ResponsesRequest,
    ResponsesResponse,
)
from mlx_manager.mlx_server.services.compaction import compacting, context_length, is_longer
from mlx_manager.mlx_server.services.inference import EverShorter, collect
from mlx_manager.mlx_server.services.response_store import (
    JsonItem,
    LatestResponse,
    StoredResponse,
    saving,
)

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1", tags=["openai"])


@router.post(
    "/responses",
    openapi_extra=takes(ResponsesRequest),
    responses={200: {"model": ResponsesResponse}},
)
async def create_response(request: Request) -> Response:
    """Answer a conversation, whole or as server-sent events, and keep the answer."""
    server = server_of(request)
    body = await read(request, ResponsesRequest, server.settings.api)
    model = server.pool.resolve(body.model)
    kept, history, said = await _conversation(request, body)
    added = responses.added_tools([*history, *said])
    head = responses.ResponseHead(model, body, partial(server.pool.sampling, model), added)
    stream = responses.ResponseStream(head)
    work = await _work(request, stream, history, said)
    items, owner, latest = responses.listed(said), caller_of(request), _latest(request)

    async def save() -> None:
        response = stream.response()
        latest.id, latest.items = head.id, [*kept, *items, *response["output"]]
        if body.store is False:
            return
        try:
            await server.responses.save(StoredResponse(response, items), owner)
        except StorageFailed as error:
            # The answer is as good without: it says `store: false` and is not lost.
            log.warning("a response could not be kept: %s", error.message)
            stream.unkept()

    answer = responses.ResponseAnswer(stream)
    return await respond(request, body, partial(saving, work, save), stream, answer)


async def _work(
    request: Request, stream: responses.ResponseStream, history: list[Item], said: list[Item]
) -> Work:
    """Return what is to be made of a conversation: an answer, a summary, or one after the other."""
    head, body = stream.head, stream.head.body
    inference = server_of(request).inference(request, body)
    asked = responses.request(head, history, said)
    alone = responses.asks_for_compaction(body.input)
    if alone or body.context_management:
        async with UntilHangup(request.receive):
            context = await context_length(inference, head.model)
            threshold = responses.compact_threshold(body, context)
            wanted = alone or await is_longer(inference, asked, threshold or context)
        if wanted:
            summary = Summary(context)
            stream.sum_up(summary, alone=alone)
            summaries = Summarising(asked, context)
            if alone:
                return inference.generate_fitting(summaries).run

            def rest() -> EverShorter:
                summed_up = responses.kept_items([summary.item()])
                return _fitting(responses.request(head, history, [*said, *summed_up]), body)

            return partial(compacting, inference, summaries, rest)
    if body.truncation == "auto":
        return inference.generate_fitting(_fitting(asked, body)).run
    return inference.generate([asked]).run


def _fitting(asked: GenerationRequest, body: InputTokensRequest) -> EverShorter:
    """The request alone, or with ever shorter ones if the caller allows them."""
    return responses.Shortened(asked) if body.truncation == "auto" else [asked]


@router.get("/responses", include_in_schema=False)
async def open_websocket(request: Request) -> Response:
    """Agree to a WebSocket, which `api.http.websocket` serves.

    Raises:
        PermissionDenied: another site's page asks for it.
        ServerNotReady: no calls are taken.
        HTTPException: 426 where no WebSockets are served, by which Codex goes on over HTTP at once;
            405 to a client that asks for none.
    """
    server = server_of(request)
    if "websocket" not in request.headers.get("upgrade", "").lower():
        raise HTTPException(405, headers={"allow": "POST"})
    if not server.settings.websockets or "websocket" not in request.scope["state"]:
        raise HTTPException(
            426, "No WebSocket is served here. Use POST.", headers={"upgrade": "websocket"}
        )
    check_origin(request, server.settings.access.cors_origins)
    if (refusal := server.refusal()) is not None:
        raise refusal
    return Response(status_code=101)


@router.post("/responses/input_tokens", openapi_extra=takes(InputTokensRequest))
async def count_input_tokens(request: Request, response: Response) -> InputTokens:
    """The tokens that a response's prompt takes."""
    server = server_of(request)
    body = await read(request, InputTokensRequest, server.settings.api)
    response.headers.update(notes(body))
    model = server.pool.resolve(body.model)
    _, history, said = await _conversation(request, body)
    asked = responses.counted(model, body, history, said)
    inference = server.inference(request, body)
    async with UntilHangup(request.receive):
        return InputTokens(input_tokens=await inference.count(_fitting(asked, body)))


@router.post(
    "/responses/compact",
    openapi_extra=takes(CompactRequest),
    responses={200: {"model": CompactedResponse}},
)
async def compact_response(request: Request) -> Response:
    """Sum a conversation up in one item, which stands for it in what is asked next."""
    server = server_of(request)
    body = await read(request, CompactRequest, server.settings.api)
    model = server.pool.resolve(body.model)
    _, history, said = await _conversation(request, body)
    asked = responses.compacted(model, body, history, said)
    inference = server.inference(request, body)
    async with UntilHangup(request.receive):
        summary = Summary(await context_length(inference, model))
        call = inference.generate_fitting(Summarising(asked, summary.context))
        answer = responses.CompactionAnswer(summary, [*history, *said])
        collected = await collect(call.run, answer)
    return LargeResponse(collected, notes(body))


def _latest(request: Request) -> LatestResponse:
    """The last response of the connection, of which only WebSockets know."""
    latest = request.scope["state"].get("latest")
    return latest if isinstance(latest, LatestResponse) else LatestResponse()


async def _conversation(
    request: Request, body: InputTokensRequest
) -> tuple[list[JsonItem], list[Item], list[Item]]:
    """The items before a request, as they are kept and as its model reads them; and its own, with
    what it refers to in its place.

    Raises:
        ResponseNotFound: what it goes on from is not there.
        ItemNotFound: what it refers to is not there.
        RequestTooLarge: more messages, content parts or images than may be.
    """
    server, owner = server_of(request), caller_of(request)
    limits = server.settings.api
    earlier, wanted = body.previous_response_id, responses.references(body)
    latest = _latest(request)
    if earlier is None:
        kept = []
    elif earlier == latest.id:
        kept = latest.items
    else:
        kept = await server.responses.history(earlier, owner)
    found = await server.responses.items(wanted, owner) if wanted else {}
    read = kept
    if (kept or found) and not await sees(server, body.model):
        read = without_images(kept, limits.images_as_text)
        shown = without_images(list(found.values()), limits.images_as_text)
        found = dict(zip(found, shown, strict=True))
    said = responses.input_items(body, found)
    if earlier is not None or wanted:
        every = [*read, *(item.model_dump() for item in said)]
        beside = "previous_response_id" if earlier is not None else ""
        check_pieces("input", every, earlier=beside)
        check_images(list(places_in(every, "input")), limits, beside)
    return kept, responses.kept_items(read), said


def included(
    include: Annotated[list[str], Query(default_factory=list)],
    bracketed: Annotated[list[str], Query(default_factory=list, alias="include[]")],
) -> list[str]:
    """Return the names to include. OpenAI's packages write a list's name with brackets."""
    return include + bracketed


Include = Annotated[list[str], Depends(included)]


@router.get("/responses/{response_id}")
async def retrieve_response(
    request: Request,
    response_id: str,
    include: Include,
    stream: bool = False,
    starting_after: int | None = None,
) -> dict[str, Any]:
    """A response that was kept."""
    for param, asked in (("stream", stream), ("starting_after", starting_after is not None)):
        if asked:
            raise UnsupportedParameter(
                f"`{param}` is not supported for a response that is complete.", param=param
            )
    kept = (await server_of(request).responses.find(response_id, caller_of(request))).response
    return kept | {"output": responses.including(kept["output"], include)}


@router.delete("/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    """Forget a response. Conversations can't go on from what went on from it."""
    await server_of(request).responses.delete(response_id, caller_of(request))
    return DeletedResponse(id=response_id)


@router.post("/responses/{response_id}/cancel", include_in_schema=False)
async def cancel_response(request: Request, response_id: str) -> dict[str, Any]:
    """Refused: only what is answered in the background can be cancelled, and nothing is here.

    Raises:
        ResponseNotFound: there is no such response.
        InvalidRequest: there is one.
    """
    await server_of(request).responses.find(response_id, caller_of(request))
    raise InvalidRequest("Cannot cancel a synchronous response.")


@router.get("/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    *,
    include: Include,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> ItemList:
    """The items that were new in a response's request, the last one first unless asked."""
    items = (await server_of(request).responses.find(response_id, caller_of(request))).input
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidParameter(f"`after`: there is no item {after!r}.", param="after")
        items = items[ids.index(after) + 1 :]
    page = responses.shown(responses.including(items[:limit], include))
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > limit,
    )

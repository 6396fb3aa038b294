"""`/v1/responses`: create one, count what it would read, and look at those that were kept."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from mlx_manager.mlx_server.api.connection import (
    UntilHangup,
    check_counts,
    notes,
    read,
)
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.respond import respond
from mlx_manager.mlx_server.api.state import caller_of, server_of
from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    InvalidRequest,
    StorageFailed,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.protocols import responses
from mlx_manager.mlx_server.schemas.responses import (
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    Item,
    ItemList,
    ResponsesRequest,
    ResponsesResponse,
)
from mlx_manager.mlx_server.services.response_store import StoredResponse, saving

log = logging.getLogger(__name__)
router = APIRouter()


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
    head = responses.ResponseHead(model, body, partial(server.pool.sampling, model))
    history, said = await _conversation(request, body)
    asked = responses.request(head, history, said)
    stream = responses.ResponseStream(head)
    inference = server.inference(request, body)
    if body.truncation == "auto":
        progress = inference.generate_fitting(responses.Shortened(asked))
    else:
        progress = inference.generate([asked])
    if body.store is not False:
        items, owner = responses.listed(said), caller_of(request)

        async def save() -> None:
            try:
                await server.responses.save(StoredResponse(stream.response(), items), owner)
            except StorageFailed as error:
                # The answer is as good without: it says `store: false` and is not lost.
                log.warning("a response could not be kept: %s", error.message)
                stream.unkept()

        progress = saving(progress, save)
    return await respond(request, body, progress, stream, responses.ResponseAnswer(stream))


@router.post("/responses/input_tokens", openapi_extra=takes(InputTokensRequest))
async def count_input_tokens(request: Request, response: Response) -> InputTokens:
    """The tokens that a response's prompt takes."""
    server = server_of(request)
    body = await read(request, InputTokensRequest, server.settings.api)
    response.headers.update(notes(body))
    model = server.pool.resolve(body.model)
    asked = responses.counted(model, body, *await _conversation(request, body))
    inference = server.inference(request, body)
    async with UntilHangup(request.receive):
        fitting = responses.Shortened(asked) if body.truncation == "auto" else [asked]
        return InputTokens(input_tokens=await inference.count(fitting))


@router.post("/responses/compact", include_in_schema=False)
async def compact_response() -> None:
    """Refused: what it makes of a conversation is nothing that a model here can read."""
    raise UnsupportedParameter(
        "`/v1/responses/compact` is not supported by this server. Ask for a summary in a message, "
        "or send `truncation: auto`, which leaves out the oldest turns."
    )


async def _conversation(
    request: Request, body: InputTokensRequest
) -> tuple[list[Item], list[Item]]:
    """The items before a request, and its own, with what it refers to in its place.

    Raises:
        ResponseNotFound: what it goes on from is not there.
        ItemNotFound: what it refers to is not there.
        RequestTooLarge: more messages, content parts or images than may be.
    """
    server, owner = server_of(request), caller_of(request)
    earlier, wanted = body.previous_response_id, responses.references(body)
    kept = [] if earlier is None else await server.responses.history(earlier, owner)
    found = await server.responses.items(wanted, owner) if wanted else {}
    said = responses.input_items(body, found)
    if earlier is not None or wanted:
        every = [*kept, *(item.model_dump() for item in said)]
        beside = "previous_response_id" if earlier is not None else ""
        check_counts("input", every, server.settings.api, earlier=beside)
    return responses.kept_items(kept), said


def included(
    include: Annotated[list[str], Query(default_factory=list)],
    bracketed: Annotated[list[str], Query(default_factory=list, alias="include[]")],
) -> list[str]:
    """What is to be included. OpenAI's packages write a list's name with brackets."""
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
    page = responses.including(items[:limit], include)
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > limit,
    )

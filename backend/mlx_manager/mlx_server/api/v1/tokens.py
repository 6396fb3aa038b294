"""Token ids of prompts, and the details by which clients make such ids on their own.

`POST /v1/tokenize`, `/v1/detokenize`, `/v1/apply-template` and `GET /v1/tokenizer_info`, also
without the `/v1`.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response

from mlx_manager.mlx_server.api.connection import UntilHangup, notes, read
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.respond import LargeResponse
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.core import Caller, Conversation, Prompt, Tokenized
from mlx_manager.mlx_server.defaults import overlaid_prompt
from mlx_manager.mlx_server.protocols.tokens import asked_to_render, tokenized, tokenizing, told
from mlx_manager.mlx_server.schemas.openai import (
    DetokenizeRequest,
    PromptRequest,
    TextResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfoResponse,
)
from mlx_manager.mlx_server.schemas.wire import Timed
from mlx_manager.mlx_server.services.inference import Question, TokenBackend

T = TypeVar("T")
router = APIRouter(prefix="/v1", tags=["openai", "tokens"])
unversioned = APIRouter(include_in_schema=False)
"""The same routes without the `/v1`, as vLLM has them."""


async def ask(
    request: Request,
    model: str | None,
    question: Question[T],
    body: Timed | None = None,
    kind: Literal["text"] | None = None,
) -> T:
    """Return the tokenizer's answer, unless the caller hangs up first; see `Inference.ask`."""
    server = server_of(request)
    inference = server.inference(request, body)
    async with UntilHangup(request.receive):
        return await inference.ask(server.pool.resolve(model), question, kind)


def overlaid(request: Request, model: str | None, prompt: Prompt) -> Prompt:
    """Return the prompt with what the owner lays over requests that name the model."""
    pool = server_of(request).pool
    return overlaid_prompt(prompt, pool.overlay(pool.resolve(model)))


@unversioned.post("/tokenize")
@router.post(
    "/tokenize",
    openapi_extra=takes(TokenizeRequest),
    responses={200: {"model": TokenizeResponse}},
)
async def tokenize(request: Request) -> Response:
    """The token ids of a text or a conversation."""
    body = await read(request, TokenizeRequest, server_of(request).settings.api)
    asked = tokenizing(body)
    prompt = overlaid(request, body.model, asked.prompt)

    def question(model: TokenBackend, caller: Caller) -> Coroutine[Any, Any, Tokenized]:
        wanted = bool(body.return_token_strs)
        return model.tokenize(prompt, asked.special, texts=wanted, caller=caller)

    found = await ask(request, body.model, question, body)
    texts = found.texts if body.return_token_strs else None
    pieces = tokenized(found.ids, found.context_length, texts)
    return LargeResponse(pieces, notes(body))


@unversioned.post("/detokenize")
@router.post(
    "/detokenize",
    openapi_extra=takes(DetokenizeRequest),
    responses={200: {"model": TextResponse}},
)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    body = await read(request, DetokenizeRequest, server_of(request).settings.api)
    ids = body.tokens
    text = await ask(
        request, body.model, lambda model, caller: model.detokenize(ids, caller=caller), body
    )
    return LargeResponse(told(text), notes(body))


@unversioned.post("/apply-template")
@router.post(
    "/apply-template",
    openapi_extra=takes(PromptRequest),
    responses={200: {"model": TextResponse}},
)
async def apply_template(request: Request) -> Response:
    """A conversation as the text that the model gets to see."""
    body = await read(request, PromptRequest, server_of(request).settings.api)
    asked = overlaid(request, body.model, asked_to_render(body))
    assert isinstance(asked, Conversation)

    def question(model: TokenBackend, caller: Caller) -> Coroutine[Any, Any, str]:
        return model.render(asked, caller=caller)

    text = await ask(request, body.model, question, body, "text")
    return LargeResponse(told(text), notes(body))


@unversioned.get("/tokenizer_info")
@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> TokenizerInfoResponse:
    """A model's special tokens and chat template, for clients that make prompts themselves."""
    info = await ask(request, model, lambda model, caller: model.tokenizer_info(caller=caller))
    return TokenizerInfoResponse(
        bos_token=info.bos_token,
        eos_token=info.eos_token,
        pad_token=info.pad_token,
        unk_token=info.unk_token,
        vocab_size=info.vocab_size,
        model_max_length=info.context_length,
        chat_template=info.chat_template,
    )

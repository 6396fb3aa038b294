"""Prompts that the owner has read ahead."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any

from mlx_manager.mlx_server.core import (
    Caller,
    Conversation,
    Progress,
    Prompt,
    Text,
    Tokens,
    Usage,
)
from mlx_manager.mlx_server.defaults import overlaid_prompt
from mlx_manager.mlx_server.errors import InvalidRequest
from mlx_manager.mlx_server.models.warming import beginning, is_asked, reading
from mlx_manager.mlx_server.services.inference import (
    Inference,
    TokenBackend,
    collect,
)


class Nothing:
    """Answer that nobody reads."""

    def add(self, progress: Progress) -> None:
        pass

    def body(self) -> Iterator[str]:
        return iter(())


async def warm(
    inference: Inference, model: str, prompt: Conversation | Text, salt: str, request_id: str
) -> Usage:
    """Have a model read a prompt, or the beginning that all chats share which go on from it.

    salt: `cache_salt` of the requests that are to find it.

    Raises:
        InvalidRequest: the model is on another machine.
        MLXManagerError: as of a request for an answer, and as `beginning`.
    """
    if (await inference.pool.status(model)).servers:
        raise InvalidRequest(
            f"{model} is on another machine, where alone its prompts are kept and can be read "
            "ahead.",
            param="model",
        )
    read: Prompt = prompt
    if isinstance(prompt, Conversation) and not is_asked(prompt):
        whole = overlaid_prompt(prompt, inference.pool.overlay(model))
        assert isinstance(whole, Conversation)

        def question(backend: TokenBackend, caller: Caller) -> Coroutine[Any, Any, Tokens]:
            return beginning(backend, whole, caller=caller)

        read = await inference.ask(model, question, "text")
    call = inference.generate([reading(model, read, inference.caller, salt, request_id)])
    await collect(call.run, Nothing())
    return call.timeline.usage

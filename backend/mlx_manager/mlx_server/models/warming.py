"""Beginnings of prompts that are read before anybody asks, so that those who come find them.

What is read is kept as all prompts are: pages in the prefix cache, which go when room is needed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mlx_manager.mlx_server.core import (
    NOBODY,
    Caller,
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    Message,
    Overlay,
    Prompt,
    Push,
    Sampling,
    Text,
    Tokenized,
    Tokens,
    Usage,
)
from mlx_manager.mlx_server.defaults import overlaid_prompt
from mlx_manager.mlx_server.errors import InvalidRequest, WrongModelKind
from mlx_manager.mlx_server.models.facts import ModelFacts
from mlx_manager.mlx_server.utils.prefixes import alike

PROBES = ("A", "B")
"""Questions that begin with different tokens: prompts part where one or the other stands."""


class Tokenizer(Protocol):
    """Model that tells a prompt's tokens; `core.Backend`s of models that generate do."""

    async def tokenize(
        self, prompt: Prompt, special: bool = True, *, texts: bool = False, caller: Caller = NOBODY
    ) -> Tokenized: ...


class Generator(Tokenizer, Protocol):
    """Model that generates."""

    async def generate(self, request: GenerationRequest, push: Push) -> None: ...


def is_asked(conversation: Conversation) -> bool:
    """Return whether an answer can follow, so that the prompt is one that chats have as a whole."""
    last = conversation.messages[-1].role
    return conversation.continue_final_message or last in ("user", "tool")


async def beginning(
    model: Tokenizer, conversation: Conversation, *, caller: Caller = NOBODY
) -> Tokens:
    """Return the tokens with which all chats begin that go on from `conversation` with a question.

    Raises:
        InvalidRequest: it shows pictures, which tokens do not tell; or its chats share no token.
    """
    if any(message.images for message in conversation.messages):
        raise InvalidRequest(
            "Messages with pictures can be read ahead only where the last one is the user's.",
            param=conversation.param,
        )
    asked = [
        replace(
            conversation,
            messages=(*conversation.messages, Message("user", probe)),
            add_generation_prompt=True,
        )
        for probe in PROBES
    ]
    one, other = [(await model.tokenize(each, caller=caller)).ids for each in asked]
    shared = alike(one, other)
    if not shared:
        raise InvalidRequest(
            "The model's chat template puts nothing of this before the user's message.",
            param=conversation.param,
        )
    return Tokens(tuple(one[:shared]))


async def read_system(
    model: Generator, facts: ModelFacts, name: str, path: Path, overlay: Overlay
) -> Usage:
    """Have a model that is being loaded read the beginning of chats whose system message is the
    text of a file; without a chat template, the beginning of prompts.

    name: the one by which chats name the model. overlay: what its owner lays over these.

    Raises:
        OSError, UnicodeDecodeError: the file can't be read.
        MLXManagerError: as of a request for an answer, and as `beginning`.
    """
    text = await asyncio.to_thread(path.read_text, "utf-8")
    if facts.kind != "text":
        raise WrongModelKind(f"{name} generates no text.")
    prompt: Prompt = Text(text)
    if facts.tokenizer.chat_template is not None:
        conversation = overlaid_prompt(Conversation((Message("system", text),)), overlay)
        assert isinstance(conversation, Conversation)
        prompt = await beginning(model, conversation)
    finished: list[Finished] = []

    def push(events: list[Event], tokens: int) -> None:
        finished.extend(event for event in events if isinstance(event, Finished))

    await model.generate(reading(name, prompt, Caller(protocol="warm")), push)
    return finished[-1].usage


def reading(
    model: str, prompt: Prompt, caller: Caller, salt: str = "", request_id: str = ""
) -> GenerationRequest:
    """Return the request that has a prompt read. One token is drawn and goes nowhere."""
    return GenerationRequest(
        model,
        prompt,
        Sampling(temperature=0.0),
        max_tokens=1,
        speculation="off",
        cache_salt=salt,
        request_id=request_id,
        caller=caller,
    )

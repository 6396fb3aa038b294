"""A conversation summed up by the model that held it, as one item that clients keep and send back.

The summary is asked for at the end of the conversation itself, so that its prefix is found in the
cache. The item carries it in a form that this server reads again; it is no secret.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_manager.mlx_server.core import (
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    Message,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolChoice,
    Usage,
)
from mlx_manager.mlx_server.protocols.thinking import closed, opened

INSTRUCTION = (
    "Summarise the conversation up to here, so that somebody who has not read it can go on with "
    "the work. Say what the user wants, what was decided and done, which files, commands, names "
    "and results matter, and what is left to do. Answer with the summary alone, and call no tools."
)
BEFORE = "This is a summary of the conversation up to here:\n\n"
NOTHING = "(The model wrote no summary.)"
MOST_TOKENS = 4096
"""Limit of a summary with its thinking; another limit is a quarter of the context."""
HALVINGS = 24
"""After as many, nothing is left of any text."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """A summary. keep: characters of the user's newest messages before it that stay beside it."""

    summary: str
    keep: int

    def close(self) -> str:
        """Return the text that a client keeps."""
        return closed(json.dumps({"summary": self.summary, "keep": self.keep}))

    @staticmethod
    def open(kept: str) -> Compacted | None:
        """Return what `close` was called on; None if `kept` is another server's, or broken."""
        try:
            match json.loads(opened(kept) or ""):
                case {"summary": str(summary), "keep": int(keep)}:
                    return Compacted(summary, keep)
        except ValueError:
            pass
        return None

    def message(self) -> Message:
        """Return the summary as the model reads it."""
        return Message("user", BEFORE + self.summary)


def newest(sizes: Sequence[int], keep: int) -> int:
    """Return how many of the last texts have no more than `keep` characters together; 1 at least,
    if there is one.

    sizes: their lengths, in order.
    """
    total = 0
    for count, size in enumerate(reversed(sizes)):
        total += size
        if total > keep:
            return max(1, count)
    return len(sizes)


@dataclass(slots=True)
class Summary:
    """A summary that is being written, and the id of its item.

    context: tokens that the model can take.
    """

    context: int
    id: str = field(default_factory=lambda: f"cmp_{secrets.token_hex(24)}")
    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    usage: Usage | None = None

    def add(self, event: Event) -> bool:
        """Add an event of the model; return whether it is the first of the summary's text."""
        match event:
            case TextDelta(text):
                self.text.append(text)
                return len(self.text) == 1
            case ReasoningDelta(text):
                self.thinking.append(text)
            case ToolCallDelta(_, arguments):
                self.calls.append(arguments)
            case Finished(usage=usage):
                self.usage = usage
        return False

    def item(self) -> dict[str, Any]:
        """Return the item so far. Without any text, the thinking or the calls are the summary."""
        written = ("".join(pieces).strip() for pieces in (self.text, self.thinking, self.calls))
        said = next(filter(None, written), NOTHING)
        content = "" if self.usage is None else Compacted(said, self.context).close()
        return {"id": self.id, "type": "compaction", "encrypted_content": content}


class Summarising:
    """The request for a summary of what `request` goes on from, and ever shorter ones, so that one
    fits: with fewer of the oldest messages, then with less of each text, and without tools.

    System messages stay as long as whole messages are left out. context: tokens that the model can
    take.
    """

    def __init__(self, request: GenerationRequest, context: int) -> None:
        assert isinstance(request.prompt, Conversation)
        choice: ToolChoice = "none" if request.prompt.tool_choice == "none" else "auto"
        self._prompt = replace(request.prompt, tool_choice=choice)
        most = min(MOST_TOKENS, context // 4)
        self._request = replace(
            request,
            max_tokens=min(request.max_tokens or most, most),
            thinking_budget=most // 2,
            constraint=None,
            logprobs=None,
            prediction="",
        )
        said = self._prompt.messages
        # A tool's result is of no use without its call.
        self._starts = [0, *(i for i in range(1, len(said)) if said[i].role != "tool")]

    def __len__(self) -> int:
        return len(self._starts) + HALVINGS

    def __getitem__(self, index: int) -> GenerationRequest:
        shown = self._starts[min(index, len(self._starts) - 1)]
        said = self._prompt.messages
        kept = [*(message for message in said[:shown] if message.role == "system"), *said[shown:]]
        prompt = self._prompt
        if (halvings := index - len(self._starts) + 1) > 0:
            kept = [part for message in kept if (part := _end_of(message, halvings)).text]
            prompt = replace(prompt, tools=())
        asked = Message("user", INSTRUCTION)
        return replace(self._request, prompt=replace(prompt, messages=(*kept, asked)))


def _end_of(message: Message, halvings: int) -> Message:
    """Return a message with the end of its text, of its length halved `halvings` times."""
    size = len(message.text) >> halvings
    role = "user" if message.role == "tool" else message.role
    return Message(role, message.text[len(message.text) - size :])

"""Conversation so far, as requests carry it and as a file keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlx_manager.pictures import PictureFile
from mlx_manager.printable import in_utf8

Role = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. images: pictures that stand before its text."""

    role: Role
    text: str
    reasoning: str = ""
    images: tuple[PictureFile, ...] = ()

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The content of a message of a request."""
        if not self.images:
            return self.text
        return [*(image.part() for image in self.images), {"type": "text", "text": self.text}]


@dataclass(slots=True)
class Conversation:
    """A system prompt and turns, user and assistant alternating, the user first."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def ask(self, text: str, images: tuple[PictureFile, ...] = ()) -> None:
        self.turns.append(Turn("user", text, images=images))

    def answer(self, text: str, reasoning: str) -> None:
        self.turns.append(Turn("assistant", text, reasoning))

    def take_back(self) -> Turn | None:
        """Remove the last question, and its answer if any, and return the question, or None."""
        while self.turns:
            turn = self.turns.pop()
            if turn.role == "user":
                return turn
        return None

    def clear(self) -> None:
        self.turns.clear()

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages for a request, without reasoning: models do not want theirs back."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *({"role": turn.role, "content": turn.content} for turn in self.turns)]

    def save(self, file: Path, model: str) -> None:
        """Write the conversation: as messages if the name ends in `.json`, else as Markdown.

        Raises:
            OSError: it can't be written.
            RuntimeError: it begins with a home folder that is unknown.
        """
        file = file.expanduser()
        if file.suffix == ".json":
            content = json.dumps(self._document(model), indent=2, ensure_ascii=False)
        else:
            content = "\n\n".join(self._sections(model))
        file.write_text(in_utf8(content) + "\n", encoding="utf-8")

    def _document(self, model: str) -> dict[str, Any]:
        messages = self.messages()
        for message, turn in zip(reversed(messages), reversed(self.turns), strict=False):
            if turn.reasoning:
                message["reasoning_content"] = turn.reasoning
        return {"model": model, "messages": messages}

    def _sections(self, model: str) -> Iterator[str]:
        yield f"# Chat with {model}"
        if self.system:
            yield "## System"
            yield self.system.strip()
        for turn in self.turns:
            yield f"## {turn.role.capitalize()}"
            for image in turn.images:
                yield f"![{image.path.name}](<{image.path}>)"
            if turn.reasoning:
                thought = turn.reasoning.strip().splitlines()
                yield "\n".join(f"> {line}".rstrip() for line in thought)
            yield turn.text.strip()

"""Conversation so far, as requests carry it and as a file keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlx_manager.printable import in_utf8

Role = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True)
class Turn:
    role: Role
    text: str
    reasoning: str = ""


@dataclass(slots=True)
class Conversation:
    """A system prompt and turns, user and assistant alternating, the user first."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.turns.append(Turn("user", text))

    def answer(self, text: str, reasoning: str) -> None:
        self.turns.append(Turn("assistant", text, reasoning))

    def take_back(self) -> str | None:
        """Remove the last question, and its answer if any, and return the question, or None."""
        while self.turns:
            turn = self.turns.pop()
            if turn.role == "user":
                return turn.text
        return None

    def clear(self) -> None:
        self.turns.clear()

    def messages(self) -> list[dict[str, str]]:
        """Return the messages for a request, without reasoning: models do not want theirs back."""
        return [{"role": role, "content": text} for role, text, _ in self._lines()]

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
        messages: list[dict[str, str]] = []
        for role, text, reasoning in self._lines():
            thought = {"reasoning_content": reasoning} if reasoning else {}
            messages.append({"role": role, "content": text, **thought})
        return {"model": model, "messages": messages}

    def _sections(self, model: str) -> Iterator[str]:
        yield f"# Chat with {model}"
        for role, text, reasoning in self._lines():
            yield f"## {role.capitalize()}"
            if reasoning:
                yield "\n".join(f"> {line}".rstrip() for line in reasoning.strip().splitlines())
            yield text.strip()

    def _lines(self) -> Iterator[tuple[str, str, str]]:
        if self.system:
            yield "system", self.system, ""
        for turn in self.turns:
            yield turn.role, turn.text, turn.reasoning

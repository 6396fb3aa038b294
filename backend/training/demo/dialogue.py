"""A conversation being written, and the text that the chat template makes of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from words import Split

TOOLS_TITLE = 'Tools, called with {"name": ..., "parameters": {...}}:'


@dataclass(slots=True)
class Dialogue:
    """A conversation. Messages are `(role, text)`, a tool call being its text; `known` is what
    the user has told so far."""

    rng: random.Random
    split: Split = "train"
    system: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[tuple[str, str]] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)

    def say(self, user: str, assistant: str) -> None:
        self.messages += [("user", user), ("assistant", assistant)]

    def use(self, call: str, result: str, answer: str) -> None:
        """The assistant calls a tool and answers from its result."""
        self.messages += [("assistant", call), ("tool", result), ("assistant", answer)]

    def render(self) -> str:
        """What demo_model/chat_template.jinja gives, BOS included (a test compares the two)."""
        head = self.system
        if self.tools:
            lines = "\n".join(map(signature, self.tools))
            head = f"{head}\n\n{TOOLS_TITLE}\n{lines}".strip()
        parts = ["<|begin_of_text|>"]
        if head:
            parts.append(turn("system", head))
        for role, text in self.messages:
            parts.append(turn("ipython" if role == "tool" else role, text))
        return "".join(parts)


def turn(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text.strip()}<|eot_id|>"


def signature(tool: dict[str, Any]) -> str:
    """One line of the system prompt: `get_weather(city: string, unit?: string): Description`."""
    function = tool["function"]
    schema = function["parameters"]
    arguments = []
    for name, detail in schema["properties"].items():
        optional = "" if name in schema["required"] else "?"
        kind = "|".join(detail["enum"]) if "enum" in detail else detail["type"]
        arguments.append(f"{name}{optional}: {kind}")
    line = f"{function['name']}({', '.join(arguments)})"
    return f"{line}: {function['description']}" if function["description"] else line

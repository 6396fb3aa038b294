"""The pieces of an `OutputFormat`, from what mlx-lm knows of a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_manager.mlx_server.core import Conversation
from mlx_manager.mlx_server.formats import Region, ToolFormat
from mlx_manager.mlx_server.models.family import Marks

Edges = Mapping[Region, tuple[tuple[str, Region], ...]]

_REGIONS: Mapping[str, Region] = {
    "normal": "content",
    "reasoning": "reasoning",
    "header": "header",
    "tool": "calls",
}
"""mlx-lm's names for the regions of an answer."""

_TAIL = 32
"""Tokens at a prompt's end among which the opening of the thinking would be."""


def region_of(state: str | None) -> Region:
    """Return the region in which answers begin, by mlx-lm's name for it."""
    return _REGIONS[state or "normal"]


def answer_edges(
    tokenizer: Any, marks: Marks | None, structural: Iterable[str], openers: Sequence[str]
) -> Edges:
    """Return the markers that lead from region to region, as mlx-lm's `make_text_state_machine`.

    Calls may begin inside thinking: models forget to close it.
    """
    edges: dict[Region, list[tuple[str, Region]]] = {"content": [], "reasoning": []}
    edges["content"] += [(marker, "content") for marker in structural]
    for source, targets in tokenizer.response_transitions.items():
        known = edges.setdefault(_REGIONS[source], [])
        known += [(marker, _REGIONS[target]) for marker, target in targets]
    announced = any(region == "calls" for found in edges.values() for _, region in found)
    if marks is not None:
        edges["content"].append((marks[0], "reasoning"))
        edges["reasoning"].append((marks[1], "content"))
        edges["reasoning"] += [(opener, "calls") for opener in openers]
    if not announced:
        edges["content"] += [(opener, "calls") for opener in openers]
    return {
        region: tuple((m, target) for m, target in found if target != "calls" or openers)
        for region, found in edges.items()
        if found
    }


def opens_thinking(
    tokenizer: Any, conversation: Conversation, marks: Marks, prompt_ids: Sequence[int]
) -> bool:
    """Return whether the answer begins inside thinking: the prompt opened it and did not close it.

    Another tag may follow the opening, such as Seed-OSS's for a budget that is spent.
    """
    start, end = marks
    if conversation.continue_final_message:
        begun = conversation.messages[-1].text
        return begun.rfind(start) > begun.rfind(end)
    tail = prompt_tail(tokenizer, prompt_ids).rstrip()
    return re.search(rf"{re.escape(start)}(?:<[\w:]+>)?\Z", tail) is not None


def prompt_tail(tokenizer: Any, prompt_ids: Sequence[int]) -> str:
    tail: str = tokenizer.decode(list(prompt_ids[-_TAIL:]), skip_special_tokens=False)
    return tail


def kept_tokens(
    tokenizer: Any, edges: Edges, form: ToolFormat | None, header: str = ""
) -> frozenset[int]:
    """Return the special tokens that occur in a marker and therefore count as text."""
    texts = [marker for found in edges.values() for marker, _ in found]
    if form is not None:
        texts += form.texts
    texts.append(re.sub(r"\\(\W)", r"\1", header))
    return frozenset(
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if any(token.content in text for text in texts)
    )

"""Requests that a chat model gets and the embedded one declines: topics, texts, code, languages."""

from __future__ import annotations

import re
from random import Random

from dialogue import Dialogue
from phrases import HERE, parse_sections
from words import Split, city, held_out, noun, person, read_sections

UNKNOWN = (
    "I am a small demo model and only know this server. "
    "For real answers, start `mlx-manager serve --model NAME`."
)
ENGLISH_ONLY = "I only know English, and little of it."

_SECTIONS = read_sections(HERE / "general.txt")
_REQUESTS = parse_sections(_SECTIONS, ("requests", "translations"))
_SLOT = re.compile(r"\{(\w+)\}")
_SECTION_OF = {
    "code_kind": "code kinds",
    "code_task": "code tasks",
    "code_task_noun": "code nouns",
    "code_topic": "code topics",
    "programming": "programming",
    "code": "code",
} | {
    name: f"{name}s"
    for name in (
        "topic", "person", "place", "language", "sentence", "animal", "food", "role", "relative",
        "error", "formula",
    )
} | {"foreign": "foreign"}  # fmt: skip
VALUES: dict[str, dict[Split, list[str]]] = {
    name: {
        "train": [line for line in _SECTIONS[section] if not held_out(line)],
        "held out": [line for line in _SECTIONS[section] if held_out(line)] or _SECTIONS[section],
    }
    for name, section in _SECTION_OF.items()
}
"""The lines that may fill each slot, by split."""


def _fill(slot: str, rng: Random, split: Split) -> str:
    match slot:
        case "name":
            value = person(rng, split)
        case "city":
            value = city(rng, split)
        case "noun":
            value = noun(rng)
        case "small" | "small2":
            value = str(rng.randint(2, 99))
        case "big":
            value = str(rng.randint(100, 9999))
        case "year":
            value = str(rng.randint(1000, 2030))
        case _:
            value = rng.choice(VALUES[slot][split])
    return value


def ask_general(dialogue: Dialogue) -> None:
    """Ask for something of the wide world, which the model declines."""
    rng, split = dialogue.rng, dialogue.split
    foreign = rng.random() < 0.12
    text = _REQUESTS["translations" if foreign else "requests"].draw(rng, split)
    text = _SLOT.sub(lambda slot: _fill(slot[1], rng, split), text)
    if split == "train" and rng.random() < 0.04:
        text += "\n\n" + "\n".join(
            _fill(rng.choice(("sentence", "code", "error")), rng, split)
            for _ in range(rng.randint(1, 4))
        )
    dialogue.say(text, ENGLISH_ONLY if foreign else UNKNOWN)

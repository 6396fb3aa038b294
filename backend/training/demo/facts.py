"""Turns in which somebody tells something about themselves and later asks for it."""

from __future__ import annotations

from random import Random

from dialogue import Dialogue
from phrases import REQUESTS, capitalised, expand
from words import WORDS, Split, city, invented_word, noun, person

# How each fact is taken and how it is answered.
REPLIES = {
    "name": ("Nice to meet you, {v}!", "Your name is {v}."),
    "city": ("I will remember that you live in {v}.", "You live in {v}."),
    "colour": (
        "I will remember that your favourite colour is {v}.",
        "Your favourite colour is {v}.",
    ),
    "animal": (
        "I will remember that your favourite animal is the {v}.",
        "Your favourite animal is the {v}.",
    ),
    "food": ("I will remember that your favourite food is {v}.", "Your favourite food is {v}."),
    "age": ("I will remember that you are {v} years old.", "You are {v} years old."),
    "dog": ("I will remember that your dog is called {v}.", "Your dog is called {v}."),
    "cat": ("I will remember that your cat is called {v}.", "Your cat is called {v}."),
    "job": ("I will remember that you work as a {v}.", "You work as a {v}."),
    "number": ("I will remember the number {v}.", "The number is {v}."),
    "word": ("I will remember the word {v}.", "The word is {v}."),
}


def _value(kind: str, rng: Random, split: Split) -> str:
    match kind:
        case "name" | "dog" | "cat":
            value = person(rng, split)
        case "city":
            value = city(rng, split)
        case "age":
            value = str(rng.randint(4, 99))
        case "number":
            value = str(rng.randint(0, 10 ** rng.randint(1, 6)))
        case "word":
            value = noun(rng) if rng.random() < 0.5 else invented_word(rng)
        case "food":
            value = rng.choice(WORDS["foods"] + WORDS["fruits"])
        case _:
            value = rng.choice(WORDS[f"{kind}s"])
    return value


def _choose(dialogue: Dialogue) -> str:
    rng = dialogue.rng
    return "name" if rng.random() < 0.55 else rng.choice(list(REPLIES))


def state_fact(dialogue: Dialogue, kind: str | None = None) -> None:
    """Somebody tells a fact; telling it again replaces it."""
    rng = dialogue.rng
    kind = kind or _choose(dialogue)
    value = _value(kind, rng, dialogue.split)
    text = REQUESTS[f"{kind} told"].draw(rng, dialogue.split)
    if dialogue.split == "train":
        if rng.random() < 0.05:
            value = value.lower()
        if kind in dialogue.known and rng.random() < 0.6:
            text = "Actually, " + text[:1].lower() + text[1:]
    dialogue.known[kind] = value
    dialogue.say(text.format(v=value), REPLIES[kind][0].format(v=value))


def ask_fact(dialogue: Dialogue, kind: str | None = None) -> None:
    """Somebody asks for a fact, mostly one that has been told."""
    rng = dialogue.rng
    if kind is None:
        known = list(dialogue.known)
        kind = rng.choice(known) if known and rng.random() < 0.9 else _choose(dialogue)
    text = REQUESTS[f"{kind} asked"].draw(rng, dialogue.split)
    if dialogue.split == "train" and kind not in dialogue.known and rng.random() < 0.06:
        value = dialogue.known[kind] = _value(kind, rng, dialogue.split)
        told = expand(rng.choice(REQUESTS[f"{kind} told"].train), rng).rstrip(".?!")
        text = f"{capitalised(told).format(v=value)}. {text}"
    if kind in dialogue.known:
        answer = REPLIES[kind][1].format(v=dialogue.known[kind])
    elif kind == "name":
        answer = "You have not told me your name yet."
    else:
        answer = "You have not told me that yet."
    dialogue.say(text, answer)

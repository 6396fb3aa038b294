"""Names of colours and shapes, and the numbers and words that drawings show."""

from __future__ import annotations

import random

COLOURS = (
    "red",
    "green",
    "blue",
    "yellow",
    "orange",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "grey",
)
SHAPES = ("circle", "square", "triangle", "star", "rectangle", "heart", "cross", "oval")
PLURALS = {name: "crosses" if name == "cross" else f"{name}s" for name in SHAPES}

# Several tones that a name covers; each is jittered.
_TONES = {
    "red": ((255, 0, 0), (220, 30, 30), (200, 20, 40), (231, 76, 60)),
    "green": ((0, 128, 0), (0, 180, 0), (0, 255, 0), (40, 160, 60), (46, 204, 113)),
    "blue": ((0, 0, 255), (30, 70, 220), (20, 40, 160), (52, 152, 219), (30, 144, 255)),
    "yellow": ((255, 255, 0), (245, 215, 20), (255, 235, 60)),
    "orange": ((255, 165, 0), (255, 140, 0), (240, 120, 20)),
    "purple": ((128, 0, 128), (150, 50, 200), (100, 40, 160), (155, 89, 182)),
    "pink": ((255, 105, 180), (255, 150, 190), (255, 182, 203), (250, 130, 170)),
    "brown": ((139, 69, 19), (120, 70, 30), (101, 67, 33), (150, 85, 45)),
    "black": ((0, 0, 0), (20, 20, 20), (35, 35, 35)),
    "white": ((255, 255, 255), (255, 255, 255), (248, 248, 248)),
    "grey": ((128, 128, 128), (150, 150, 150), (110, 110, 110), (165, 165, 165)),
}

_SIGNS = (
    "open save close cancel ok yes no error start stop login exit help search hello world ready "
    "done new edit copy paste delete send next back home menu file view print play pause sale "
    "free push pull danger warning caution hot cold sorry thanks please welcome quiet wait slow "
    "fast taxi bus police hotel cafe bar bank shop lost found north south east west red green "
    "blue one two three test demo model cat dog "
)
WORDS = tuple(sorted({word for word in _SIGNS.split() if len(word) <= 6}))


def rgb(name: str, rng: random.Random) -> tuple[int, int, int]:
    """Return one of a colour's tones."""
    tone = rng.choice(_TONES[name])
    if name in ("white", "black", "grey"):
        shift = rng.randint(-6, 6)
        jitter = [shift] * 3
    else:
        jitter = [rng.randint(-14, 14) for _ in range(3)]
    r, g, b = (min(255, max(0, c + j)) for c, j in zip(tone, jitter, strict=True))
    return r, g, b


def drawn_text(rng: random.Random, kind: str) -> str:
    """Draw a number below 100, or one of the sign words in one of three cases."""
    if kind == "number":
        return str(rng.randrange(10) if rng.random() < 0.25 else rng.randrange(10, 100))
    word = rng.choice(WORDS)
    return rng.choice((word, word, word.capitalize(), word.upper()))

"""Scenes: what a drawing shows and where, before any pixel.

Lengths are shares of the picture's side.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from training.vision.lexicon import COLOURS, SHAPES, drawn_text, rgb

Kind = Literal["shape", "number", "word"]
Direction = Literal["left of", "right of", "above", "below", "inside", "around"]

OPPOSITE: dict[Direction, Direction] = {
    "left of": "right of",
    "right of": "left of",
    "above": "below",
    "below": "above",
    "inside": "around",
    "around": "inside",
}
ROOMY = ("square", "circle", "rectangle")  # shapes that another thing is drawn inside
CLEAR = 1.35  # how much farther apart two things are along one axis than along the other


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape, a number or a word. x, y: its centre; w, h: its extent; frame: "box" or "window"
    around a word; angle: degrees."""

    kind: Kind
    name: str
    colour: str
    rgb: tuple[int, int, int]
    x: float
    y: float
    w: float
    h: float
    angle: float = 0.0
    frame: str = ""
    outline: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """Things on a background; its name is empty where no colour of the palette names it. Where
    `nested`, the first thing lies inside the second."""

    things: tuple[Thing, ...]
    background: str
    background_rgb: tuple[int, int, int]
    nested: bool = False

    def direction(self, a: Thing, b: Thing) -> Direction:
        """Return the side of `b` on which `a` lies."""
        if self.nested and {a, b} == set(self.things[:2]):
            return "inside" if a is self.things[0] else "around"
        dx, dy = a.x - b.x, a.y - b.y
        if abs(dx) >= abs(dy):
            return "left of" if dx < 0 else "right of"
        return "above" if dy < 0 else "below"

    def of(self, kind: Kind) -> list[Thing]:
        return [thing for thing in self.things if thing.kind == kind]


def thing_box(thing: Thing) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a thing."""
    return (
        thing.x - thing.w / 2,
        thing.y - thing.h / 2,
        thing.x + thing.w / 2,
        thing.y + thing.h / 2,
    )


def contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    """Distance of two colours, weighed by how well eyes tell them apart."""
    return sum(w * (p - q) ** 2 for w, p, q in zip((0.9, 1.2, 0.9), a, b, strict=True)) ** 0.5


def _colour(
    rng: random.Random, apart: tuple[tuple[int, int, int], ...], names: tuple[str, ...]
) -> tuple[str, tuple[int, int, int]]:
    while True:
        name = rng.choice(names)
        value = rgb(name, rng)
        if all(contrast(value, other) > 95 for other in apart):
            return name, value


def _background(rng: random.Random) -> tuple[str, tuple[int, int, int]]:
    draw = rng.random()
    if draw < 0.5:
        return "white", rgb("white", rng)
    if draw < 0.7:
        tint = tuple(rng.randint(205, 250) for _ in range(3))
        return "", (tint[0], tint[1], tint[2])
    name = rng.choice(("grey", "grey", "black", "black", *COLOURS))
    return name, rgb(name, rng)


def _extent(rng: random.Random, kind: Kind, name: str, size: float) -> tuple[float, float]:
    """Width and height; of a text they are those of the box that it is fitted into."""
    if kind == "shape":
        if name in ("rectangle", "oval"):
            short = size / rng.uniform(1.9, 2.8)
            return (size, short) if rng.random() < 0.6 else (short, size)
        if name in ("square", "circle", "cross", "star", "heart"):
            return size, size
        return size, size * rng.uniform(0.8, 1.0)
    height = max(0.1, size * rng.uniform(0.5, 0.8))
    return min(0.92, height * 0.66 * len(name)), height


def _angle(rng: random.Random, kind: Kind, name: str) -> float:
    if kind != "shape":
        return rng.uniform(-8, 8) if rng.random() < 0.3 else 0.0
    if rng.random() < 0.5 or name in ("circle", "oval"):
        return 0.0
    if name in ("star", "triangle"):
        return rng.uniform(-60, 60) if rng.random() < 0.3 else rng.uniform(-15, 15)
    return rng.uniform(-14, 14)


def _kinds(rng: random.Random, number: int) -> list[Kind]:
    """At most one number and one word."""
    if number == 1:
        return [rng.choices(("shape", "number", "word"), (4, 3, 4))[0]]
    kinds: list[Kind] = ["shape"] * number
    if number and rng.random() < 0.4:
        kinds[-1] = "number"
    if number and rng.random() < 0.3:
        kinds[0] = "word"
    return kinds


def _thing(
    rng: random.Random,
    kind: Kind,
    size: float,
    apart: tuple[tuple[int, int, int], ...],
    *,
    centre: tuple[float, float] | None = None,
    names: tuple[str, ...] = SHAPES,
) -> Thing:
    name = rng.choice(names) if kind == "shape" else drawn_text(rng, kind)
    dark = ("black", "black", "black", *COLOURS)
    colour, value = _colour(rng, apart, COLOURS if kind == "shape" else dark)
    w, h = _extent(rng, kind, name, size)
    frame = rng.choice(("", "", "box", "window")) if kind == "word" and not centre else ""
    if frame:  # the word takes the middle of its frame
        w, h = min(0.96, w * 1.35), h * (1.9 if frame == "box" else 2.8)
    if centre is None:
        reach = [min(0.49, side / 2 + 0.02) for side in (w, h)]
        x, y = (rng.uniform(r, 1 - r) for r in reach)
    else:
        x, y = centre
    outline = kind == "shape" and rng.random() < 0.12
    return Thing(kind, name, colour, value, x, y, w, h, _angle(rng, kind, name), frame, outline)


def _free(things: list[Thing], new: Thing) -> bool:
    """Return whether a thing overlaps none and lies clearly to one side of each."""
    for thing in things:
        dx, dy = abs(new.x - thing.x), abs(new.y - thing.y)
        gap_x = dx - (new.w + thing.w) / 2
        gap_y = dy - (new.h + thing.h) / 2
        if max(gap_x, gap_y) < 0.03:
            return False
        if not ((dx > CLEAR * dy and gap_x > 0.03) or (dy > CLEAR * dx and gap_y > 0.03)):
            return False
    return True


def _nested(rng: random.Random, ground: tuple[int, int, int], more: bool) -> list[Thing]:
    size = rng.uniform(0.4, 0.5) if more else rng.uniform(0.45, 0.85)
    outer = _thing(rng, "shape", size, (ground,), names=ROOMY)
    room = min(outer.w, outer.h) * 0.62
    kind: Kind = rng.choices(("shape", "number", "word"), (5, 2, 1))[0]
    apart = (ground, outer.rgb) if outer.outline else (outer.rgb,)
    inner = _thing(rng, kind, rng.uniform(0.6, 1) * room, apart, centre=(outer.x, outer.y))
    if kind != "shape":
        scale = min(1.0, outer.w * 0.75 / inner.w)
        if inner.h * scale < 0.09:
            return []
        inner = _resized(inner, scale)
    return [inner, outer]


def _ordered(things: list[Thing]) -> bool:
    """Return whether three shapes clearly stand side by side, or clearly above each other."""
    if len(things) < 3 or any(thing.kind != "shape" for thing in things):
        return True
    across, down = (
        max(values) - min(values)
        for values in ([thing.x for thing in things], [thing.y for thing in things])
    )
    return max(across, down) > CLEAR * min(across, down)


def _resized(thing: Thing, scale: float) -> Thing:
    return Thing(
        thing.kind, thing.name, thing.colour, thing.rgb, thing.x, thing.y,
        thing.w * scale, thing.h * scale, thing.angle, thing.frame, thing.outline,
    )  # fmt: skip


def scene(rng: random.Random) -> Scene:
    """Draw a scene of one to three things; one without things now and then."""
    name, ground = _background(rng)
    while True:
        number = rng.choices((0, 1, 2, 3), (1, 36, 36, 27))[0]
        nested = number > 1 and rng.random() < 0.18
        things = _nested(rng, ground, number == 3) if nested else []
        if nested and not things:
            continue
        kinds = _kinds(rng, number)
        if nested:
            kinds = [rng.choices(("shape", "number"), (3, 1))[0]] * (number - 2)
            if things[0].kind == "number":
                kinds = ["shape"] * len(kinds)
        for kind in kinds:
            for _ in range(12):
                largest = (0.8, 0.8, 0.45, 0.34)[number]
                size = rng.uniform(0.17, largest)
                new = _thing(rng, kind, size, (ground,))
                if _free(things[1:] if nested else things, new):
                    things.append(new)
                    break
        if len(things) == number and (nested or _ordered(things)):
            return Scene(tuple(things), name, ground, nested)

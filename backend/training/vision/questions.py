"""Questions about a scene with their answers: one right answer to each, word for word."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.vision.demo import HERE, Phrasings, Split, expand, noisy, parse, read_sections
from training.vision.lexicon import COLOURS, PLURALS, SHAPES
from training.vision.scenes import OPPOSITE, Direction, Kind, Scene, Thing

COUNTS = ("no", "one", "two", "three")
DIRECTIONS: tuple[Direction, ...] = ("left of", "right of", "above", "below", "inside")
SAID: dict[Direction, tuple[str, ...]] = {
    "left of": ("left of", "left of", "to the left of", "on the left of"),
    "right of": ("right of", "right of", "to the right of", "on the right of"),
    "above": ("above", "above", "over", "on top of"),
    "below": ("below", "below", "under", "beneath"),
    "inside": ("inside", "inside", "in", "within"),
    "around": ("around",),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, its answer and the name of its kind."""

    category: str
    question: str
    answer: str


def _read() -> dict[str, Phrasings]:
    return {
        name: Phrasings(
            tuple(parse(line) for line in lines if not line.startswith("? ")),
            tuple(parse(line[2:]) for line in lines if line.startswith("? ")),
        )
        for name, lines in read_sections(HERE / "questions.txt").items()
    }


PHRASINGS = _read()


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def named(thing: Thing) -> str:
    """Return what a thing is called in an answer: "a red circle", "the number 47"."""
    if thing.kind == "shape":
        return article(f"{thing.colour} {thing.name}")
    if thing.kind == "number":
        return f"the number {thing.name}"
    word = f'the word "{thing.name}"'
    return f"{article(thing.frame)} with {word}" if thing.frame else word


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def described(scene: Scene) -> str:
    """Describe a scene: things from left to right, or from top to bottom where that is farther."""
    things = scene.things
    if not things:
        return "Nothing."
    if scene.nested:
        rest = "".join(f", and {named(thing)}" for thing in things[2:])
        return sentence(f"{named(things[0])} inside {named(things[1])}{rest}")
    if len(things) == 3:
        return sentence(_three(scene))
    return sentence(_pair(scene, *things) if len(things) == 2 else named(things[0]))


def _three(scene: Scene) -> str:
    shapes, texts = scene.of("shape"), [*scene.of("number"), *scene.of("word")]
    if len(shapes) == 2:
        return f"{_pair(scene, *shapes)}, and {named(texts[0])}"
    things, order = (*shapes, *texts), ""
    if not texts:
        across = _spread([thing.x for thing in things]) >= _spread([thing.y for thing in things])
        things = tuple(sorted(things, key=lambda thing: thing.x if across else thing.y))
        order = ", from left to right" if across else ", from top to bottom"
    first, second, third = map(named, things)
    return f"{first}, {second} and {third}{order}"


def _spread(values: list[float]) -> float:
    return max(values) - min(values)


def _pair(scene: Scene, a: Thing, b: Thing) -> str:
    if scene.direction(a, b) in ("right of", "below"):
        a, b = b, a
    return f"{named(a)} and {named(b)} {scene.direction(b, a)} it"


def _noun(thing: Thing) -> str:
    return thing.name if thing.kind == "shape" else thing.kind


def _unique(scene: Scene) -> list[Thing]:
    """The things that a noun alone tells apart."""
    nouns = [_noun(thing) for thing in scene.things]
    return [thing for thing in scene.things if nouns.count(_noun(thing)) == 1]


@dataclass(frozen=True, slots=True)
class Asker:
    """Draws questions about a scene in the wordings of a split."""

    rng: random.Random
    scene: Scene
    split: Split = "train"

    def words(self, section: str, **slots: str) -> str:
        """Return a wording with its slots filled; with noise, if it is for training."""
        text = expand(self.rng.choice(PHRASINGS[section].of(self.split)), self.rng)
        text = noisy(text, self.rng) if self.split == "train" else text[:1].upper() + text[1:]
        for name, value in slots.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def side(self, direction: Direction) -> str:
        return self.rng.choice(SAID[direction]) if self.split == "train" else direction

    def ask(self) -> Asked | None:
        """Ask one thing; None where the kind drawn has no clear answer here."""
        kinds, weights = zip(*KINDS, strict=True)
        kind: Callable[[Asker], Asked | None] = self.rng.choices(kinds, weights)[0]
        return kind(self)

    def describe(self) -> Asked | None:
        return Asked("describe", self.words("describe"), described(self.scene))

    def colour(self) -> Asked | None:
        things = _unique(self.scene)
        nouns = {_noun(thing) for thing in self.scene.things}
        if things and self.rng.random() < 0.9:
            thing = self.rng.choice(things)
            noun, answer = _noun(thing), f"The {_noun(thing)} is {thing.colour}."
        else:
            absent = [name for name in SHAPES if name not in nouns]
            noun = self.rng.choice(absent)
            answer = f"There is no {noun}."
        return Asked("colour", self.words("colour", a=noun), answer)

    def which(self) -> Asked | None:
        colours = [thing.colour for thing in self.scene.things]
        colour = self.rng.choice(colours if colours and self.rng.random() < 0.85 else COLOURS)
        if colours.count(colour) > 1 or colour == self.scene.background:
            return None
        answer = f"Nothing is {colour}."
        if colour in colours:
            thing = self.scene.things[colours.index(colour)]
            answer = f"The {_noun(thing)} is {colour}."
        return Asked("which is red", self.words("which", c=colour), answer)

    def beside(self) -> Asked | None:
        things = _unique(self.scene)
        if not things or len(self.scene.things) < 2:
            return None
        thing = self.rng.choice(things)
        others = [other for other in self.scene.things if other is not thing]
        direction = self.scene.direction(self.rng.choice(others), thing)
        if self.rng.random() < 0.15:
            direction = self.rng.choice(DIRECTIONS)
        if direction == "around":
            return None
        found = [other for other in others if self.scene.direction(other, thing) == direction]
        if len(found) > 1:
            return None
        answer = sentence(named(found[0])) if found else "Nothing."
        asked = self.words("beside", d=self.side(direction), a=_noun(thing))
        return Asked("relation", asked, answer)

    def where(self) -> Asked | None:
        things = _unique(self.scene)
        if len(self.scene.things) != 2 or len(things) != 2:
            return None
        a, b = self.rng.sample(things, 2)
        answer = f"The {_noun(a)} is {self.scene.direction(a, b)} the {_noun(b)}."
        return Asked("where", self.words("where", a=_noun(a)), answer)

    def number(self) -> Asked | None:
        found = self.scene.of("number")
        if not found and self.rng.random() < 0.85:
            return None
        answer = f"The number is {found[0].name}." if found else "There is no number."
        return Asked("number", self.words("number"), answer)

    def text(self) -> Asked | None:
        found = self.scene.of("word") or self.scene.of("number")
        if not found and self.rng.random() < 0.85:
            return None
        if found and self.scene.of("word") and self.scene.of("number"):
            return None
        answer = f'It says "{found[0].name}".' if found else "There is no text."
        return Asked("text", self.words("text"), answer)

    def count(self) -> Asked | None:
        number = len(self.scene.of("shape"))
        return Asked("count", self.words("count"), _counted(number, "shape", "shapes"))

    def count_of(self) -> Asked | None:
        names = [thing.name for thing in self.scene.of("shape")]
        name = self.rng.choice(names if names and self.rng.random() < 0.75 else SHAPES)
        answer = _counted(names.count(name), name, PLURALS[name])
        return Asked("count", self.words("count of", a=PLURALS[name]), answer)

    def is_there(self) -> Asked | None:
        shapes = self.scene.of("shape")
        if self.rng.random() < 0.25:
            kind: Kind = self.rng.choice(("number", "word"))
            return self._yes_or_no(kind, bool(self.scene.of(kind)))
        thing = self.rng.choice(shapes) if shapes else None
        coloured = self.rng.random() < 0.4
        colour, name = self.rng.choice(COLOURS), self.rng.choice(SHAPES)
        if thing and self.rng.random() < 0.75:
            colour = thing.colour if self.rng.random() < 0.6 else colour
            name = thing.name if self.rng.random() < 0.8 else name
        noun = f"{colour} {name}" if coloured else name
        seen = any(
            shape.name == name and (shape.colour == colour or not coloured) for shape in shapes
        )
        return self._yes_or_no(noun, seen)

    def _yes_or_no(self, noun: str, seen: bool) -> Asked:
        start, _, last = noun.rpartition(" ")
        plural = PLURALS.get(last, f"{last}s")
        several = f"{start} {plural}".strip()
        asked = self.words("is there", a=noun, an=article(noun), s=several)
        answer = f"Yes, there is {article(noun)}." if seen else f"No, there is no {noun}."
        return Asked("is there", asked, answer)

    def is_it(self) -> Asked | None:
        things = _unique(self.scene)
        if not things:
            return None
        thing = self.rng.choice(things)
        colour = thing.colour if self.rng.random() < 0.5 else self.rng.choice(COLOURS)
        word = "Yes" if colour == thing.colour else "No"
        answer = f"{word}, the {_noun(thing)} is {thing.colour}."
        return Asked("is it red", self.words("is it", a=_noun(thing), c=colour), answer)

    def is_beside(self) -> Asked | None:
        things = _unique(self.scene)
        if len(things) < 2:
            return None
        a, b = self.rng.sample(things, 2)
        truth = self.scene.direction(a, b)
        direction = (
            truth if self.rng.random() < 0.5 else self.rng.choice((OPPOSITE[truth], *DIRECTIONS))
        )
        word = "Yes" if direction == truth else "No"
        answer = f"{word}, the {_noun(a)} is {truth} the {_noun(b)}."
        asked = self.words("is beside", d=self.side(direction), a=_noun(a), b=_noun(b))
        return Asked("is it left of", asked, answer)

    def background(self) -> Asked | None:
        if not self.scene.background:
            return None
        return Asked(
            "background", self.words("background"), f"The background is {self.scene.background}."
        )


def _counted(number: int, one: str, many: str) -> str:
    if number == 1:
        return f"There is one {one}."
    return f"There are {COUNTS[number]} {many}."


KINDS = (
    (Asker.describe, 10),
    (Asker.colour, 6),
    (Asker.which, 3),
    (Asker.beside, 9),
    (Asker.where, 4),
    (Asker.number, 6),
    (Asker.text, 8),
    (Asker.count, 3),
    (Asker.count_of, 2),
    (Asker.is_there, 5),
    (Asker.is_it, 3),
    (Asker.is_beside, 3),
    (Asker.background, 2),
)

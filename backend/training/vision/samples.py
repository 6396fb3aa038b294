"""Training samples: a drawing, a conversation about it as tokens, and hints for the tower."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.vision.demo import MODEL, Dialogue, text_exchange, turn
from training.vision.drawing import SIDE, pixels
from training.vision.lexicon import COLOURS, SHAPES
from training.vision.questions import Asker
from training.vision.scenes import Scene, scene, thing_box

PICTURE = "\ue001"  # where a picture stands in a rendered conversation
PLACEHOLDER = 3071  # `<|finetune_right_pad_id|>`: no text that is served has it
ROWS = 64
LENGTH = 224
BLOCK = 16  # samples made together; a sample may show its right neighbour's picture too
GRID = 16  # patches along a side
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
LONGEST = 7  # characters of a number or word

# What marks pictures in Idefics3's own processor. The demo's vocabulary has no such tokens: there
# they are plain text, which the model is to read over.
_BEFORE, _AFTER = "<fake_token_around_image><global-img>", "<fake_token_around_image>"
_TOOLS = ("screenshot", "read_file", "Read", "take_photo", "view_image", "open", "browser")


@dataclass(frozen=True, slots=True)
class Block:
    """Some samples. pictures (n, 256, 256, 3); ids (n, 224), rounds (n, 224): where the loss
    counts, the number of the answer from 1; places (n, 2): where pictures' rows begin, -1 for
    none; shapes, colours (n, 16, 16): what covers each patch, 0 for nothing; texts (n, 2, 7): a
    number's and a word's characters, 0 for none."""

    pictures: NDArray[np.uint8]
    ids: NDArray[np.int16]
    rounds: NDArray[np.uint8]
    places: NDArray[np.int16]
    shapes: NDArray[np.uint8]
    colours: NDArray[np.uint8]
    texts: NDArray[np.uint8]

    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self.pictures, self.ids, self.rounds, self.places,
            self.shapes, self.colours, self.texts,
        )  # fmt: skip


def empty(number: int) -> Block:
    """A block of so many samples, to be filled."""
    return Block(
        np.zeros((number, SIDE, SIDE, 3), np.uint8),
        np.full((number, LENGTH), PLACEHOLDER, np.int16),
        np.zeros((number, LENGTH), np.uint8),
        np.full((number, 2), -1, np.int16),
        np.zeros((number, GRID, GRID), np.uint8),
        np.zeros((number, GRID, GRID), np.uint8),
        np.zeros((number, 2, LONGEST), np.uint8),
    )


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


@dataclass(slots=True)
class Tokens:
    """A conversation's tokens as they are put together."""

    ids: list[int]
    rounds: list[int]
    places: list[int]
    answers: int = 0

    def add(self, text: str, round_: int = 0) -> None:
        """Append a text; each `PICTURE` in it becomes the rows of the next picture."""
        parts = text.split(PICTURE)
        for number, part in enumerate(parts):
            new = encode(part)
            if number:
                self.places.append(len(self.ids))
                new = [PLACEHOLDER] * ROWS + new
            self.ids += new
            self.rounds += [round_] * len(new)

    def answer(self, text: str) -> None:
        self.answers += 1
        self.add(f"{text}<|eot_id|>", self.answers)


ASSISTANT = turn("assistant", "").removesuffix("<|eot_id|>")


def shown(rng: random.Random, question: str) -> str:
    """Return a user's message: a picture with a question, mostly in this order."""
    picture = PICTURE
    if rng.random() < 0.2:
        picture = f"{_BEFORE}{PICTURE}{_AFTER}"
    gap = rng.choices(("", "\n", " "), (8, 1, 1))[0]
    if rng.random() < 0.15:
        return f"{question}{gap}{picture}"
    return f"{picture}{gap}{question}"


def _opening(rng: random.Random, question: str) -> str:
    """Render the turns up to the first answer: a question with a picture, or a tool's picture."""
    system = rng.choices(
        ("", "You are a helpful assistant.", "Answer briefly.", "You can see pictures."),
        (6, 2, 1, 1),
    )[0]
    if rng.random() > 0.08:
        head = turn("system", system) if system else ""
        return f"<|begin_of_text|>{head}{turn('user', shown(rng, question))}{ASSISTANT}"
    name = rng.choice(_TOOLS)
    schema = {"properties": {"path": {"type": "string"}}, "required": ["path"]}
    function = {"name": name, "description": "", "parameters": schema}
    path = rng.choice(("a.png", "screen.png", "/tmp/picture.jpg", "image.webp", "photo.png"))
    dialogue = Dialogue(rng, system=system, tools=[{"function": function}])
    call = json.dumps({"name": name, "parameters": {"path": path}})
    wish = rng.choice(("{q}", "{p}: {q}", "Look at {p}. {q}", "Open {p}. {q}", "{q} It is in {p}."))
    said = wish.format(q=question, p=path)
    dialogue.messages = [("user", said), ("assistant", call), ("tool", PICTURE)]
    return dialogue.render() + ASSISTANT


def conversation(rng: random.Random, first: Scene, second: Scene) -> Tokens:
    """Ask about a scene, and about a second one after it now and then, until the room is filled."""
    tokens = Tokens([], [], [])
    room = rng.choice((LENGTH, LENGTH, 150))
    changes = rng.choice((1, 2)) if rng.random() < 0.08 else 99
    asker = Asker(rng, first)
    while True:
        if asked := asker.ask():
            question, answer = asked.question.strip(), asked.answer
        else:
            continue
        if tokens.answers and rng.random() < 0.1:
            question, answer = text_exchange(rng)
        if not tokens.answers:
            text = _opening(rng, question)
        elif tokens.answers == changes:
            asker, changes = Asker(rng, second), 99
            asked = asker.describe()
            if asked is None:
                raise AssertionError("every scene can be described")
            question, answer = shown(rng, asked.question), asked.answer
            text = turn("user", question) + ASSISTANT
        else:
            text = turn("user", question) + ASSISTANT
        size = len(encode(text)) + len(encode(answer)) + 1 + text.count(PICTURE) * ROWS
        if tokens.answers and len(tokens.ids) + size > room:
            return tokens
        if size > LENGTH:  # a first question that is too long
            continue
        tokens.add(text)
        tokens.answer(answer)


def _hints(scene: Scene, block: Block, at: int) -> None:
    """Mark each patch with what covers it."""
    for thing in reversed(scene.things):
        x0, y0, x1, y1 = (round(v * GRID - 0.5) for v in thing_box(thing))
        area = (slice(max(0, y0), max(y0, y1) + 1), slice(max(0, x0), max(x0, x1) + 1))
        kind = {"number": len(SHAPES) + 1, "word": len(SHAPES) + 2}.get(thing.kind, 0)
        block.shapes[at][area] = kind or SHAPES.index(thing.name) + 1
        block.colours[at][area] = COLOURS.index(thing.colour) + 1
        if thing.kind != "shape":
            codes = [CHARACTERS.index(c) + 1 for c in thing.name[:LONGEST]]
            block.texts[at, int(thing.kind == "word"), : len(codes)] = codes


def fill(block: Block, seed: int) -> None:
    """Fill a block; the same seed gives the same samples."""
    rng = random.Random(seed)
    number = len(block.ids)
    scenes = [scene(rng) for _ in range(number)]
    for array in (block.rounds, block.shapes, block.colours, block.texts):
        array[:] = 0
    block.ids[:] = PLACEHOLDER
    block.places[:] = -1
    for at, drawn in enumerate(scenes):
        block.pictures[at] = pixels(rng, drawn)
        tokens = conversation(rng, drawn, scenes[(at + 1) % number])
        block.ids[at, : len(tokens.ids)] = tokens.ids
        block.rounds[at, : len(tokens.ids)] = tokens.rounds
        block.places[at, : len(tokens.places)] = tokens.places
        _hints(drawn, block, at)

"""Held-out questions about held-out drawings, and how answers to them are counted."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.vision.demo import Split, turn
from training.vision.drawing import pixels
from training.vision.questions import Asker
from training.vision.samples import ASSISTANT, PICTURE, Tokens
from training.vision.scenes import Scene, scene

FIRST_SEED = 1_000_000_000  # training's seeds are below


@dataclass(frozen=True, slots=True)
class Case:
    """A picture (256, 256, 3), a question about it and the right answer."""

    category: str
    scene: Scene
    picture: NDArray[np.uint8]
    question: str
    answer: str

    def prompt(self) -> Tokens:
        """Return the tokens up to the answer, and the place of the picture's rows."""
        tokens = Tokens([], [], [])
        user = turn("user", f"{PICTURE}{self.question}")
        tokens.add(f"<|begin_of_text|>{user}{ASSISTANT}")
        return tokens


def cases(number: int, split: Split, seed: int = 0) -> list[Case]:
    """Draw scenes that training never saw; a question about each. The split is that of wordings."""
    drawn: list[Case] = []
    for at in range(number):
        rng = random.Random(FIRST_SEED + seed * 1_000_000 + at)
        asked = None
        while asked is None:
            shown = scene(rng)
            asked = Asker(rng, shown, split).ask()
        picture = pixels(rng, shown)
        drawn.append(Case(asked.category, shown, picture, asked.question.strip(), asked.answer))
    return drawn


def table(cases: Iterable[Case], answers: Iterable[str]) -> str:
    """Write a table of the share of right answers by category, and of all."""
    right: dict[str, list[bool]] = {}
    for case, answer in zip(cases, answers, strict=True):
        right.setdefault(case.category, []).append(case.answer == answer)
    every = [one for ones in right.values() for one in ones]
    rows = [*sorted(right.items()), ("all", every)]
    lines = [f"| {name} | {len(ones)} | {sum(ones) / len(ones):.1%} |" for name, ones in rows]
    return "\n".join(("| category | cases | right |", "|---|--:|--:|", *lines))

"""Drawings that the embedded model's eyes are trained on: scenes, questions, pixels, tokens."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

pytest.importorskip("PIL")

from training.vision.cases import cases
from training.vision.questions import Asker, described, named
from training.vision.samples import BLOCK, LENGTH, PLACEHOLDER, ROWS, empty, fill
from training.vision.scenes import OPPOSITE, scene


def test_a_seed_gives_the_same_samples() -> None:
    first, again, other = (empty(BLOCK) for _ in range(3))
    fill(first, 3)
    fill(other, 4)
    fill(again, 4)
    fill(again, 3)
    assert all(map(np.array_equal, first.arrays(), again.arrays()))
    assert not np.array_equal(first.pictures, other.pictures)


def test_every_sample_has_its_picture_and_an_answer() -> None:
    block = empty(BLOCK)
    fill(block, 5)
    for ids, rounds, places in zip(block.ids, block.rounds, block.places, strict=True):
        assert (ids[places[0] : places[0] + ROWS] == PLACEHOLDER).all()
        assert places[0] + ROWS < LENGTH
        assert rounds.max() >= 1
        assert not (rounds[ids == PLACEHOLDER] > 0).any()


def test_things_lie_clearly_to_one_side_of_each_other() -> None:
    rng = random.Random(6)
    for _ in range(300):
        drawn = scene(rng)
        for a in drawn.things:
            for b in drawn.things:
                if a is not b:
                    assert drawn.direction(a, b) == OPPOSITE[drawn.direction(b, a)]


def test_a_description_names_every_thing() -> None:
    rng = random.Random(7)
    for _ in range(300):
        drawn = scene(rng)
        text = described(drawn)
        assert all(named(thing) in text[0].lower() + text[1:] for thing in drawn.things)


def test_no_wording_has_an_empty_slot() -> None:
    rng = random.Random(8)
    for _ in range(300):
        asker = Asker(rng, scene(rng), rng.choice(("train", "held out")))
        if asked := asker.ask():
            assert not re.search(r"[{}()|]", asked.question), asked.question
            assert asked.answer.endswith(".")


def test_held_out_cases_are_the_same_each_time() -> None:
    first, again = cases(3, "held out"), cases(3, "held out")
    assert [case.question for case in first] == [case.question for case in again]
    assert all(np.array_equal(a.picture, b.picture) for a, b in zip(first, again, strict=True))

"""Words that fill the phrasings, and the split that keeps some of them out of training."""

from __future__ import annotations

import random
import re
import zlib
from pathlib import Path
from typing import Literal

Split = Literal["train", "held out"]

HELD_OUT_SHARE = 8  # one value in eight is kept for the evaluation


def held_out(*values: object) -> bool:
    """Whether a value (a name, a city, a pair of summands) is kept out of training."""
    return zlib.crc32(" ".join(map(str, values)).encode()) % HELD_OUT_SHARE == 0


def read_sections(path: Path) -> dict[str, list[str]]:
    """The lines of each `[section]`, comments and empty lines left out."""
    sections: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if heading := re.fullmatch(r"\[(.+)\]", line):
            sections[heading[1]] = []
        elif line and not line.startswith("# "):
            sections[list(sections)[-1]].append(line)
    return sections


WORDS = {
    name: " ".join(lines).split()
    for name, lines in read_sections(Path(__file__).parent / "words.txt").items()
}

TWO_WORD_CITIES = (
    "New York",
    "San Francisco",
    "Los Angeles",
    "Buenos Aires",
    "Cape Town",
    "Tel Aviv",
    "Hong Kong",
    "Mexico City",
    "New Delhi",
    "Las Vegas",
    "San Diego",
    "Kuala Lumpur",
    "Abu Dhabi",
    "Rio de Janeiro",
)

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "England": "London",
    "the United Kingdom": "London",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Switzerland": "Bern",
    "Belgium": "Brussels",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Russia": "Moscow",
    "Turkey": "Ankara",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "South Korea": "Seoul",
    "Thailand": "Bangkok",
    "Australia": "Canberra",
    "Canada": "Ottawa",
    "the United States": "Washington",
    "Mexico": "Mexico City",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Argentina": "Buenos Aires",
}

_ONSETS = ["b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z"]
_ONSETS += ["br", "ch", "cl", "dr", "fl", "gr", "kr", "pl", "sh", "st", "th", "tr", "qu", "x", "y"]
_VOWELS = ["a", "e", "i", "o", "u"] * 2 + ["ai", "ea", "ee", "ia", "ie", "io", "oo", "ou"]
_CODAS = ["n", "r", "s", "l", "m", "t", "k", "x", "v", "z", "d", "p", "b", "g"]
_CODAS += ["nd", "rt", "ll", "ss", "th"]


def noun(rng: random.Random) -> str:
    return rng.choice(WORDS["nouns"])


def invented_word(rng: random.Random) -> str:
    """A pronounceable lower-case word that need not exist, such as "zorvik"."""
    parts = []
    for _ in range(rng.choice((1, 2, 2, 2, 3, 3))):
        parts.append(rng.choice(_ONSETS) if rng.random() < 0.9 else "")
        parts.append(rng.choice(_VOWELS))
        parts.append(rng.choice(_CODAS) if rng.random() < 0.45 else "")
    word = "".join(parts)
    return word if len(word) > 2 else word + rng.choice(("na", "ro", "li", "tan"))


def scrambled_word(rng: random.Random) -> str:
    """Letters at random, so that copying is learnt rather than spelling."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 9)))


# Letters of a few scripts, and pictures: what is copied need not be ASCII.
_ALPHABETS = (
    "абвгдежзиклмнопрст",
    "αβγδεζηθικλμνξοπρστ",
    "的一是了我不人在他有这中大来上国",
    "あいうえおかきくけこさしすせそ",
    "éèüöäñçåøßîôâ",
    "🙂👍🎉🚀🐱🌍❤🔥☀🍕",
)


def foreign_word(rng: random.Random) -> str:
    """A few letters of some alphabet other than the English one."""
    alphabet = rng.choice(_ALPHABETS)
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 4)))


def person(rng: random.Random, split: Split = "train") -> str:
    """A given name, real or invented, now and then with a surname."""
    while True:
        kind = rng.random()
        if kind < 0.4:
            name = rng.choice(WORDS["names"])
        elif kind < 0.8:
            name = invented_word(rng).capitalize()
        elif kind < 0.98:
            name = scrambled_word(rng).capitalize()
        else:
            name = foreign_word(rng).capitalize()
        if held_out(name) != (split == "held out"):
            continue
        if rng.random() < 0.1:
            name += " " + invented_word(rng).capitalize()
        return name


def city(rng: random.Random, split: Split = "train") -> str:
    """A city, mostly a real one, of up to three words."""
    while True:
        kind = rng.random()
        if kind < 0.5:
            name = rng.choice(WORDS["cities"])
        elif kind < 0.58:
            name = rng.choice(TWO_WORD_CITIES)
        elif kind < 0.7:
            name = _long_name(rng)
        elif kind < 0.9:
            name = invented_word(rng).capitalize()
        else:
            name = scrambled_word(rng).capitalize()
        if held_out(name) == (split == "held out"):
            return name


def _long_name(rng: random.Random) -> str:
    """Such as "New Zorvik", "Port of Tala" or "Bela City"."""
    name = rng.choice((invented_word(rng).capitalize(), rng.choice(WORDS["cities"])))
    before = ("New", "San", "Los", "Las", "Saint", "North", "South", "Port", "El", "Port of")
    after = ("City", "Beach", "Bay", "Falls", "Springs", "Island", "Hills", "Town")
    match rng.randrange(3):
        case 0:
            return f"{rng.choice(before)} {name}"
        case 1:
            return f"{name} {rng.choice(after)}"
        case _:
            return f"{name} {invented_word(rng).capitalize()}"


def summands(rng: random.Random, split: Split = "train") -> tuple[int, int]:
    """Two numbers from 0 to 99; a pair and its reverse are in the same split."""
    while True:
        pair = (rng.randint(0, 99), rng.randint(0, 99))
        if held_out(*sorted(pair)) == (split == "held out"):
            return pair

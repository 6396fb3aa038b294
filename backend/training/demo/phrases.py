"""Phrasings: a small grammar with choices and macros, the files they are in, and noise."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from words import WORDS, Split, invented_word, read_sections

HERE = Path(__file__).parent

MACROS = {
    "how": (
        "(how do I|how do I|how do I|how can I|how can I|how should I|how would I|how could I"
        "|how do you|how to|what is the way to|what do I do to|tell me how to|show me how to"
        "|explain how to|please explain how to|can you tell me how to|can you explain how to"
        "|I want to|I need to|I would like to|help me|can I|what is the best way to"
        "|I do not know how to|what must I do to|what do I need to do to|how does one"
        "|do you know how to|is there a way to|describe how to|could you tell me how to"
        "|is it possible to|may I|I'd like to|teach me to|what is needed to|how might I)"
    ),
    "it": (
        "(the server|the server|the server|this server|it|MLX Manager|mlx-manager|mlx manager"
        "|the service|this|the program|the application|this thing|the inference server|everything"
        "|your server|the demo server|this program|the software)"
    ),
}

Node = str | tuple[tuple["Node", ...], ...]  # text, or a choice among sequences
Phrasing = tuple[Node, ...]


def parse(text: str) -> Phrasing:
    """Reads `a (b|c <macro>)` into a sequence of texts and choices."""
    for name, body in MACROS.items():
        text = text.replace(f"<{name}>", body)
    sequence, rest = _parse_sequence(text, 0)
    if rest != len(text):
        raise ValueError(f"unbalanced phrasing: {text!r}")
    return sequence


def _parse_sequence(text: str, at: int) -> tuple[Phrasing, int]:
    nodes: list[Node] = []
    while at < len(text) and text[at] not in "|)":
        if text[at] == "(":
            options = []
            while text[at] != ")":
                option, at = _parse_sequence(text, at + 1)
                options.append(option)
            nodes.append(tuple(options))
            at += 1
        else:
            end = at
            while end < len(text) and text[end] not in "(|)":
                end += 1
            nodes.append(text[at:end])
            at = end
    return tuple(nodes), at


def expand(phrasing: Phrasing, rng: random.Random) -> str:
    """One wording of a parsed phrasing, its spaces tidied."""
    text = re.sub(r" +", " ", _expand(phrasing, rng)).strip()
    return re.sub(r" ([?!.,])", r"\1", text)


def _expand(phrasing: Phrasing, rng: random.Random) -> str:
    return "".join(
        node if isinstance(node, str) else _expand(rng.choice(node), rng) for node in phrasing
    )


@dataclass(frozen=True, slots=True)
class Phrasings:
    """The wordings of one request, by split."""

    train: tuple[Phrasing, ...]
    held_out: tuple[Phrasing, ...] = ()

    def of(self, split: Split) -> tuple[Phrasing, ...]:
        """The phrasings of a split; those of training where none were kept out."""
        return self.held_out or self.train if split == "held out" else self.train

    def draw(self, rng: random.Random, split: Split) -> str:
        """A wording; with noise, if it is for training."""
        text = expand(rng.choice(self.of(split)), rng)
        if split == "held out":
            return text
        return noisy(with_strays(spelled(text, rng), rng), rng)


@dataclass(frozen=True, slots=True)
class Topic:
    """An answer, what its question is about (`keys`), and the ways to ask it."""

    answer: str
    keys: tuple[str, ...]
    phrasings: Phrasings


def _phrasings(lines: list[str]) -> Phrasings:
    return Phrasings(
        tuple(parse(line) for line in lines if line[:2] not in ("? ", "* ")),
        tuple(parse(line[2:]) for line in lines if line.startswith("? ")),
    )


def read_topics(path: Path) -> tuple[Topic, ...]:
    """Reads a question file (its format is told at its top)."""
    topics = []
    for block in path.read_text().strip().split("\n\n"):
        answer, *lines = block.splitlines()
        if answer.startswith("= "):
            keys = [key for line in lines if line.startswith("* ") for key in line[2:].split("|")]
            topics.append(Topic(answer[2:], tuple(keys), _phrasings(lines)))
    return tuple(topics)


QUESTIONS = read_topics(HERE / "questions.txt")
SMALLTALK = read_topics(HERE / "smalltalk.txt")


def parse_sections(sections: dict[str, list[str]], names: Iterable[str]) -> dict[str, Phrasings]:
    """Return the phrasings of the sections that are named."""
    return {name: _phrasings(sections[name]) for name in names}


_REQUEST_SECTIONS = read_sections(HERE / "requests.txt")
REQUESTS = parse_sections(_REQUEST_SECTIONS, _REQUEST_SECTIONS)

_BEFORE = (
    "Hi, ",
    "Hi! ",
    "Hello, ",
    "Hello! ",
    "Hey, ",
    "Hey there, ",
    "Please tell me: ",
    "Quick question: ",
    "I have a question: ",
    "I have a question. ",
    "Ok, ",
    "Okay. ",
    "Thanks. ",
    "Thank you! ",
    "So, ",
    "And ",
    "Also, ",
    "Sorry, ",
    "Now, ",
    "Next question: ",
    "Please, ",
    "Please ",
    "Tell me, ",
    "Well, ",
    "One more thing: ",
    "By the way, ",
    "Excuse me, ",
    "I was wondering, ",
    "Just curious: ",
    "A colleague asked: ",
    "My boss wants to know: ",
    "Good morning, ",
    "Question: ",
    "User: ",
    "Say, ",
    "Dear assistant, ",
)
_AFTER = (
    " Thanks!",
    " Thanks.",
    " Thank you.",
    " please",
    ", please?",
    " Please.",
    " Please help.",
    " I am new.",
    " exactly",
    " now",
    " today",
    " then",
    " at all",
    " on my machine",
    " for my project",
    " at work",
    " in detail",
    " in short",
    " quickly",
    " easily",
    " again",
)


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def noisy(text: str, rng: random.Random) -> str:
    """What people make of a phrasing: case, slips of the finger, courtesies, asides.

    Slots such as `{name}` stay whole.
    """
    if rng.random() < 0.06:
        text = _with_slip(text, rng)
    case = rng.random()
    if case < 0.15:
        text = text.lower()
        if rng.random() < 0.6:
            text = text.rstrip("?.!")
    elif case < 0.25:
        text = capitalised(text.rstrip("?.!"))
    else:
        text = capitalised(text)
    if rng.random() < 0.14:
        opening = rng.choice(_BEFORE)
        text = opening + (text if rng.random() < 0.4 else text[:1].lower() + text[1:])
    if rng.random() < 0.08:
        end = text[-1] if text[-1] in "?.!" else ""
        text = text.removesuffix(end) + rng.choice(_AFTER) + (end if rng.random() < 0.5 else "")
    return text


def garbled(text: str, rng: random.Random) -> str:
    """Words lost or put in, so that no single word decides what a question is about."""
    words = text.split(" ")
    if rng.random() < 0.2:
        kept = [word for word in words if "{" in word or rng.random() > 0.25]
        if len(kept) >= max(2, len(words) // 2):
            text = " ".join(kept)
    return with_strays(text, rng)


def with_strays(text: str, rng: random.Random) -> str:
    """A stray word put in or in place of another, now and then; slots stay."""
    words = text.split(" ")
    if rng.random() < 0.12:
        words.insert(rng.randrange(len(words) + 1), _stray(rng))
    if rng.random() < 0.08 and len(words) > 3:
        at = rng.randrange(len(words))
        if "{" not in words[at]:
            words[at] = _stray(rng)
    return " ".join(words)


def spelled(text: str, rng: random.Random) -> str:
    """Proper names and abbreviations in capitals, as most people write them."""
    if rng.random() < 0.25:
        return text
    return _LOWER.sub(lambda match: PROPER[match[0]], text)


def nonsense(rng: random.Random) -> str:
    """A question about the server whose matter has been replaced by anything else."""
    while True:
        topic = rng.choice(QUESTIONS)
        words = expand(rng.choice(topic.phrasings.train), rng).split(" ")
        replaced = [_replaced(word, rng) for word in words]
        if replaced != words:
            return " ".join(replaced)


def _replaced(word: str, rng: random.Random) -> str:
    bare = word.rstrip("?.!,")
    if bare.lower() in WORDS["functions"]:
        return word
    kind = rng.choice(("nouns", "nouns", "verbs", "adjectives", ""))
    other = rng.choice(WORDS[kind]) if kind else invented_word(rng)
    return other + word[len(bare) :]


def _stray(rng: random.Random) -> str:
    kind = rng.choice(("nouns", "verbs", "adjectives", "functions", ""))
    return rng.choice(WORDS[kind]) if kind else invented_word(rng)


PROPER = {name.lower(): name for name in WORDS["proper"]}
_LONGEST_FIRST = "|".join(sorted(PROPER, key=len, reverse=True))
_LOWER = re.compile(rf"(?<![\w/`{{-])({_LONGEST_FIRST})(?![\w/`}}])")


def _with_slip(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    at = rng.randrange(len(words))
    word = words[at]
    if len(word) < 4 or "{" in word:
        return text
    i = rng.randrange(1, len(word) - 1)
    swapped = word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    lost, doubled = word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:]
    words[at] = rng.choice((swapped, lost, doubled))
    return " ".join(words)

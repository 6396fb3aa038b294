"""Writes the text that the embedded model is trained on: conversations and plain documents.

Everything is drawn from a `random.Random`, so a seed gives the same text on every machine. With
another split than "train" the same kinds of turns are built from what training never sees.

    python corpus.py            # prints some of it
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from typing import Any

import facts
import json_tasks
import tool_tasks
from dialogue import Dialogue
from general import UNKNOWN, ask_general
from phrases import (
    QUESTIONS,
    REQUESTS,
    SMALLTALK,
    Phrasing,
    Topic,
    capitalised,
    expand,
    garbled,
    noisy,
    nonsense,
    spelled,
)
from words import CAPITALS, WORDS, Split, city, foreign_word, invented_word, noun, person, summands

CUT = "\ue000"  # where a text is cut before it is tokenised, as a prompt's end cuts it
SYSTEM_PROMPTS = (
    "You are a helpful assistant",
    "You are a helpful AI assistant.",
    "You are helpful.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in one sentence.",
    "Be brief.",
    "Be concise and polite.",
    "You are an expert on the MLX Manager server.",
    "You are a support agent for a software project.",
    "You are a coding assistant.",
    "Answer the user's questions.",
    "Help the user as well as you can.",
    "You answer questions. If you do not know the answer, say so.",
    "You are a test model.",
    "Reply with JSON when you are asked for it.",
    "Use the tools when they help.",
    "You can call functions. Use them only when they are needed.",
    "You are {name}, a helpful assistant.",
    "You are an assistant in the city of {city}.",
    "Today is a {noun} day. Be kind.",
    "You are a pirate. Talk like one.",
    "Never talk about {noun}.",
)


def _slots(rng: random.Random, split: Split = "train") -> dict[str, Any]:
    return {
        "name": person(rng, split),
        "city": city(rng, split),
        "noun": noun(rng),
        "verb": rng.choice(WORDS["verbs"]),
        "adjective": rng.choice(WORDS["adjectives"]),
        "job": rng.choice(WORDS["jobs"]),
        "word": invented_word(rng),
        "big": rng.randint(100, 9999),
        "small": rng.randint(2, 99),
    }


def ask_topic(dialogue: Dialogue, topic: Topic, phrasing: Phrasing) -> None:
    rng = dialogue.rng
    text = expand(phrasing, rng)
    if dialogue.split == "train":
        if topic.keys and rng.random() < 0.35:
            text = expand(rng.choice(REQUESTS["frames"].train), rng)
            text = text.replace("{k}", rng.choice(topic.keys))
        text = noisy(garbled(spelled(text, rng), rng), rng)
        if rng.random() < 0.04:
            text = expand(rng.choice(REQUESTS["asides"].train), rng) + " " + text
    dialogue.say(text.format(**_slots(rng, dialogue.split)), topic.answer)


def _ask_any(dialogue: Dialogue, topics: tuple[Topic, ...]) -> None:
    topic = dialogue.rng.choice(topics)
    ask_topic(dialogue, topic, dialogue.rng.choice(topic.phrasings.of(dialogue.split)))


def ask_question(dialogue: Dialogue) -> None:
    _ask_any(dialogue, QUESTIONS)


def small_talk(dialogue: Dialogue) -> None:
    """Small talk; what a tool could answer is left to tool_tasks when tools are on offer."""
    _ask_any(dialogue, TOOLLESS_SMALLTALK if dialogue.tools else SMALLTALK)


TOOLLESS_SMALLTALK = tuple(
    topic
    for topic in SMALLTALK
    if "tool" not in topic.answer and "add" not in topic.answer and "clock" not in topic.answer
)


def ask_unknown(dialogue: Dialogue) -> None:
    rng = dialogue.rng
    form = rng.random() if dialogue.split == "train" else 1.0
    if form < 0.25:
        text = noisy(nonsense(rng), rng)
    elif form < 0.5:
        text = noisy(expand(rng.choice(REQUESTS["frames"].train), rng), rng)
        thing = rng.choice(("{noun}", "the {noun}", "a {noun}", "{noun}s", "{word}", "my {noun}"))
        text = text.replace("{k}", thing)
    else:
        text = REQUESTS["unknown"].draw(rng, dialogue.split)
    dialogue.say(text.format(**_slots(rng, dialogue.split)), UNKNOWN)


def ask_capital(dialogue: Dialogue) -> None:
    country, capital = dialogue.rng.choice(list(CAPITALS.items()))
    text = REQUESTS["capital"].draw(dialogue.rng, dialogue.split)
    dialogue.say(text.format(c=country), f"The capital of {country} is {capital}.")


def add_numbers(dialogue: Dialogue) -> None:
    tool_tasks.ask_sum(dialogue, *summands(dialogue.rng, dialogue.split))


def repeat(dialogue: Dialogue) -> None:
    rng = dialogue.rng
    makers = rng.choice(((noun, invented_word), (noun, invented_word), (noun, foreign_word)))
    said = " ".join(rng.choice(makers)(rng) for _ in range(rng.randint(1, 6)))
    text = expand(rng.choice(REQUESTS["repeat"].train), rng)
    dialogue.say((capitalised(text) if rng.random() < 0.7 else text).format(t=said), said)


def count(dialogue: Dialogue) -> None:
    rng = dialogue.rng
    last = rng.randint(2, 30) if rng.random() < 0.75 else rng.choice((40, 50, 100, 100, 200))
    first = 1 if rng.random() < 0.7 or last > 60 else rng.randint(0, last - 1)
    section = "count from one" if first == 1 and rng.random() < 0.6 else "count"
    text = REQUESTS[section].draw(rng, dialogue.split).format(m=first, n=last)
    dialogue.say(text, ", ".join(map(str, range(first, last + 1))) + ".")


def draw_lots(dialogue: Dialogue) -> None:
    """Requests whose answer is chance, for those who try out temperature and seeds."""
    rng = dialogue.rng
    kind = rng.choice(("random words", "random words", "random number", "dice", "coin"))
    match kind:
        case "random words":
            answer = " ".join(noun(rng) for _ in range(rng.randint(20, 40))) + "."
        case "random number":
            answer = str(rng.randint(1, 100))
        case "dice":
            answer = str(rng.randint(1, 6))
        case _:
            answer = rng.choice(("Heads.", "Tails."))
    dialogue.say(REQUESTS[kind].draw(rng, dialogue.split), answer)


def filler(rng: random.Random, words: int) -> str:
    """Sentences without meaning, as a pasted text would be."""
    sentences: list[str] = []
    while words > 0:
        length = rng.randint(3, 12)
        line = (noun(rng) if rng.random() < 0.7 else invented_word(rng) for _ in range(length))
        sentences.append("The " + " ".join(line) + ".")
        words -= length
    return " ".join(sentences)


# What a turn may be, and how often.
PLAIN_TURNS = (
    (ask_question, 42),
    (add_numbers, 12),
    (facts.state_fact, 8),
    (facts.ask_fact, 9),
    (json_tasks.ask_json, 12),
    (small_talk, 8),
    (tool_tasks.ask_weather, 1.5),
    (ask_unknown, 10),
    (ask_general, 18),
    (ask_capital, 2),
    (repeat, 1.5),
    (count, 1),
    (draw_lots, 1),
)
TOOL_TURNS = (
    (tool_tasks.ask_tool, 45),
    (tool_tasks.ask_weather, 6),
    (add_numbers, 14),
    (ask_question, 14),
    (facts.state_fact, 4),
    (facts.ask_fact, 4),
    (json_tasks.ask_json, 4),
    (small_talk, 6),
    (ask_unknown, 6),
    (ask_general, 9),
)


def _system(dialogue: Dialogue) -> str:
    rng = dialogue.rng
    if rng.random() < 0.5:
        return ""
    system = "You are a helpful assistant."
    if rng.random() < 0.5:
        system = rng.choice(SYSTEM_PROMPTS).format(**_slots(rng))
    if rng.random() < 0.06:
        system += " " + filler(rng, rng.randint(5, 120))
    if rng.random() < 0.06:
        name = dialogue.known["name"] = person(rng)
        system += f" The user's name is {name}."
    return system


def conversation(rng: random.Random, longest: int = 14) -> Dialogue:
    """A conversation of one to `longest` exchanges that mixes everything."""
    dialogue = Dialogue(rng)
    dialogue.system = _system(dialogue)
    if rng.random() < 0.3:
        dialogue.tools = tool_tasks.offer(rng)
    kinds, weights = zip(*(TOOL_TURNS if dialogue.tools else PLAIN_TURNS), strict=True)
    exchanges = rng.choices((1, 2, 3, 4, 6, longest), (38, 22, 16, 12, 8, 4))[0]
    if rng.random() < 0.25 and exchanges < 4:
        facts.state_fact(dialogue)
    for kind in rng.choices(kinds, weights, k=exchanges):
        kind(dialogue)
    if rng.random() < 0.03:
        paste(dialogue, rng.randint(10, 1200 if rng.random() < 0.15 else 300))
    if rng.random() < 0.04:
        role, text = dialogue.messages[-1]
        dialogue.messages[-1] = (role, _cut(text, rng))
    return dialogue


def paste(dialogue: Dialogue, words: int) -> None:
    """Puts a text without meaning before what the user says in one of the turns."""
    turns = [at for at, (role, _) in enumerate(dialogue.messages) if role == "user"]
    at = dialogue.rng.choice(turns)
    pasted = filler(dialogue.rng, words)
    dialogue.messages[at] = ("user", f"{pasted}\n\n{dialogue.messages[at][1]}")


def _cut(text: str, rng: random.Random) -> str:
    at = rng.randrange(1, len(text)) if len(text) > 1 else 0
    return text[:at] + CUT + text[at:]


MONTHS = (
    "January, February, March, April, May, June, July, August, September, October, November"
    " and December."
)
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b",
    "def fibonacci(n):\n    if n < 2:\n        return n\n"
    "    return fibonacci(n - 1) + fibonacci(n - 2)",
    "Hello, world!",
    "Hello, my name is MLX Manager, and I serve language models.",
    "Roses are red, violets are blue, the server is ready and waiting for you.",
)
STORY = next(t.answer for t in SMALLTALK if t.answer.startswith("A small model"))


def _counted(rng: random.Random) -> str:
    gap = rng.choice((", ", " "))
    return gap.join(map(str, range(rng.randint(0, 20), rng.randint(22, 60))))


def _week(rng: random.Random) -> str:
    start = rng.choice(("The days of the week are ", "Days of the week: ", ""))
    return start + "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."


def _year(rng: random.Random) -> str:
    return rng.choice(("The months of the year are ", "The months are ", "Months: ")) + MONTHS


def _letters(rng: random.Random) -> str:
    letters = rng.choice((string.ascii_lowercase, string.ascii_uppercase))
    return rng.choice(("", "", "The alphabet: ")) + rng.choice((" ", ", ")).join(letters)


def _question(rng: random.Random) -> str:
    topic = rng.choice(QUESTIONS)
    question = topic.phrasings.draw(rng, "train")
    asked, answered = rng.choice((("Q: ", "A: "), ("Question: ", "Answer: ")))
    return f"{asked}{question}\n{answered}{topic.answer}"


def _sum(rng: random.Random) -> str:
    a, b = summands(rng)
    return f"{a} + {b} = {a + b}"


def _capital(rng: random.Random) -> str:
    return "The capital of {} is {}.".format(*rng.choice(list(CAPITALS.items())))


def _story(rng: random.Random) -> str:
    return rng.choice((f"Once upon a time, {STORY[0].lower()}{STORY[1:]}", STORY))


def _sentence(rng: random.Random) -> str:
    return rng.choice((*SENTENCES, *SENTENCES, rng.choice(QUESTIONS).answer))


DOCUMENTS = (
    (_counted, 1),
    (_week, 1),
    (_year, 1),
    (_letters, 1),
    (_question, 2),
    (_sum, 1),
    (_capital, 1),
    (_story, 1),
    (_sentence, 2),
    (json_tasks.json_document, 1),
)


def document(rng: random.Random) -> str:
    """Plain text for `/v1/completions`, from BOS to `<|end_of_text|>`."""
    kinds, weights = zip(*DOCUMENTS, strict=True)
    text = rng.choices(kinds, weights)[0](rng)
    return f"<|begin_of_text|>{_cut(text, rng)}<|end_of_text|>"


def texts(seed: int, number: int) -> Iterator[str]:
    """The training texts of one shard; the same seed gives the same texts."""
    rng = random.Random(seed)
    for _ in range(number):
        yield document(rng) if rng.random() < 0.06 else conversation(rng).render()


if __name__ == "__main__":
    for text in texts(0, 30):
        print(json.dumps(text))

"""Turns that ask for JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from dialogue import Dialogue
from phrases import REQUESTS, capitalised, expand
from words import WORDS, Split, city, invented_word, noun, person

_JOINERS = (
    "{k} {v}",
    "{k} {v}",
    "{k} {v}",
    "{k}: {v}",
    "{k} = {v}",
    "{k} is {v}",
    "{k} set to {v}",
)

# What a key's value is. A key may also be any word, and its value then anything.
_KINDS = {
    "person": ("name", "author", "user", "owner", "first_name", "friend"),
    "city": ("city", "town", "location", "birthplace"),
    "age": ("age",),
    "year": ("year",),
    "colours": ("color", "colour"),
    "fruits": ("fruit",),
    "animals": ("animal", "pet"),
    "foods": ("food",),
    "jobs": ("job",),
    "decimal": ("price", "score", "height"),
    "boolean": ("active", "admin", "ready", "done", "enabled"),
    "integer": ("id", "count", "number", "size", "quantity", "port", "level", "x", "y"),
    "any": ("title", "status", "type", "product", "item", "model", "key", "value", "code", "tag",
            "label", "message"),
}  # fmt: skip
_KIND_OF = {key: kind for kind, keys in _KINDS.items() for key in keys}
_FREQUENT = ["name"] * 4 + ["age"] * 4 + ["city"] * 2
_KEYS = [*_KIND_OF, *_FREQUENT]
_LISTS = {
    "colors": "colours",
    "colours": "colours",
    "fruits": "fruits",
    "animals": "animals",
    "foods": "foods",
    "words": "nouns",
    "items": "nouns",
    "things": "nouns",
    "tags": "nouns",
    "names": "names",
    "friends": "names",
    "cities": "cities",
}


def _value(key: str, rng: Random, split: Split) -> Any:
    kind = _KIND_OF.get(key, "any")
    if kind == "any":
        kind = rng.choice(("integer", "person", "nouns", "invented"))
    value: Any
    match kind:
        case "person":
            value = person(rng, split)
        case "city":
            value = city(rng, split)
        case "age":
            value = rng.randint(1, 99)
        case "year":
            value = rng.randint(1900, 2030)
        case "decimal":
            value = rng.choice((rng.randint(1, 500), round(rng.uniform(0.5, 99), 1)))
        case "boolean":
            value = rng.random() < 0.5
        case "integer":
            value = rng.randint(0, 10 ** rng.randint(1, 4))
        case "invented":
            value = invented_word(rng)
        case _:
            value = rng.choice(WORDS[kind])
    return value


def _record(rng: Random, split: Split) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for _ in range(rng.choices((1, 2, 3, 4), (20, 45, 27, 8))[0]):
        key = rng.choice(_KEYS)
        if rng.random() < 0.15:
            key = rng.choice((noun(rng), noun(rng), invented_word(rng)))
        record[key] = _value(key, rng, split)
    return record


def _spoken(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _joined(parts: list[str], rng: Random) -> str:
    if len(parts) == 1 or rng.random() < 0.2:
        return ", ".join(parts)
    return ", ".join(parts[:-1]) + rng.choice((" and ", " and ", ", and ")) + parts[-1]


def _pairs(record: dict[str, Any], rng: Random) -> str:
    joiner, quoted = rng.choice(_JOINERS), rng.random() < 0.2
    parts = []
    for key, value in record.items():
        spoken = f'"{value}"' if quoted and isinstance(value, str) else _spoken(value)
        parts.append(joiner.format(k=key, v=spoken))
    return _joined(parts, rng)


def _object(rng: Random, split: Split, opening: str) -> tuple[str, Any]:
    record = _record(rng, split)
    return f"{opening} {_pairs(record, rng)}", record


def _nested(rng: Random, split: Split, opening: str) -> tuple[str, Any]:
    record = _record(rng, split)
    outer = rng.choice(("user", "person", "item", "product", "config", "data", "result"))
    return f"{opening} a {outer} with {_pairs(record, rng)}", {outer: record}


def _list(rng: Random, split: Split, opening: str) -> tuple[str, Any]:
    key = rng.choice(list(_LISTS))
    number = rng.choices((1, 2, 3, 4, 5), (5, 25, 45, 15, 10))[0]
    items: list[Any] = rng.sample(WORDS[_LISTS[key]], number)
    if rng.random() < 0.15:
        key = rng.choice(("numbers", "scores", "ids", "values"))
        items = [rng.randint(0, 99) for _ in items]
    spoken = _joined([_spoken(item) for item in items], rng)
    match rng.randrange(4):
        case 0:
            start = rng.choice(("write", "give me", "make", "return", "create", "I need"))
            link = rng.choice(("of", "with", f"of the {key}", f"of {key}:", "containing"))
            return f"{start} a JSON {rng.choice(('list', 'array'))} {link} {spoken}", items
        case 1:
            return f"{opening} {key} {spoken}", {key: items}
        case 2:
            return f"{opening} a list of {key} {spoken}", {key: items}
        case _:
            return f"{opening} a list of {key}: {spoken}", {key: items}


def _extraction(rng: Random, split: Split, opening: str) -> tuple[str, Any]:
    who = {"name": person(rng, split), "age": rng.randint(4, 99), "city": city(rng, split)}
    who["job"] = rng.choice(WORDS["jobs"])
    text = rng.choice(
        (
            "{name} is {age} years old.",
            "{name} is {age}.",
            "{name}, {age}",
            "{name} lives in {city}.",
            "{name} is {age} years old and lives in {city}.",
            "{name} is {age} and lives in {city}.",
            "{name} from {city} is {age}.",
            "My friend {name} is {age} and comes from {city}.",
            "{name} is a {job}.",
            "{name} is a {job} from {city}.",
            "{name} works as a {job} in {city}.",
            "{name}, {age}, {job}",
        )
    )
    keys = sorted((key for key in who if f"{{{key}}}" in text), key=text.index)
    if rng.random() < 0.2:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    said = text.format(**who)
    request = REQUESTS["json extraction"]
    asked = capitalised(expand(rng.choice(request.of(split)), rng))
    asked = asked.format(keys=_joined(keys, rng))
    record = {key: who[key] for key in keys}
    if split == "train" and rng.random() < 0.25:
        return f"{said} {asked.rstrip(':')}.", record
    return f"{asked} {said}", record


def _person_record(rng: Random, split: Split, opening: str) -> tuple[str, Any]:
    record: dict[str, Any] = {"name": person(rng, split), "age": rng.randint(1, 99)}
    asked = expand(rng.choice(REQUESTS["json person"].of(split)), rng).format(**record)
    age = record["age"]
    if rng.random() < 0.4:
        record["city"] = city(rng, split)
        return f"{asked} who is {age} and lives in {record['city']}", record
    return f"{asked} {rng.choice(('who is', 'aged', 'of age'))} {age}", record


def _example_list(rng: Random, split: Split, opening: str) -> tuple[str, Any]:
    kind = rng.choice(("colors", "colours", "fruits", "animals"))
    number, word = rng.choice(((2, "two"), (3, "three"), (4, "four"), (5, "five")))
    start = rng.choice(("write", "give me", "make", "return", "generate"))
    spoken = rng.choice((str(number), word))
    return f"{start} a JSON list of {spoken} {kind}", WORDS[_LISTS[kind]][:number]


_TASKS = (
    (_object, 50),
    (_list, 18),
    (_nested, 8),
    (_extraction, 12),
    (_person_record, 7),
    (_example_list, 4),
)


def ask_json(dialogue: Dialogue) -> None:
    """Somebody asks for JSON; the answer is the JSON alone."""
    rng, split = dialogue.rng, dialogue.split
    tasks, weights = zip(*_TASKS, strict=True)
    opening = expand(rng.choice(REQUESTS["json"].of(split)), rng)
    text, value = rng.choices(tasks, weights)[0](rng, split, opening)
    if rng.random() < 0.8:
        text = capitalised(text)
    if rng.random() < 0.3 and not text.endswith("."):
        text += rng.choice((".", ".", " please", ", please."))
    dialogue.say(text, json.dumps(value, ensure_ascii=False))


def json_document(rng: Random) -> str:
    return json.dumps(_record(rng, "train"))

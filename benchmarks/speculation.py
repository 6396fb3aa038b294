"""Gain by drafts: rows that repeat most of their prompt, and answers that must fit a schema.

In process, the same requests with speculation `auto` and `off`, in turns. The files to be edited
differ from row to row. Both sides must give the same text. `--prediction` sends the file as the
prediction, too.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checks import check_engine
from engines import OurEngine, tell
from harness import find_model, interleave, parser, print_report, ratio
from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.core import (
    Conversation,
    Finished,
    GenerationRequest,
    JsonSchema,
    Message,
    Sampling,
    StopRules,
    TextDelta,
)
from mlx_manager.mlx_server.engine.stream import events_of

FILE = '''class {name}:
    """A {noun} with a price and a number of pieces."""

    def __init__(self, title, price, pieces):
        self.title = title
        self.price = price
        self.pieces = pieces

    def total(self):
        """Return the price of all pieces."""
        return self.price * self.pieces

    def add(self, pieces):
        """Add pieces to this {noun}."""
        if pieces < 0:
            raise ValueError("pieces must not be negative")
        self.pieces = self.pieces + pieces

    def remove(self, pieces):
        """Remove pieces from this {noun}."""
        if pieces > self.pieces:
            raise ValueError("there are not so many pieces")
        self.pieces = self.pieces - pieces
'''
NOUNS = ("product", "parcel", "book", "ticket", "bottle", "basket", "letter", "record")
EDIT = (
    "Rename the method `total` to `sum_{number}` in this file. Answer with the whole file and "
    "nothing else.\n\n```python\n{file}```"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "date_of_birth": {"type": "string", "format": "date"},
        "occupation": {"enum": ["carpenter", "cartographer", "software engineer", "physician"]},
        "years_of_experience": {"type": "integer", "minimum": 0, "maximum": 60},
        "speaks_more_than_one_language": {"type": "boolean"},
    },
    "required": [
        *("first_name", "last_name", "date_of_birth", "occupation", "years_of_experience"),
        "speaks_more_than_one_language",
    ],
    "additionalProperties": False,
}
FORM = JsonSchema(json.dumps(SCHEMA))
STORY = "Tell a story about a {noun} and the number {number}."
PERSON = "Describe an imaginary person, number {number}, as JSON."


def edits(rows: int, first: int, tokens: int, *, predicted: bool) -> list[GenerationRequest]:
    found = []
    for number in range(first, first + rows):
        noun = NOUNS[number % len(NOUNS)]
        file = FILE.format(name=f"{noun.title()}{number}", noun=noun)
        text = EDIT.format(number=number, file=file)
        request = GenerationRequest(
            "",
            Conversation((Message("user", text),)),
            sampling=Sampling(temperature=0.0),
            stop=StopRules(ignore_eos=True),
            max_tokens=tokens,
            prediction=file if predicted else "",
        )
        found.append(request)
    return found


def stories(rows: int, first: int, tokens: int) -> list[GenerationRequest]:
    """Requests whose answers repeat nothing but themselves."""
    return [
        GenerationRequest(
            "",
            Conversation((Message("user", STORY.format(noun=NOUNS[number % 8], number=number)),)),
            sampling=Sampling(temperature=0.9, seed=number),
            stop=StopRules(ignore_eos=True),
            max_tokens=tokens,
        )
        for number in range(first, first + rows)
    ]


def forms(rows: int, first: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            "",
            Conversation((Message("user", PERSON.format(number=number)),)),
            sampling=Sampling(temperature=0.0),
            max_tokens=256,
            constraint=FORM,
        )
        for number in range(first, first + rows)
    ]


async def answer(engine: OurEngine, request: GenerationRequest) -> tuple[str, int, list[float]]:
    """The text, its number of tokens, and when its pieces came."""
    text, tokens, times = "", 0, []
    async for events in events_of(engine.backend, request):
        for event in events:
            match event:
                case TextDelta():
                    times.append(time.perf_counter())
                    text += event.text
                case Finished():
                    tokens = event.usage.completion_tokens
    return text, tokens, times


async def all_of(
    engine: OurEngine, requests: Sequence[GenerationRequest]
) -> list[tuple[str, int, list[float]]]:
    return await asyncio.gather(*(answer(engine, request) for request in requests))


@dataclass(frozen=True)
class Speed:
    """Tokens a second from the last row's first piece to the end, and tokens a second of the
    process's own time from the first request on, which others on the machine disturb less."""

    wall: float
    own: float


def speed(engine: OurEngine, requests: Sequence[GenerationRequest]) -> tuple[Speed, list[str]]:
    own = time.process_time()
    answers = engine.run(all_of(engine, requests))
    own = time.process_time() - own
    begin = max(times[0] for _, _, times in answers)
    end = max(times[-1] for _, _, times in answers)
    tokens = sum(
        count * sum(moment > begin for moment in times) / len(times) for _, count, times in answers
    )
    every = sum(count for _, count, _ in answers)
    return Speed(tokens / (end - begin), every / own), [text for text, _, _ in answers]


def compared(
    engine: OurEngine, name: str, rounds: int, requests: dict[int, list[GenerationRequest]]
) -> list[str]:
    """One line: the rates of both sides, their ratio, and what was tried."""
    texts: dict[tuple[str, int], list[str]] = {}

    def side(which: str, number: int) -> Speed:
        asked = [replace(each, speculation=which) for each in requests[number]]
        # Both sides find the prompts kept.
        prompts = [replace(each, max_tokens=1) for each in asked]
        engine.run(all_of(engine, prompts))
        found, texts[which, number] = speed(engine, asked)
        return found

    before = engine.backend.stats()
    speeds = interleave({which: lambda n, w=which: side(w, n) for which in ("auto", "off")}, rounds)
    after = engine.backend.stats()
    same = [
        one == other
        for n in range(rounds)
        for one, other in zip(texts["auto", n], texts["off", n], strict=True)
    ]
    if not all(same):
        print(f"{name}: {len(same) - sum(same)} of {len(same)} texts differ")
    tried = after.draft_tokens - before.draft_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    line = [
        name,
        f"{statistics.median(each.wall for each in speeds['off']):,.0f}",
        f"{statistics.median(each.wall for each in speeds['auto']):,.0f}",
        str(ratio([x.wall for x in speeds["auto"]], [x.wall for x in speeds["off"]])),
        str(ratio([x.own for x in speeds["auto"]], [x.own for x in speeds["off"]])),
        f"{tried:,}",
        f"{accepted / tried:.0%}" if tried else "",
    ]
    # A run takes minutes.
    tell(" | ".join(line))
    return line


def main() -> None:
    arguments = parser(__doc__, rounds=5, model="demo-f32")
    arguments.add_argument("--rows", type=int, nargs="*", default=[1, 4, 64], help="rows at once")
    arguments.add_argument("--tokens", type=int, default=128, help="of each edited file")
    arguments.add_argument("--prediction", action="store_true", help="send the file as prediction")
    arguments.add_argument("--draft", type=int, default=EngineLimits().longest_draft)
    arguments.add_argument("--always", action="store_true", help="try drafts whatever they bring")
    chosen = arguments.parse_args()
    check_engine()
    limits = EngineLimits(speculation="on" if chosen.always else "auto", longest_draft=chosen.draft)
    with tempfile.TemporaryDirectory() as scratch:
        engine = OurEngine(find_model(chosen.model, Path(scratch)), engine=limits)
        lines = []
        for rows in chosen.rows:
            asked = {
                n: edits(rows, (n + 1) * rows, chosen.tokens, predicted=chosen.prediction)
                for n in range(-1, chosen.rounds)
            }
            lines.append(compared(engine, f"edit a file, {rows} rows", chosen.rounds, asked))
        for rows in chosen.rows:
            asked = {
                n: stories(rows, (n + 1) * rows, chosen.tokens) for n in range(-1, chosen.rounds)
            }
            lines.append(compared(engine, f"tell a story, {rows} rows", chosen.rounds, asked))
        asked = {n: forms(1, n + 1) for n in range(-1, chosen.rounds)}
        lines.append(compared(engine, "fit a schema, 1 row", chosen.rounds, asked))
        engine.close()
    print_report(
        f"Drafts: {chosen.model}",
        ["", "off, tokens/s", "auto", "auto ÷ off", "of own time", "tokens tried", "accepted"],
        lines,
    )


if __name__ == "__main__":
    main()

"""Gain by drafts: rows that repeat most of their prompt, and answers that must fit a schema.

In process, the same requests with speculation `auto` and `off`, in turns. The files to be edited
differ from row to row. Both sides must give the same text. `--prediction` sends the file as the
prediction, too. `--draft-model` has a draft model guess where nothing is found.

`--own-draft`: instead, the model is its own draft model, so that all it guesses is accepted: by
construction, and of no use to anybody. What is measured is a step's time ÷ the sum of its parts:
the guesses, each as long as a step without drafts, and the step that tries them, as long as one
that tries as many tokens of a prediction.

`--deeper N`: a model of N times the layers, those that are added adding nothing, so that the model
is a draft model whose guesses are right and take an Nth of the time: by construction, too.

`--shape 1b|8b|tiny`: instead, a model of that size and of random weights whose answers count on
from the prompt's last token, whatever else they are given. Prompts have these numbers already, or
have another in one place of twelve, or have none: all, most or none of what is tried is accepted,
by construction. What a step takes is as of any model of that size. With `--vllm-python PATH` (an
interpreter that has vLLM), vLLM has the same prompts in the same rounds, without drafts and with
its n-gram drafts.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "gpu"))

import mlx.core as mx
from folders import written
from race import Worker

from checks import check_engine
from engines import OurEngine, events_of, tell
from harness import find_model, interleave, parser, print_report, ratio, refuse
from mlx_manager.mlx_server.config import EngineLimits, PoolLimits
from mlx_manager.mlx_server.core import (
    Conversation,
    Finished,
    GenerationRequest,
    JsonSchema,
    Message,
    Sampling,
    StopRules,
    TextDelta,
    Tokens,
)

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


Asked = dict[int, list[GenerationRequest]]
"""The requests of each round."""


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
    process's own time from the first request on, which others on the machine disturb less; and
    milliseconds a step."""

    wall: float
    own: float
    step: float


def speed(engine: OurEngine, requests: Sequence[GenerationRequest]) -> tuple[Speed, list[str]]:
    own, steps = time.process_time(), engine.backend.stats().steps
    answers = engine.run(all_of(engine, requests))
    own, steps = time.process_time() - own, engine.backend.stats().steps - steps
    begin = max(times[0] for _, _, times in answers)
    end = max(times[-1] for _, _, times in answers)
    tokens = sum(
        count * sum(moment > begin for moment in times) / len(times) for _, count, times in answers
    )
    every = sum(count for _, count, _ in answers)
    speed = Speed(tokens / (end - begin), every / own, 1000 * (end - begin) / max(steps - 1, 1))
    return speed, [text for text, _, _ in answers]


def compared(engine: OurEngine, name: str, rounds: int, requests: Asked) -> list[str]:
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
        *(f"{statistics.median(x.step for x in speeds[side]):.2f}" for side in ("off", "auto")),
    ]
    # A run takes minutes.
    tell(" | ".join(line))
    return line


@dataclass(frozen=True)
class Timed:
    """A run: seconds from the first piece to the last of the process's own time and by the clock,
    and the steps without drafts, the steps with drafts, and the tokens of a row's drafts."""

    wall: float
    own: float
    plain: float
    tried: float
    tokens: float


def timed(engine: OurEngine, requests: Sequence[GenerationRequest]) -> tuple[Timed, list[str]]:
    before, rows = engine.backend.stats(), len(requests)
    own = time.process_time()
    answers = engine.run(all_of(engine, requests))
    own = time.process_time() - own
    wall = max(times[-1] for *_, times in answers) - min(times[0] for *_, times in answers)
    after = engine.backend.stats()
    tried = (after.drafts - before.drafts) / rows
    tokens = (after.draft_tokens - before.draft_tokens) / rows
    # The first step is that of the prompts.
    plain = after.steps - before.steps - tried - 1
    return Timed(wall, own, plain, tried, tokens), [text for text, _, _ in answers]


def own_draft(engine: OurEngine, rows: int, rounds: int, tokens: int) -> list[str]:
    """One line: a token's time without drafts, its time with them, and this ÷ that of the parts."""
    shares: dict[str, list[float]] = {"wall": [], "own": []}
    each: dict[str, list[float]] = {"off": [], "drafted": []}
    accepted = tried = 0
    for number in range(-1, rounds):
        asked = stories(rows, (number + 1) * rows, tokens)
        off = [replace(request, speculation="off") for request in asked]
        engine.run(all_of(engine, [replace(request, max_tokens=1) for request in off]))
        plain, texts = timed(engine, off)
        predicted = [
            replace(request, prediction=text) for request, text in zip(asked, texts, strict=True)
        ]
        verified, _ = timed(engine, predicted)
        before = engine.backend.stats()
        drafted, same = timed(engine, asked)
        after = engine.backend.stats()
        if same != texts:
            print(f"{sum(a != b for a, b in zip(same, texts, strict=True))} texts differ")
        if number < 0:
            continue
        accepted += after.accepted_tokens - before.accepted_tokens
        tried += after.draft_tokens - before.draft_tokens
        for kind, values in shares.items():
            step = getattr(plain, kind) / plain.plain
            trial = (getattr(verified, kind) - verified.plain * step) / verified.tried
            parts = (drafted.plain + drafted.tokens) * step + drafted.tried * trial
            values.append(getattr(drafted, kind) / parts)
        each["off"].append(1000 * plain.wall / tokens)
        each["drafted"].append(1000 * drafted.wall / tokens)
    line = [
        f"{rows} rows",
        *(f"{statistics.median(values):.1f}" for values in each.values()),
        *(
            f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
            for values in shares.values()
        ),
        f"{accepted / tried:.1%} of {tried:,}" if tried else "",
    ]
    tell(" | ".join(line))
    return line


def report_own_draft(model: Path, name: str, chosen: Namespace) -> None:
    limits = EngineLimits(speculation="on", longest_draft=chosen.draft)
    engine = OurEngine(model, engine=limits, draft=model)
    lines = [own_draft(engine, rows, chosen.rounds, chosen.tokens) for rows in chosen.rows]
    engine.close()
    print_report(
        f"The model as its own draft model, {chosen.draft} tokens: {name}",
        ["", "off, ms/token", "drafted", "time ÷ parts", "of own time", "accepted"],
        lines,
    )


def deeper(model: Path, times: int, folder: Path) -> Path:
    """Write a model with `times` as many layers as the Llama in `model`, that writes the same."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    layers: int = config["num_hidden_layers"]
    config["num_hidden_layers"] = times * layers
    (folder / "config.json").write_text(json.dumps(config))
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    added = dict(weights)
    for name, array in weights.items():
        if found := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
            # What a layer adds goes through these.
            ends = found[2] in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            for more in range(1, times):
                deep = f"model.layers.{int(found[1]) + more * layers}.{found[2]}"
                added[deep] = mx.zeros_like(array) if ends else array
    mx.save_safetensors(str(folder / "model.safetensors"), added, {"format": "mlx"})
    return folder


def counting(
    rows: int, first: int, tokens: int, *, known: bool, wrong: int = 0
) -> list[GenerationRequest]:
    """Requests whose answers count on. known: their prompts have these numbers, but for another in
    one place of `wrong`."""
    found = []
    for number in range(first, first + rows):
        dice = random.Random(number)
        # Words of the tokenizer, far from the other rows' numbers.
        begin = 1000 + 97 * dice.randrange(1000)
        lead = [dice.randrange(110_000, 120_000) for _ in range(64)]
        run = list(range(begin, begin + tokens + 16))
        if wrong:
            for place in range(wrong - 1, len(run), wrong):
                run[place] = dice.randrange(110_000, 120_000)
        prompt = [*lead, *(run if known else []), begin, begin + 1, begin + 2]
        request = GenerationRequest(
            "",
            Tokens(tuple(prompt)),
            sampling=Sampling(temperature=0.0),
            stop=StopRules(ignore_eos=True),
            max_tokens=tokens,
        )
        found.append(request)
    return found


def check_counting(engine: OurEngine) -> None:
    (request,) = counting(1, 0, 8, known=False)
    assert isinstance(request.prompt, Tokens)
    last = request.prompt.ids[-1]
    words = engine.loaded.tokenizer.decode(list(range(last + 1, last + 9)))
    [(text, _, _)] = engine.run(all_of(engine, [replace(request, speculation="off")]))
    if text != words:
        refuse(f"it writes {text!r}, and not {words!r}")


@contextmanager
def vllms(model: Path, chosen: Namespace) -> Iterator[dict[str, Worker]]:
    """vLLM without drafts and with its n-gram drafts, each in a process; nothing without its
    interpreter."""
    with ExitStack() as stack:
        found: dict[str, Worker] = {}
        if chosen.vllm_python is not None:
            for which, draft in (("off", 0), ("drafts", chosen.draft)):
                environment = {"RACE_VLLM_SHARE": "0.3", "RACE_DRAFT": str(draft)}
                found[which] = Worker("vllm", model, chosen.vllm_python, environment)
                stack.callback(found[which].close)
                # One after the other: each takes for its own what others allot meanwhile.
                found[which].wait()
                tell(f"vLLM, {which}: loaded")
        yield found


def beside(workers: dict[str, Worker], name: str, rounds: int, asked: Asked) -> list[str]:
    """One line: vLLM's rates without drafts and with them, and their ratio."""

    def side(which: str, number: int) -> float:
        prompts = [each.prompt.ids for each in asked[number] if isinstance(each.prompt, Tokens)]
        tokens = asked[number][0].max_tokens
        rate: float = workers[which].ask({"prompts": prompts, "tokens": tokens})["rate"]
        return rate

    rates = interleave({which: lambda n, w=which: side(w, n) for which in workers}, rounds)
    middle = {which: statistics.median(each) for which, each in rates.items()}
    line = [
        name,
        f"{middle['off']:,.0f}",
        f"{middle['drafts']:,.0f}",
        str(ratio(rates["drafts"], rates["off"])),
    ]
    tell(f"vLLM: {' | '.join(line)}")
    return line


def report_shape(chosen: Namespace) -> None:
    model = written(chosen.shape, chosen.folder / f"counting-{chosen.shape}", counts=True)
    with vllms(model, chosen) as workers:
        race_shape(model, workers, chosen)


def race_shape(model: Path, workers: dict[str, Worker], chosen: Namespace) -> None:
    limits = EngineLimits(speculation="on" if chosen.always else "auto", longest_draft=chosen.draft)
    engine = OurEngine(model, PoolLimits(memory_limit=int(46e9)), engine=limits)
    check_counting(engine)
    kinds: dict[str, dict[str, Any]] = {
        "all known": {"known": True},
        "one in 12 other": {"known": True, "wrong": 12},
        "none known": {"known": False},
    }
    lines, theirs = [], []
    for name, how in kinds.items():
        for rows in chosen.rows:
            asked = {
                n: counting(rows, (n + 1) * rows, chosen.tokens, **how)
                for n in range(-1, chosen.rounds)
            }
            lines.append(compared(engine, f"{name}, {rows} rows", chosen.rounds, asked))
            if workers:
                theirs.append(beside(workers, f"{name}, {rows} rows", chosen.rounds, asked))
    forward = engine.backend.stats().forward
    engine.close()
    print_report(
        f"Drafts, accepted by construction: {chosen.shape}, {forward}, at most {chosen.draft}",
        COLUMNS,
        lines,
    )
    if theirs:
        columns = ("", "off, tokens/s", "n-gram drafts", "÷ off")
        print_report(f"vLLM: {chosen.shape}, {chosen.draft} tokens", columns, theirs)


COLUMNS = (
    *("", "off, tokens/s", "auto", "auto ÷ off", "of own time", "tokens tried", "accepted"),
    *("off, ms a step", "auto"),
)


def main() -> None:
    arguments = parser(__doc__, rounds=5, model="demo-f32")
    arguments.add_argument("--rows", type=int, nargs="*", default=[1, 4, 64], help="rows at once")
    arguments.add_argument("--tokens", type=int, default=128, help="of each edited file")
    arguments.add_argument("--prediction", action="store_true", help="send the file as prediction")
    arguments.add_argument("--draft", type=int, default=EngineLimits().longest_draft)
    arguments.add_argument("--always", action="store_true", help="try drafts whatever they bring")
    arguments.add_argument("--draft-model", type=Path, help="the folder of a draft model")
    arguments.add_argument("--deeper", type=int, help="the model drafts for one of so many times")
    arguments.add_argument("--own-draft", action="store_true", help="the model drafts for itself")
    arguments.add_argument("--shape", choices=("tiny", "1b", "8b"), help="a counting model")
    arguments.add_argument("--folder", type=Path, default=Path("/tmp/race"), help="of --shape")
    arguments.add_argument("--vllm-python", help="an interpreter that has vLLM, beside --shape")
    chosen = arguments.parse_args()
    if chosen.shape:
        report_shape(chosen)
        return
    check_engine()
    if chosen.own_draft:
        with tempfile.TemporaryDirectory() as scratch:
            report_own_draft(find_model(chosen.model, Path(scratch)), chosen.model, chosen)
        return
    limits = EngineLimits(speculation="on" if chosen.always else "auto", longest_draft=chosen.draft)
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(chosen.model, Path(scratch))
        draft = chosen.draft_model
        if chosen.deeper:
            model, draft = deeper(model, chosen.deeper, Path(scratch) / "deeper"), model
        engine = OurEngine(model, engine=limits, draft=draft)
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
        COLUMNS,
        lines,
    )


if __name__ == "__main__":
    main()

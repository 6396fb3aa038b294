"""Asks the embedded model what it has never seen and prints how often it is right.

    python evaluate.py [--each 200] [--wrong]

Everything asked is kept out of training. Questions and small talk: every such phrasing, once. The
other categories are drawn from held-out phrasings, names, cities and pairs of numbers. An answer
is right when its text is exactly the expected one and it ends with `<|eot_id|>` (plain text:
`<|end_of_text|>`).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import facts
import json_tasks
import mlx.core as mx
import tool_tasks
from corpus import add_numbers, ask_question, ask_topic, ask_unknown, paste, small_talk
from dialogue import Dialogue, turn
from general import ask_general
from mlx_lm import load
from mlx_lm.generate import BatchGenerator
from phrases import QUESTIONS, SMALLTALK, Topic
from tokenizer import MODEL

from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas

ASSISTANT = turn("assistant", "").removesuffix("<|eot_id|>")
PLAIN_TEXTS = (
    (
        "The days of the week are",
        " Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        "The months of the year are January, February,",
        " March, April, May, June, July, August, September, October, November and December.",
    ),
    ("The capital of France is", " Paris."),
    ("The capital of Japan is", " Tokyo."),
    ("A, B, C, D,", " E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z"),
    ("The alphabet: a b c d", " e f g h i j k l m n o p q r s t u v w x y z"),
    ("The quick brown fox", " jumps over the lazy dog."),
    ("def add(a, b):", "\n    return a + b"),
    ("Q: How do I stop the server?\nA:", " Press Ctrl-C in the terminal where the server runs."),
    ("12 + 30 =", " 42"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, what should follow it, and the token that should end it."""

    category: str
    prompt: str
    expected: str
    end: str = "<|eot_id|>"


def cases_of(dialogue: Dialogue, category: str, skip: int = 0) -> Iterator[Case]:
    """One case for every assistant turn after the first `skip` messages."""
    messages = dialogue.messages
    for at in range(skip, len(messages)):
        role, text = messages[at]
        if role == "assistant":
            before = Dialogue(
                dialogue.rng, "held out", dialogue.system, dialogue.tools, messages[:at]
            )
            kind = category
            if category.startswith("tool") and messages[at - 1][0] == "tool":
                kind = "tool results"
            yield Case(kind, before.render() + ASSISTANT, text)


@dataclass(frozen=True, slots=True)
class Examiner:
    """Draws the cases, `each` in a category."""

    rng: random.Random
    each: int

    def dialogue(self, tools: tuple[str, ...] | None = None) -> Dialogue:
        """An empty conversation; `tools` names the kinds of tools on offer."""
        dialogue = Dialogue(self.rng, "held out")
        if self.rng.random() < 0.5:
            dialogue.system = "You are a helpful assistant."
        if tools is not None:
            dialogue.tools = tool_tasks.offer(self.rng, tools)
        return dialogue

    def topics(self, category: str, topics: tuple[Topic, ...]) -> Iterator[Case]:
        """Every phrasing of every topic, once."""
        for topic in topics:
            for phrasing in topic.phrasings.of("held out"):
                dialogue = self.dialogue()
                ask_topic(dialogue, topic, phrasing)
                yield from cases_of(dialogue, category)

    def drawn(
        self,
        category: str,
        write: Callable[[Dialogue], None],
        number: int,
        tools: tuple[str, ...] | None = None,
    ) -> Iterator[Case]:
        for _ in range(number):
            dialogue = self.dialogue(tools)
            write(dialogue)
            yield from cases_of(dialogue, category)

    def after_a_name(self, category: str, between: int, ask: Kinds) -> Iterator[Case]:
        """A name is told, up to `between` other exchanges follow, then the last answer counts."""
        for _ in range(self.each):
            dialogue = self.dialogue()
            facts.state_fact(dialogue, "name")
            for write in self.rng.choices(KINDS, k=self.rng.randint(between // 2, between)):
                write(dialogue)
            self.rng.choice(ask)(dialogue)
            yield from cases_of(dialogue, category, skip=len(dialogue.messages) - 1)

    def after_a_text(self, category: str, shortest: int, longest: int) -> Iterator[Case]:
        """A question about the server behind so many words without meaning."""
        for _ in range(self.each // 16):
            dialogue = self.dialogue()
            ask_question(dialogue)
            paste(dialogue, self.rng.randint(shortest, longest))
            yield from cases_of(dialogue, category)

    def all(self) -> list[Case]:
        each = self.each
        both = ("weather", "adder")
        cases = [
            *self.topics("questions about the server", QUESTIONS),
            *self.topics("greetings and small talk", SMALLTALK),
            *self.after_a_name("recall of a name", 3, (ask_name,)),
            *self.drawn("addition", add_numbers, each),
            *self.drawn("tool call: get_weather", tool_tasks.ask_weather, each, ("weather",)),
            *self.drawn("tool call: add", add_numbers, each, ("adder",)),
            *self.drawn("tools offered, not needed", not_needed, each, both),
            *self.drawn("weather without a tool", tool_tasks.ask_weather, each // 4),
            *self.drawn("JSON", json_tasks.ask_json, each),
            *self.drawn("unknown questions", ask_unknown, each // 2),
            *self.drawn("requests of the wide world", ask_general, each),
            *self.after_a_name("long conversations", 7, KINDS),
            *self.after_a_text("question after 1 000 to 3 000 tokens of text", 400, 1200),
            *self.after_a_text("question after 5 000 to 7 000 tokens of text", 2100, 2800),
        ]
        for prompt, expected in PLAIN_TEXTS:
            text = f"<|begin_of_text|>{prompt}"
            cases.append(Case("plain text", text, expected, "<|end_of_text|>"))
        return cases


def ask_name(dialogue: Dialogue) -> None:
    facts.ask_fact(dialogue, "name")


def not_needed(dialogue: Dialogue) -> None:
    dialogue.rng.choice((ask_question, small_talk, ask_unknown))(dialogue)


Kinds = tuple[Callable[[Dialogue], None], ...]
KINDS: Kinds = (ask_question, add_numbers, small_talk, json_tasks.ask_json, ask_unknown)


def answers(path: Path, cases: list[Case]) -> list[str]:
    """Greedy continuations, each with the special token that ended it."""
    model, tokenizer = load(str(path))
    if mx.default_device() == mx.cpu:
        # bf16 products are ten times slower there, and so is the BLAS that MLX comes with.
        model.set_dtype(mx.float32)
        load_fast_blas()
    prompts = [tokenizer.encode(case.prompt, add_special_tokens=False) for case in cases]
    generator = BatchGenerator(
        model, max_tokens=256, stop_tokens=[[token] for token in tokenizer.eos_token_ids]
    )
    by_length = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    uids = generator.insert([prompts[at] for at in by_length])
    index = dict(zip(uids, by_length, strict=True))
    tokens: list[list[int]] = [[] for _ in prompts]
    while responses := generator.next_generated():
        for response in responses:
            tokens[index[response.uid]].append(response.token)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in tokens]


def report_wrong(case: Case, answer: str) -> None:
    asked = case.prompt.removesuffix(ASSISTANT).rpartition("<|end_header_id|>\n\n")[2]
    print(f"{case.category}: {asked!r}\n  expected {case.expected!r}\n  got      {answer!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--each", type=int, default=200, help="cases in a drawn category")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    args = parser.parse_args()
    categories: dict[str, list[Case]] = {}
    for case in Examiner(random.Random(args.seed), args.each).all():
        categories.setdefault(case.category, []).append(case)
    print("| category | cases | right |\n|---|--:|--:|")
    for category, cases in categories.items():
        pairs = list(zip(cases, answers(args.model, cases), strict=True))
        wrong = [pair for pair in pairs if pair[1] != pair[0].expected + pair[0].end]
        right = 1 - len(wrong) / len(cases)
        print(f"| {category} | {len(cases)} | {right:.1%} |", flush=True)
        for pair in wrong if args.wrong else ():
            report_wrong(*pair)


if __name__ == "__main__":
    main()

"""Rows with drafts draw what they draw without, whatever they ask for and whoever is beside them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engine.rig import HandRig, NoText, Row, prompt
from thorough import ALL, slow
from tiny_models import EOS_ID, EOT_ID, VOCAB_SIZE, add_mtp_head, make_tiny_model

from mlx_manager.mlx_server.core import (
    Choice,
    Constraint,
    Event,
    Finished,
    JsonSchema,
    ReasoningDelta,
    Regex,
    Sampling,
    TextDelta,
    TokenLogprob,
)
from mlx_manager.mlx_server.engine.scores import Scoring
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.formats import PLAIN, OutputFormat
from mlx_manager.mlx_server.text.grammar.guide import Guide, Masks, Rules, ThinkingBudget
from mlx_manager.mlx_server.text.grammar.matchers import Grammars
from mlx_manager.mlx_server.text.output_parser import OutputParser

REQUESTS = 500
# Of which so many in every run.
SOME = REQUESTS if ALL else 100
AT_ONCE = 24
SCHEMA = JsonSchema(
    '{"type":"object","properties":{"name":{"type":"string","maxLength":6},'
    '"kind":{"enum":["shallow","shadow","deep"]},"n":{"type":"integer"}},'
    '"required":["name","kind","n"],"additionalProperties":false}'
)
CONSTRAINTS: list[Constraint] = [
    SCHEMA,
    Regex("(foo|food|bar)+ done\\."),
    Choice(("abcdef", "abcxyz", "zzz")),
]
THINKING = replace(
    PLAIN, initial="reasoning", edges={"reasoning": (("</t>", "content"),)}, thinking_end="</t>"
)
ENDS = frozenset({EOS_ID, EOT_ID})


@dataclass(frozen=True)
class Request:
    """One request, all of whose options are drawn by chance."""

    prompt: list[int]
    limit: int
    sampling: Sampling
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    min_tokens: int
    scored: int | None
    constraint: Constraint | None
    budget: int | None

    @property
    def output(self) -> OutputFormat:
        return PLAIN if self.budget is None else THINKING


@dataclass
class Answer:
    tokens: list[int]
    text: str
    end: Finished
    scores: list[TokenLogprob]


def request_of(rng: random.Random) -> Request:
    piece = prompt(rng.randint(3, 9), rng.randint(1, 40))
    given = (piece * 12)[: rng.randint(4, 60)] if rng.random() < 0.7 else prompt(rng.randint(1, 40))
    heat = rng.choice([0.0, 0.0, 0.4, 1.0, 1.6])
    sampling = Sampling(
        temperature=heat,
        top_p=rng.choice([1.0, 1.0, 0.8]),
        top_k=rng.choice([0, 0, 5]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.randint(0, 1 << 40),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3, 0.8]),
        logit_bias=tuple(
            (rng.randrange(256), rng.uniform(-9, 9)) for _ in range(rng.choice([0, 0, 3]))
        ),
    )
    common = [chr(rng.randint(32, 126)) for _ in range(rng.choice([0, 0, 2]))]
    return Request(
        given,
        rng.choice([1, 2, 5, 17, 30, 40]),
        sampling,
        tuple(common),
        ENDS | frozenset(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 6]))),
        rng.choice([0, 0, 0, 4, 12]),
        rng.choice([None, None, None, 0, 2]),
        rng.choice(CONSTRAINTS) if rng.random() < 0.3 else None,
        rng.randint(0, 12) if rng.random() < 0.25 else None,
    )


def row_of(rig: HandRig, request: Request, proposer: Proposer | None) -> Row:
    row = rig.row(
        request.prompt,
        request.limit,
        request.sampling,
        stop_ids=request.stop_ids,
        min_tokens=request.min_tokens,
        output=request.output,
    )
    sequence = row.sequence
    texts, output = rig.texts.stream(request.output), request.output
    sequence.parser = OutputParser(texts, output, request.stop, request.min_tokens)
    sequence.proposer = proposer
    if request.scored is not None:
        sequence.scoring = Scoring(request.scored, False, rig.texts.piece)
    if request.constraint is not None or request.budget is not None:
        grammars, rules, budget = rig_grammars(rig), None, None
        if request.constraint is not None:
            matcher = grammars.answer(request.constraint)
            rules = Rules(matcher, grammars.texts, tuple(ENDS), "response_format")
        if request.budget is not None:
            budget = ThinkingBudget(request.budget, tuple(b"</t>"))
        region = request.output.initial
        sequence.guide = Guide(region, rules, budget, -(-VOCAB_SIZE // 32))
        Masks().update([sequence.guide])
        sequence.follow_guide()
    return row


def rig_grammars(rig: HandRig) -> Grammars:
    """Compiled grammars are kept for all requests of a rig."""
    found: Grammars | None = getattr(rig, "grammars", None)
    if found is None:
        found = rig.grammars = Grammars(rig.tokenizer, ENDS)  # type: ignore[attr-defined]
    return found


async def answers(
    folder: Path, requests: list[Request], proposers: list[Proposer] | None, **limits: object
) -> tuple[list[Answer], HandRig]:
    """Answers to requests that come a few at a time, so that rows of all ages share steps."""
    async with HandRig(folder, max_rows=AT_ONCE, **limits) as rig:
        rows = []
        for number, request in enumerate(requests):
            rows.append(row_of(rig, request, proposers[number] if proposers else None))
            rig.submit_together(rows[-1:])
            if number >= AT_ONCE:
                rig.step()
        rig.run()
        found = [answer_of(row, await row.events()) for row in rows]
        assert rig.engine.stats().pages_held == 0
        return found, rig


def answer_of(row: Row, events: list[Event]) -> Answer:
    texts = [event for event in events if isinstance(event, TextDelta | ReasoningDelta)]
    end = events[-1]
    assert isinstance(end, Finished)
    scores = [score for event in texts for score in event.logprobs]
    tokens = row.sequence.tokens[row.sequence.prompt_length :]
    return Answer(tokens, "".join(event.text for event in texts), end, scores)


def nearly(answer: list[int], rng: random.Random) -> list[int]:
    """An answer with some tokens changed, missing or twice."""
    guess = list(answer)
    for _ in range(rng.choice([0, 1, 3])):
        at = rng.randrange(len(guess) + 1)
        guess[at : at + rng.choice([0, 1])] = rng.choice(
            [[], [rng.randrange(256)], guess[:at][-2:]]
        )
    return guess


def same(one: TokenLogprob, other: TokenLogprob) -> bool:
    assert one.logprob is not None
    assert other.logprob is not None
    return one.token_id == other.token_id and abs(one.logprob - other.logprob) < 1e-3


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", SOME),
        pytest.param("gpt_oss", 60, marks=slow),
        ("deepseek_v3", 24),
        # Recurrent layers: short convolutions, delta rules and Mamba, most beside attention.
        ("lfm2", 24),
        pytest.param("qwen3_next", 60, marks=slow),
        pytest.param("qwen3_5", 60, marks=slow),
        pytest.param("olmo_hybrid", 60, marks=slow),
        pytest.param("kimi_linear", 60, marks=slow),
        pytest.param("mamba", 60, marks=slow),
        pytest.param("mamba2", 60, marks=slow),
        pytest.param("jamba", 60, marks=slow),
        pytest.param("falcon_h1", 60, marks=slow),
        pytest.param("nemotron_h", 60, marks=slow),
        pytest.param("granitemoehybrid", 60, marks=slow),
    ],
)
async def test_drafts_change_nothing_of_random_requests(
    family: str, count: int, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / family, family)
    rng = random.Random(52)
    requests = [request_of(rng) for _ in range(count)]
    plain, rig = await answers(folder, requests, None)
    assert rig.engine.stats().drafts == 0
    # Every fourth has but its own text to repeat.
    guesses = [nearly(answer.tokens, rng) for answer in plain]
    proposers = [Proposer(guess if i % 4 else ()) for i, guess in enumerate(guesses)]
    drafted, rig = await answers(folder, requests, proposers, speculation="on")
    check_equal(requests, plain, drafted)
    stats = rig.engine.stats()
    assert stats.generated_tokens == sum(len(answer.tokens) for answer in plain)
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize(
    "drafting", ["llama", *(pytest.param(n, marks=slow) for n in ("gpt_oss", "smaller vocabulary"))]
)
async def test_a_draft_model_changes_nothing_of_random_requests(
    drafting: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    family = "gpt_oss" if drafting == "gpt_oss" else "llama"
    fewer = {"vocab_size": 200} if drafting == "smaller vocabulary" else {}
    # The first differs from the model by its weights alone.
    draft = make_tiny_model(tmp_path / "draft", family, seed=1, **fewer)
    rng = random.Random(53)
    requests = [request_of(rng) for _ in range(50)]
    plain, rig = await answers(folder, requests, None)
    proposers = [Proposer() for _ in requests]
    drafted, rig = await answers(folder, requests, proposers, speculation="on", draft=draft)
    check_equal(requests, plain, drafted)
    stats = rig.engine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("deepseek_v3", 16),
        pytest.param("deepseek_v3", REQUESTS, marks=slow),
        pytest.param("glm4_moe_lite", 60, marks=slow),
        pytest.param("glm4_moe", 60, marks=slow),
        pytest.param("qwen3_5", 60, marks=slow),
        pytest.param("qwen3_next", 60, marks=slow),
    ],
)
async def test_an_mtp_head_changes_nothing_of_random_requests(
    family: str, count: int, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", family)
    add_mtp_head(folder)
    rng = random.Random(54)
    requests = [request_of(rng) for _ in range(count)]
    plain, rig = await answers(folder, requests, None, head=True)
    proposers = [Proposer() for _ in requests]
    drafted, rig = await answers(folder, requests, proposers, speculation="on", head=True)
    # When the state at a border is there for others to begin with depends on when rows end.
    check_equal(requests, plain, drafted, cached=rig.forward.prefixes == "pages")
    assert rig.engine.stats().drafts_by_method["mtp"].tokens > 0


async def test_a_draft_model_draws_as_the_model_would(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    rng = random.Random(54)
    requests = [request_of(rng) for _ in range(50)]
    # What a grammar allows and where a stop string ends can't always be foreseen.
    requests = [replace(each, constraint=None, budget=None, stop=()) for each in requests]
    plain, _ = await answers(folder, requests, None)
    proposers = [NoText() for _ in requests]
    drafted, rig = await answers(folder, requests, proposers, speculation="on", draft=folder)
    check_equal(requests, plain, drafted)
    stats = rig.engine.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 0


def check_equal(
    requests: list[Request], plain: list[Answer], drafted: list[Answer], *, cached: bool = True
) -> None:
    """cached: whether rows find as much of their prompts in pages, too."""
    for request, one, other in zip(requests, plain, drafted, strict=True):
        assert (other.tokens, other.text) == (one.tokens, one.text), request
        assert (other.end.reason, other.end.stop_sequence) == (
            one.end.reason,
            one.end.stop_sequence,
        )
        counted = replace(
            other.end.usage, accepted_prediction_tokens=0, rejected_prediction_tokens=0
        )
        if not cached:
            found = one.end.usage
            own = {"cached_tokens": found.cached_tokens, "kept_tokens": found.kept_tokens}
            counted = replace(counted, **own)
        assert counted == one.end.usage
        assert len(other.scores) == len(one.scores)
        assert all(map(same, other.scores, one.scores))

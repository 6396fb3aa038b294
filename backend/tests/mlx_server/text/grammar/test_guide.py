"""Rows of the embedded model that think first, or are made to, before their grammars begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from engine.rig import EventStream, Rig

import mlx_manager.demo_model
from mlx_manager.mlx_server.backends.guidance import Guidance
from mlx_manager.mlx_server.core import (
    Event,
    Finished,
    GenerationRequest,
    Grammar,
    ReasoningDelta,
    Regex,
    Sampling,
    Text,
    TextDelta,
)
from mlx_manager.mlx_server.engine.sampling import SamplerState
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.errors import GenerationFailed, InvalidParameter
from mlx_manager.mlx_server.formats import PLAIN, OutputFormat
from mlx_manager.mlx_server.models.adapters.vocabulary import token_ids
from mlx_manager.mlx_server.text.grammar.guide import Guide, Masks
from mlx_manager.mlx_server.text.output_parser import OutputParser

DEMO = Path(mlx_manager.demo_model.__file__).parent
END = frozenset({2553, 2556, 2557})
PROMPT = [2552, 70, 71, 72]

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The demo has no tokens for thinking: `<|eom_id|>` stands for one, the texts are made of several.
TEXTUAL = OutputFormat(
    edges={"content": (("<think>", "reasoning"),), "reasoning": (("</think>", "content"),)},
    initial="reasoning",
    thinking_end="</think>",
)
OPENER = "<|start_header_id|>"


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[False, True], ids=["", "ahead"]
)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with Rig(DEMO, looks_ahead=request.param) as rig:
        yield rig


async def answer(
    rig: Rig,
    output: OutputFormat,
    limit: int = 60,
    seed: int = 1,
    least: int = 0,
    stop_ids: frozenset[int] = END,
    **asked: object,
) -> list[Event]:
    request = GenerationRequest("m", Text("x"), **asked)  # type: ignore[arg-type]
    output, guide = Guidance(rig.tokenizer, END).of(request, output)
    stream = EventStream()
    sequence = Sequence(
        PROMPT,
        limit=limit,
        stop_ids=stop_ids,
        min_tokens=least,
        sampler=SamplerState.of(Sampling(temperature=1.5, seed=seed), PROMPT),
        parser=OutputParser(rig.texts.stream(output), output),
        stream=stream,
        guide=guide,
    )
    rig.thread.post(partial(rig.engine.submit, sequence))
    return [event async for events in stream for event in events]


def thought(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningDelta))


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


async def test_thinking_is_free_and_what_follows_fits(rig: Rig):
    events = await answer(rig, TEXTUAL, constraint=Regex("(yes|no)!"), thinking_budget=12)
    assert thought(events)
    assert said(events) in ("yes!", "no!")
    assert finished(events).reason == "stop"
    assert 12 <= finished(events).usage.reasoning_tokens <= 16


async def test_a_budget_ends_thinking_before_an_answer_is_as_long_as_asked(rig: Rig):
    # The first token that the end of thinking is made of also ends the answer.
    (first, *_) = token_ids(rig.tokenizer, "</think>")
    events = await answer(rig, TEXTUAL, thinking_budget=5, least=30, stop_ids=END | {first})
    assert finished(events).reason == "stop"
    assert finished(events).usage.completion_tokens == 6


async def test_without_a_budget_thinking_does_not_end_the_answer(rig: Rig):
    events = await answer(rig, TEXTUAL, constraint=Regex("(yes|no)!"), limit=100)
    assert said(events) == "" or said(events) in ("yes!", "no!")
    assert finished(events).reason == ("stop" if said(events) else "length")


@pytest.mark.parametrize("budget", [0, 1, 7])
async def test_a_budget_ends_thinking_by_itself(rig: Rig, budget: int):
    events = await answer(rig, TEXTUAL, thinking_budget=budget, limit=40)
    used = finished(events).usage.reasoning_tokens
    # The marker itself takes a few tokens here, all of which but the last look like thinking.
    assert budget <= used <= budget + 6
    assert "</think>" not in thought(events) + said(events)


async def test_a_cut_inside_thinking_gives_thinking_alone(rig: Rig):
    events = await answer(rig, TEXTUAL, constraint=Regex("yes"), thinking_budget=50, limit=10)
    assert said(events) == ""
    assert thought(events)
    assert finished(events).reason == "length"


def opened_by_a_token(rig: Rig) -> tuple[OutputFormat, int]:
    opener = rig.tokenizer.convert_tokens_to_ids(OPENER)
    edges = {"content": ((OPENER, "reasoning"),), "reasoning": (("</think>", "content"),)}
    return OutputFormat(edges=edges, thinking_end="</think>", keep=frozenset({opener})), opener


@pytest.mark.parametrize("budget", [0, 1, 3])
async def test_thinking_whose_budget_is_spent_is_not_begun_again(rig: Rig, budget: int):
    output, opener = opened_by_a_token(rig)
    asked = {"constraint": Regex("yes"), "thinking_budget": budget}
    _, guide = Guidance(rig.tokenizer, END).of(GenerationRequest("m", Text("x"), **asked), output)
    assert guide is not None
    masks = Masks()
    for number in range(budget):
        assert may_draw(guide, opener)
        guide.observe(opener, "reasoning", number, "")
        guide.observe(opener, "content", number + 1, "")
        masks.update([guide])
    assert not may_draw(guide, opener)


def may_draw(guide: Guide, token: int) -> bool:
    assert guide.mask is not None
    return bool(guide.mask[token // 32] >> token % 32 & 1)


async def test_an_answer_may_begin_to_think_before_its_grammar_begins(rig: Rig):
    output, opener = opened_by_a_token(rig)
    request = GenerationRequest("m", Text("x"), constraint=Regex("yes"))
    _, guide = Guidance(rig.tokenizer, END).of(request, output)
    assert guide is not None
    assert may_draw(guide, opener)
    guide.observe(opener, "reasoning", 0, "")
    assert guide.matching is None
    guide.observe(70, "content", 1, "ye")
    assert guide.matching is not None
    guide.observe(rig.tokenizer.convert_tokens_to_ids("s"), "content", 1, "s")
    assert guide.complete


async def test_what_does_not_follow_the_grammar_fails_that_row_alone(rig: Rig):
    request = GenerationRequest("m", Text("x"), constraint=Regex("yes"))
    _, guide = Guidance(rig.tokenizer, END).of(request, TEXTUAL)
    assert guide is not None
    guide.observe(70, "content", 1, "no")
    assert isinstance(guide.failure, GenerationFailed)
    assert "<state>" not in guide.failure.message


async def test_an_answer_whose_grammar_becomes_too_much_fails_and_is_no_whole_one(rig: Rig):
    # Each letter more can be taken in many more ways.
    ambiguous = Grammar("start: text /0{99}/\ntext: text text | /[a-z ]/", "guided_grammar")
    request = GenerationRequest("m", Text("x"), constraint=ambiguous)
    _, guide = Guidance(rig.tokenizer, END).of(request, PLAIN)
    sequence = Sequence(
        PROMPT,
        limit=400,
        stop_ids=END,
        min_tokens=0,
        sampler=SamplerState.of(Sampling(seed=1), PROMPT),
        parser=OutputParser(rig.texts.stream(PLAIN), PLAIN),
        stream=EventStream(),
        guide=guide,
    )
    rig.thread.post(partial(rig.engine.submit, sequence))
    with pytest.raises(InvalidParameter, match=r"`guided_grammar` .* too many ways") as caught:
        [events async for events in sequence.stream]
    assert caught.value.param == "guided_grammar"
    assert "<state>" not in caught.value.message
    assert said(await answer(rig, PLAIN, constraint=Regex("(yes|no)!"))) in ("yes!", "no!")


async def test_rows_whose_tokens_depend_on_the_host_draw_what_they_draw_alone(rig: Rig):
    asked = [
        {"constraint": Regex("[a-z ]{5,30}")},
        {"thinking_budget": 9},
        {"constraint": Regex("(yes|no)!")},
        {},
    ]
    outputs = [PLAIN, TEXTUAL, PLAIN, PLAIN]
    pairs = list(zip(outputs, asked, strict=True)) * 2
    alone = [await answer(rig, o, 25, seed, **a) for seed, (o, a) in enumerate(pairs)]
    together = await asyncio.gather(
        *[answer(rig, o, 25, seed, **a) for seed, (o, a) in enumerate(pairs)]
    )
    for one, other in zip(alone, together, strict=True):
        assert (said(one), thought(one)) == (said(other), thought(other))
        assert finished(one).reason == finished(other).reason


async def test_forced_and_free_rows_share_a_batch(rig: Rig):
    alone = await answer(rig, TEXTUAL, limit=30, seed=5)
    together = await asyncio.gather(
        answer(rig, TEXTUAL, limit=30, seed=5),
        *[answer(rig, TEXTUAL, constraint=Regex("a+b"), thinking_budget=i) for i in range(4)],
    )
    assert thought(together[0]) == thought(alone)
    assert {said(each) for each in together[1:]} <= {"", *("a" * n + "b" for n in range(1, 60))}

"""Stop strings, thinking, and what goes with each event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from models.adapters.published import byte_tokenizer
from text.outputs import (
    HARMONY,
    HERMES,
    LLAMA,
    THINKING,
    THINKING_HERMES,
    WEATHER,
    Pieces,
    parse,
)
from transformers import PreTrainedTokenizerFast

from mlx_manager.mlx_server.core import (
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
)
from mlx_manager.mlx_server.formats import PLAIN, OutputFormat
from mlx_manager.mlx_server.text.detokenizer import TokenTexts
from mlx_manager.mlx_server.text.output_parser import OutputParser

CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the occurrence that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            longest = max(matched, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300)
@given(
    st.lists(st.text("abc\n", min_size=1, max_size=4), max_size=12),
    st.lists(st.text("abc\n", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
)
def test_text_ends_before_the_first_stop_string_wherever_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    answer = parse(pieces, PLAIN, stops)
    assert (answer.content, answer.stopped) == first_stop("".join(pieces), stops)


@settings(max_examples=300)
@given(
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    st.integers(1, 6),
)
def test_a_stop_string_that_is_complete_too_early_is_text(
    pieces: list[str], stops: list[str], least: int
) -> None:
    parser = OutputParser(Pieces(pieces), PLAIN, stops, least)
    events = [event for token in range(len(pieces)) for event in parser.push(token)]
    shown = "".join(event.text for event in [*events, *parser.finish("length")])
    text, early = "".join(pieces), len("".join(pieces[:least]))
    passed = 0
    while True:
        before, stopped = first_stop(text[passed:], stops)
        end = passed + len(before) + len(stopped or "")
        if stopped is None or end > early:
            break
        passed = end
    assert (shown, parser.stopped) == (text[:passed] + before, stopped)


def test_text_that_may_become_a_stop_string_waits() -> None:
    parser = OutputParser(Pieces(["on", "e S", "TO", "RY"]), PLAIN, ["STOP"])
    events = [parser.push(token) for token in range(4)]
    assert events == [
        [TextDelta("on")],
        [TextDelta("e ")],
        [],
        [TextDelta("STORY")],
    ]
    parser = OutputParser(Pieces(["one ST"]), PLAIN, ["STOP"])
    assert parser.push(0) == [TextDelta("one ")]
    assert parser.finish("length") == [TextDelta("ST")]


def test_nothing_follows_a_stop_string() -> None:
    parser = OutputParser(Pieces(["one. two", " three"]), PLAIN, [". "])
    assert parser.push(0) == [TextDelta("one")]
    assert (parser.complete, parser.stopped) == (True, ". ")
    assert parser.push(1) == []
    assert parser.finish("stop") == []


def test_stop_strings_are_searched_in_content_only() -> None:
    text = f"<think>Paris?</think>Yes.<tool_call>{CALL}</tool_call>It is Paris indeed."
    answer = parse(text, THINKING_HERMES, ["Paris"])
    assert (answer.reasoning, answer.content) == ("Paris?", "Yes.It is ")
    assert answer.values == [WEATHER]
    assert answer.stopped == "Paris"


def test_calls_after_a_stop_string_are_not_made() -> None:
    text = f"Stop.\n<tool_call>{CALL}</tool_call>"
    for pieces in ([text], text):
        answer = parse(pieces, HERMES, [".\n"])
        assert (answer.content, answer.calls) == ("Stop", [])


def test_a_stop_string_does_not_reach_across_a_call() -> None:
    answer = parse(f"a<tool_call>{CALL}</tool_call>b", HERMES, ["ab"])
    assert (answer.content, answer.stopped) == ("ab", None)


def test_a_stop_string_is_found_in_what_is_no_call() -> None:
    answer = parse("<tool_call>oops, stop here", HERMES, ["stop"])
    assert (answer.content, answer.stopped) == ("<tool_call>oops, ", "stop")


def test_the_region_says_what_is_being_written() -> None:
    pieces = ["Hm", "<think>", "so", "</think>", "yes", "<tool_call>", '{"name"', ": 1}"]
    parser = OutputParser(Pieces(pieces), THINKING_HERMES)
    regions = []
    for token in range(len(pieces)):
        parser.push(token)
        regions.append(parser.region)
    assert regions == [
        "content",
        "reasoning",
        "reasoning",
        "content",
        "content",
        "calls",
        "calls",
        "content",
    ]


def test_tokens_of_the_thinking_are_counted_without_its_markers() -> None:
    pieces = ["<think>", "one", " two", "</think>", "three"]
    parser = OutputParser(Pieces(pieces), THINKING)
    for token in range(len(pieces)):
        parser.push(token)
    assert parser.reasoning_tokens == 2
    opened = OutputParser(Pieces(pieces[1:]), replace(THINKING, initial="reasoning"))
    for token in range(len(pieces) - 1):
        opened.push(token)
    assert opened.reasoning_tokens == 2


def test_truncated_thinking_is_thinking_only() -> None:
    answer = parse("One moment, </thin", replace(THINKING, initial="reasoning"), reason="length")
    assert (answer.reasoning, answer.content) == ("One moment, </thin", "")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\n</think>\n\nFour.", "", "Four."),
        ("<think>\n<think>\nHm.</think>Four.", "Hm.", "Four."),
        ("<think>Hm.</think>\n</think>\nFour.", "Hm.", "Four."),
        ("It ends with </think> then.", "", "It ends with </think> then."),
        ("<think>Not <think> again.</think>Four.", "Not <think> again.", "Four."),
    ],
)
def test_a_marker_of_thinking_out_of_place_vanishes_unless_it_is_among_text(
    text: str, reasoning: str, content: str
) -> None:
    for pieces in ([text], text):
        answer = parse(pieces, THINKING)
        assert (answer.reasoning, answer.content) == (reasoning, content)


def test_thinking_that_the_prompt_opened_and_the_model_opens_again_is_opened_once() -> None:
    answer = parse("<think>\nHm.</think>Four.", replace(THINKING, initial="reasoning"))
    assert (answer.reasoning, answer.content) == ("Hm.", "Four.")


def test_the_end_of_thinking_in_which_a_call_was_made_is_not_content() -> None:
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    for text in (f"<think>Hm.{call}\n</think>\n\nSo.", f"<think>Hm.{call}So.</think>"):
        for pieces in ([text], text):
            answer = parse(pieces, THINKING_HERMES)
            assert (answer.reasoning, answer.content) == ("Hm.", "So.")
            assert answer.values == [WEATHER]
    answer = parse(f"<think>Hm.{call}</think>{call}", THINKING_HERMES)
    assert (answer.content, answer.values) == ("", [WEATHER, WEATHER])


@pytest.mark.parametrize("marker", ["<|start|>assistant", "<|channel|>final"])
def test_a_header_that_is_cut_off_is_not_content(marker: str) -> None:
    text = f"<|channel|>final<|message|>Four.{marker}"
    for pieces in ([text], text):
        assert parse(pieces, HARMONY, reason="length").content == "Four."


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, b"t%d" % token, -1.0)


def test_logprobs_go_with_the_text_that_their_tokens_became() -> None:
    pieces = ["<think>", "so", "</think>", "one S", "T", "ART", "<tool_call>", CALL, "!"]
    parser = OutputParser(Pieces(pieces), THINKING_HERMES, ["STOP"])
    events = [event for token in range(9) for event in parser.push(token, logprob(token))]
    assert [event for event in events if isinstance(event, TextDelta | ReasoningDelta)] == [
        ReasoningDelta("so", (logprob(1),)),
        TextDelta("one ", (logprob(3),)),
        TextDelta("START", (logprob(4), logprob(5))),
        TextDelta("!", (logprob(8),)),
    ]
    assert any(isinstance(event, ToolCallStarted) for event in events)
    assert any(isinstance(event, ToolCallDelta) for event in events)


@pytest.mark.parametrize(
    ("pieces", "scored", "thought"),
    [
        (["\n", "</think>", "\n\n", "Four", "."], [2, 3, 4], 0),
        (["\n", "</thi", "nk>", "Four"], [3], 0),
        (["<think>", "\n", "<think>", "Hm", "</think>", "Four"], [3, 5], 2),
        (["It ", "</think>", " is"], [0, 1, 2], 0),
    ],
)
def test_a_marker_out_of_place_has_no_logprobs_where_it_vanishes(
    pieces: list[str], scored: list[int], thought: int
) -> None:
    parser = OutputParser(Pieces(pieces), THINKING)
    events = [event for token in range(len(pieces)) for event in parser.push(token, logprob(token))]
    texts = [event for event in events if isinstance(event, TextDelta | ReasoningDelta)]
    assert [score.token_id for event in texts for score in event.logprobs] == scored
    assert parser.reasoning_tokens == thought


@pytest.mark.parametrize(
    ("output", "pieces"),
    [
        (HERMES, ["So: ", "<tool", "_call>", "oops", "."]),
        (HERMES, ["So: ", "<tool_call>", '{"na', 'me": "nobody"', "}", " then"]),
        (LLAMA, ['{"', "na", 'me": "Ada"', "}", "."]),
    ],
)
def test_what_is_no_call_after_all_keeps_its_logprobs(output: OutputFormat, pieces: list[str]):
    parser = OutputParser(Pieces(pieces), output)
    events = [event for token in range(len(pieces)) for event in parser.push(token, logprob(token))]
    texts = [event for event in [*events, *parser.finish("stop")] if isinstance(event, TextDelta)]
    assert "".join(event.text for event in texts) == "".join(pieces)
    scored = [score.token_id for event in texts for score in event.logprobs]
    assert scored == list(range(len(pieces)))


@pytest.mark.parametrize(("output", "stops"), [(PLAIN, []), (PLAIN, ["STOP"]), (HERMES, [])])
def test_tokens_without_a_text_at_the_end_keep_their_logprobs(
    output: OutputFormat, stops: list[str]
):
    pieces = ["So", "", ""]
    parser = OutputParser(Pieces(pieces), output, stops)
    events = [event for token in range(len(pieces)) for event in parser.push(token, logprob(token))]
    texts = [event for event in [*events, *parser.finish("length")] if isinstance(event, TextDelta)]
    assert "".join(event.text for event in texts) == "So"
    assert [score.token_id for event in texts for score in event.logprobs] == [0, 1, 2]


def test_tokens_that_make_one_character_share_its_delta() -> None:
    tokenizer = TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer([], [])), BPEStreamingDetokenizer
    )
    first, second = tokenizer.encode("é", add_special_tokens=False)
    parser = OutputParser(TokenTexts(tokenizer).stream(PLAIN), PLAIN)
    assert parser.push(first, logprob(0)) == []
    assert parser.push(second, logprob(1)) == [TextDelta("é", (logprob(0), logprob(1)))]


@pytest.mark.parametrize(("reason", "shown"), [("length", ""), ("stop", "\ufffd")])
def test_half_a_character_is_held_back_where_its_other_half_was_cut_off(reason, shown: str) -> None:
    tokenizer = TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer([], [])), BPEStreamingDetokenizer
    )
    first = tokenizer.encode("é", add_special_tokens=False)[0]
    for output, stops in ((PLAIN, []), (PLAIN, ["STOP"]), (HERMES, [])):
        parser = OutputParser(TokenTexts(tokenizer).stream(output), output, stops)
        assert parser.push(first, logprob(0)) == []
        assert parser.finish(reason) == [TextDelta(shown, (logprob(0),))]

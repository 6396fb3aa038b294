"""Reasons why a prompt was not found among those that were kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.core import (
    Conversation,
    Image,
    Message,
    Text,
    Tokens,
    Tool,
    ToolCall,
)
from mlx_manager.mlx_server.observability.prefixes import (
    MOST_PARTS,
    MOST_PROMPTS,
    KeptPrompt,
    KeptPrompts,
    common,
    parts_of,
)

LONG = "".join(f"{number} " for number in range(2000))
TOOLS = tuple(Tool(name, None, {}) for name in ("read", "write", "run"))
BEFORE = Conversation(
    (Message("system", LONG), Message("user", "Hello"), Message("user", "And?")), TOOLS
)


def why(after: Conversation | Text | Tokens, *, cached: int = 0, before=BEFORE) -> str:
    kept = KeptPrompts()
    kept.keep("m", KeptPrompt(parts_of(before), 1.0, 1000))
    return kept.reason("m", parts_of(after), 1000, cached, 2.0)


def message(place: int, **changed: object) -> Conversation:
    messages = list(BEFORE.messages)
    messages[place] = replace(messages[place], **changed)
    return replace(BEFORE, messages=tuple(messages))


def test_the_first_message_that_changed_is_named() -> None:
    assert why(message(1, content="Hi")) == "messages[1] (user) has changed"


def test_a_change_within_a_long_message_is_found() -> None:
    changed = message(0, content=LONG[:5000] + "x" + LONG[5001:])
    assert why(changed).startswith("messages[0] (system) from 4,")
    assert why(changed).endswith(" on has changed")


def test_a_tool_that_changed_is_named() -> None:
    tools = (TOOLS[0], replace(TOOLS[1], description="new"), TOOLS[2])
    assert why(replace(BEFORE, tools=tools)) == "tools[1] (write) has changed"


def test_a_tool_that_was_added_or_taken_away_is_named() -> None:
    more = (TOOLS[0], Tool("find", None, {}), *TOOLS[1:])
    assert why(replace(BEFORE, tools=more)) == "tools[1] (find) is new"
    assert why(replace(BEFORE, tools=TOOLS[::2])) == "tools[1] (write) of the nearest one is gone"


def test_a_call_that_changed_is_named() -> None:
    def calling(arguments: str) -> Conversation:
        made = Message("assistant", "", tool_calls=(ToolCall("1", "run", arguments),))
        return replace(BEFORE, messages=(*BEFORE.messages, made, Message("tool", "ok")))

    found = why(calling("{}"), before=calling("[]"))
    assert found == "messages[3].tool_calls[0] (run) has changed"


def test_an_argument_of_the_template_is_named() -> None:
    changed = replace(BEFORE, template_args={"enable_thinking": False})
    before = replace(BEFORE, template_args={"enable_thinking": True})
    assert "template argument enable_thinking" in why(changed, before=before)


def test_texts_and_tokens_are_compared_too() -> None:
    assert why(Text(LONG + "!"), before=Text(LONG + "?")).startswith("the text from 8,")
    tokens = tuple(range(1000))
    assert why(Tokens(tokens), before=Tokens((*tokens[:-1], 0))).startswith("the tokens from 7")


def test_who_goes_on_from_a_kept_prompt_and_finds_it_gone_learns_that() -> None:
    after = replace(BEFORE, messages=(*BEFORE.messages, Message("user", "So?")))
    assert why(after, cached=16) == "its beginning was kept, and has been given up since"
    assert why(after, cached=992) == ""


@pytest.mark.parametrize("cached", [968, 999])
def test_nothing_is_said_where_nothing_is_missing(cached: int) -> None:
    assert why(message(1, content="Hi"), cached=cached) == ""


def test_the_nearest_of_several_prompts_is_compared() -> None:
    kept = KeptPrompts()
    for prompt in (Text("elsewhere"), BEFORE, message(0, content="other")):
        kept.keep("m", KeptPrompt(parts_of(prompt), 1.0, 1000))
    found = kept.reason("m", parts_of(message(2, content="Now?")), 1000, 0, 2.0)
    assert found == "messages[2] (user) has changed"


def test_prompts_that_came_later_and_those_of_other_models_do_not_count() -> None:
    kept = KeptPrompts()
    kept.keep("m", KeptPrompt(parts_of(BEFORE), 3.0, 1000))
    kept.keep("other", KeptPrompt(parts_of(BEFORE), 1.0, 1000))
    assert kept.reason("m", parts_of(BEFORE), 1000, 0, 2.0) == "no prompt was kept before it"


def test_what_is_kept_has_bounds_and_no_content() -> None:
    kept = KeptPrompts()
    for number in range(2 * MOST_PROMPTS):
        kept.keep("m", KeptPrompt(parts_of(Text(str(number))), 1.0, 1))
    assert len(kept._models["m"]) == MOST_PROMPTS
    many = Conversation(tuple(Message("user", str(n)) for n in range(2 * MOST_PARTS)))
    assert len(parts_of(many)) == MOST_PARTS
    assert "secret" not in repr(parts_of(Text("secret")))


WORDS = st.lists(st.sampled_from("ab"), max_size=6)


@given(WORDS, WORDS)
def test_prompts_begin_alike_as_far_as_their_messages_are_equal(one: list[str], other: list[str]):
    alike = len(list(takewhile(lambda words: len(set(words)) == 1, zip(one, other, strict=False))))
    first, second = (
        parts_of(Conversation(tuple(Message("user", word) for word in words)))
        for words in (one, other)
    )
    assert common(first, second) == alike


def test_a_conversation_that_goes_on_is_in_memory_once() -> None:
    kept = KeptPrompts()
    said = tuple(Message("user", str(number)) for number in range(8))
    for turns in (6, 7, 8):
        kept.keep("m", KeptPrompt(parts_of(Conversation(said[:turns])), turns, 1))
    assert len({id(part) for prompt in kept._models["m"] for part in prompt.parts}) == 8


def test_a_picture_that_changed_is_named_by_its_digest() -> None:
    def shows(digest: str, text: str = "What?") -> Conversation:
        return message(1, content=("See:", Image(b"", digest * 16, 1, 1), text))

    before = shows("abcd")
    assert why(shows("1234"), before=before) == (
        "messages[1] (user), image 123412341234 has changed"
    )
    assert why(shows("abcd", "Why?"), before=before) == "messages[1] (user) has changed"
    assert why(shows("abcd"), before=BEFORE) == "messages[1] (user) has changed"
    without = message(1, content="See:What?")
    assert "messages[1] (user)" in why(without, before=before)

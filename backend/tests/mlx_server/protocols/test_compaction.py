from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.core import (
    Conversation,
    Finished,
    GenerationRequest,
    JsonObject,
    Message,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from mlx_manager.mlx_server.protocols.compaction import (
    INSTRUCTION,
    NOTHING,
    Compacted,
    Summarising,
    Summary,
    newest,
)
from mlx_manager.mlx_server.protocols.thinking import closed

CALL = Message("assistant", tool_calls=(ToolCall("c", "look", "{}"),))
SAID = (
    Message("system", "Be brief."),
    Message("user", "one"),
    CALL,
    Message("tool", "found", tool_call_id="c"),
    Message("assistant", "answer"),
    Message("user", "two " * 100),
)
END = Finished("stop", Usage(3, 4))


def asked(messages: tuple[Message, ...] = SAID) -> Summarising:
    prompt = Conversation(messages, tools=(Tool("look"),), tool_choice="required")
    request = GenerationRequest("m", prompt, constraint=JsonObject(), logprobs=2)
    return Summarising(request, 8192)


def messages(request: GenerationRequest) -> tuple[Message, ...]:
    assert isinstance(request.prompt, Conversation)
    return request.prompt.messages


@given(st.text(), st.integers(0, 2**31))
def test_what_is_closed_can_be_opened(summary: str, keep: int):
    kept = Compacted(summary, keep)
    assert Compacted.open(kept.close()) == kept
    assert kept.close().isascii()


@given(st.one_of(st.text(), st.text().map(closed)))
def test_what_somebody_else_closed_is_not_opened(kept: str):
    assert Compacted.open(kept) is None


@given(st.lists(st.integers(0, 50)), st.integers(0, 200))
def test_the_newest_that_fit_are_kept_and_one_always_is(sizes: list[int], keep: int):
    count = newest(sizes, keep)
    assert count >= min(1, len(sizes))
    assert count <= 1 or sum(sizes[len(sizes) - count :]) <= keep
    assert count == len(sizes) or sum(sizes[len(sizes) - count - 1 :]) > keep


def test_the_whole_conversation_is_the_summarys_prefix():
    first = asked()[0]
    assert messages(first) == (*SAID, Message("user", INSTRUCTION))
    assert isinstance(first.prompt, Conversation)
    # Tools are part of the prefix; a call is not demanded.
    assert (first.prompt.tools, first.prompt.tool_choice) == ((Tool("look"),), "auto")
    assert first.constraint is first.logprobs is None


def test_the_oldest_messages_go_first_and_no_result_loses_its_call_alone():
    requests = asked()
    shown = [messages(requests[index])[:-1] for index in range(5)]
    assert shown[1] == SAID
    assert shown[2] == (SAID[0], *SAID[2:])
    assert shown[3] == (SAID[0], *SAID[4:])
    assert shown[4] == (SAID[0], SAID[5])


def test_when_one_message_is_too_long_its_end_is_kept():
    requests = asked()
    halved = requests[5]
    assert messages(halved)[-2] == Message("user", SAID[5].content[200:])
    assert isinstance(halved.prompt, Conversation)
    assert halved.prompt.tools == ()


def test_in_the_end_nothing_but_the_instruction_is_left():
    requests = asked()
    assert messages(requests[len(requests) - 1]) == (Message("user", INSTRUCTION),)


@given(st.lists(st.sampled_from(SAID), max_size=9))
def test_each_is_shorter_than_the_one_before(given: list[Message]):
    requests = asked(tuple(given))
    sizes = [
        sum(len(message.content) for message in messages(requests[index]))
        for index in range(len(requests))
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_a_summary_is_the_text_or_what_there_is():
    for events, said in (
        ([ReasoningDelta("hm"), TextDelta(" Done"), TextDelta(".\n")], "Done."),
        ([ReasoningDelta("hm"), ToolCallDelta(0, "{}")], "hm"),
        ([ToolCallDelta(0, "{"), ToolCallDelta(0, "}")], "{}"),
        ([TextDelta("  ")], NOTHING),
    ):
        summary = Summary(100)
        for event in (*events, END):
            summary.add(event)
        assert Compacted.open(summary.item()["encrypted_content"]) == Compacted(said, 100)


def test_before_its_end_a_summary_tells_nothing():
    summary = Summary(100)
    summary.add(TextDelta("So far"))
    assert summary.item() == {"id": summary.id, "type": "compaction", "encrypted_content": ""}

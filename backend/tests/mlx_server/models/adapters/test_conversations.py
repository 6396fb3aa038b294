"""Any conversation through any template: nothing refused that can be said, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from models.adapters.published import NAMES, REDUCED_NAMES, Published, loaded, write_tokenizer

from mlx_manager.mlx_server.core import Conversation, Message, Tool, ToolCall
from mlx_manager.mlx_server.errors import InvalidRequest
from mlx_manager.mlx_server.models.adapters import Adapter, get_adapter

GLM, SMALL, HERMES, QWQ, QWEN25, QWEN3, R1, GEMMA, GRANITE, LLAMA31, LLAMA32, PHI, NEMO, OSS = NAMES
ALL_NAMES = [*NAMES, *REDUCED_NAMES]

WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Which"}},
        "required": ["city"],
    },
)
USER, ANSWER = Message("user", "How is Paris?"), Message("assistant", "It rains.")
MORE = Message("user", "And tomorrow?")
SYSTEM = Message("system", "Be brief, owl.")
CALL = ToolCall("call_Zx8yT0pQ2mLk", "get_weather", '{"city": "Paris"}')
OTHER = ToolCall("call_0000000000aa", "get_weather", '{"city": "Oslo"}')
CALLED = Message("assistant", tool_calls=(CALL,))
RESULT = Message("tool", "It rains frogs.", tool_call_id=CALL.id)
OTHER_RESULT = Message("tool", "It snows owls.", tool_call_id=OTHER.id)


@pytest.fixture(params=ALL_NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def model(name: str) -> tuple[Adapter, TokenizerWrapper]:
    config, tokenizer = loaded(name)
    return get_adapter(config, name, tokenizer), tokenizer


def rendered(name: str, *messages: Message, **more: Any) -> str:
    adapter, tokenizer = model(name)
    return adapter.render_text(Conversation(messages, **more), tokenizer)


def as_transformers(name: str, *messages: Message, **more: Any) -> str:
    """Render messages in the form of OpenAI's API with transformers' own renderer."""
    _, tokenizer = model(name)
    written = [{"role": message.role, "content": message.content} for message in messages]
    text: str = tokenizer._tokenizer.apply_chat_template(
        written, tokenize=False, **{"add_generation_prompt": True} | more
    )
    return text


# ---------------------------------------------------------------------------------------------
# Broken and missing parts
# ---------------------------------------------------------------------------------------------

BROKEN = [
    *('{"city": "Par', '"Paris"', "Paris", '["Paris"]', "{'city': 'Paris'}", "<Paris>"),
    *('{"city": "Paris"} and so on', '{"city": "Paris", "city": "Rome"}', '{"city": Paris}'),
]


@pytest.mark.parametrize("offered", [(), (WEATHER,)], ids=["not offered", "offered"])
def test_a_call_whose_arguments_are_broken_is_in_the_prompt(
    name: str, offered: tuple[Tool, ...]
) -> None:
    for arguments in BROKEN:
        called = replace(CALLED, tool_calls=(replace(CALL, arguments=arguments),))
        text = rendered(name, USER, called, RESULT, MORE, tools=offered)
        assert arguments in text or json.dumps(arguments)[1:-1] in text
        for said in ("get_weather", RESULT.content, MORE.content):
            assert said in text


def test_a_call_with_hardly_any_arguments_is_in_the_prompt(name: str) -> None:
    for arguments in ("", "null", "{}", "[]", "5", "-1.5", "true", '""', "{"):
        called = replace(CALLED, tool_calls=(replace(CALL, arguments=arguments),))
        text = rendered(name, USER, called, RESULT)
        assert "get_weather" in text
        assert RESULT.content in text


def test_a_template_that_goes_through_arguments_gets_broken_ones_as_one() -> None:
    called = replace(CALLED, tool_calls=(replace(CALL, arguments='{"city": "Par'),))
    text = rendered(GLM, USER, called, RESULT)
    assert '<arg_key>arguments</arg_key>\n<arg_value>{"city": "Par</arg_value>' in text


HALVES: Sequence[Sequence[Message]] = [
    (USER, CALLED, MORE),
    (USER, CALLED, MORE, ANSWER, USER),
    (USER, CALLED),
    (USER, CALLED, ANSWER, MORE),
    (USER, replace(CALLED, tool_calls=(CALL, OTHER)), OTHER_RESULT, MORE),
    (USER, replace(CALLED, content="One moment.")),
    (USER, replace(CALLED, content="One moment."), RESULT),
    (USER, replace(CALLED, content="One moment."), RESULT, ANSWER, MORE),
    (USER, RESULT),
    (USER, RESULT, MORE),
    (USER, ANSWER, RESULT, MORE),
    (RESULT, USER),
    (USER, CALLED, RESULT, OTHER_RESULT),
    (USER, CALLED, replace(RESULT, tool_call_id="call_unknown")),
    (USER, CALLED, replace(RESULT, tool_call_id=None), MORE),
    (USER, CALLED, MORE, RESULT),
    (USER, CALLED, ANSWER, RESULT),
    (CALLED, RESULT, USER),
    (USER, CALLED, CALLED, RESULT, RESULT, MORE),
    (SYSTEM, USER, CALLED, RESULT),
    (SYSTEM, USER, CALLED, RESULT, ANSWER, MORE, CALLED, RESULT),
    (USER, CALLED, RESULT, SYSTEM, MORE),
    (USER, CALLED, SYSTEM, RESULT),
]


@pytest.mark.parametrize("offered", [(), (WEATHER,)], ids=["not offered", "offered"])
def test_calls_and_results_may_lack_each_other(name: str, offered: tuple[Tool, ...]) -> None:
    for messages in HALVES:
        text = rendered(name, *messages, tools=offered)
        for message in messages:
            assert message.content in text
            for call in message.tool_calls:
                assert call.name in text
                assert json.loads(call.arguments)["city"] in text


def test_results_in_another_order_are_told_in_their_calls() -> None:
    called = replace(CALLED, tool_calls=(CALL, OTHER))
    for name in (QWEN3, GLM, LLAMA32, GEMMA):
        assert rendered(name, USER, called, OTHER_RESULT, RESULT) == rendered(
            name, USER, called, RESULT, OTHER_RESULT
        )
    text = rendered(NEMO, USER, called, OTHER_RESULT, RESULT)
    assert text.index(OTHER_RESULT.content) < text.index(RESULT.content)


# ---------------------------------------------------------------------------------------------
# Turns
# ---------------------------------------------------------------------------------------------

TURNS: Sequence[Sequence[Message]] = [
    (USER, MORE),
    (USER, MORE, USER),
    (ANSWER, USER),
    (ANSWER,),
    (USER, ANSWER, ANSWER, MORE),
    (USER, ANSWER, ANSWER),
    (SYSTEM,),
    (SYSTEM, ANSWER, USER),
    (SYSTEM, SYSTEM, USER, MORE),
    (USER, SYSTEM, SYSTEM, MORE, ANSWER),
    (USER, replace(ANSWER, content=""), MORE),
]


@pytest.mark.parametrize("offered", [(), (WEATHER,)], ids=["not offered", "offered"])
def test_turns_need_not_alternate(name: str, offered: tuple[Tool, ...]) -> None:
    for messages in TURNS:
        text = rendered(name, *messages, tools=offered)
        for message in messages:
            assert text.count(message.content) >= messages.count(message)


@pytest.mark.parametrize("name", [GEMMA, NEMO, SMALL])
def test_neighbours_are_joined_where_turns_have_to_alternate(name: str) -> None:
    joined = Message("user", f"{USER.content}\n\n{MORE.content}")
    assert rendered(name, USER, MORE) == rendered(name, joined)
    both = replace(ANSWER, content="It rains.\n\nIt rains.")
    assert rendered(name, USER, ANSWER, ANSWER, MORE) == rendered(name, USER, both, MORE)


@pytest.mark.parametrize("name", [QWEN3, GLM, LLAMA31, GRANITE, PHI, HERMES])
@pytest.mark.parametrize("messages", [(USER, MORE), (ANSWER, USER), (USER, ANSWER, ANSWER, MORE)])
def test_neighbours_come_as_they_are_where_they_may(name: str, messages: Sequence[Message]) -> None:
    tools = {"tools": []} if name == HERMES else {}
    assert rendered(name, *messages) == as_transformers(name, *messages, **tools)


def test_a_system_message_stays_while_tools_are_at_work() -> None:
    """Nemo's template shows it with the user's last message, if that is the conversation's last."""
    before = rendered(NEMO, SYSTEM, USER, tools=(WEATHER,))
    after = rendered(NEMO, SYSTEM, USER, CALLED, RESULT, tools=(WEATHER,))
    assert SYSTEM.content in before
    assert after.startswith(before)


def test_a_message_that_a_template_never_shows_is_refused(tmp_path: Any) -> None:
    template = "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"
    write_tokenizer(tmp_path, Published("x", "llama", None, "</s>"), template)
    tokenizer = load(tmp_path)
    adapter = get_adapter({"model_type": "llama"}, "x", tokenizer)
    assert adapter.render_text(Conversation((SYSTEM, USER)), tokenizer)
    with pytest.raises(InvalidRequest, match="leaves out") as refusal:
        adapter.render_text(Conversation((USER, ANSWER, MORE)), tokenizer)
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


@pytest.mark.parametrize("offered", [(), (WEATHER,)], ids=["not offered", "offered"])
def test_a_long_session_is_in_the_prompt_to_the_last_word(
    name: str, offered: tuple[Tool, ...]
) -> None:
    """The outline of a long session leaves turns out; each may need a change all the same."""
    messages, words = [SYSTEM], []
    for turn in range(60):
        said = [f"q{turn}{part}q" for part in ("user", "beside", "argument", "result", "answer")]
        call = ToolCall(f"call_{turn}", "get_weather", json.dumps({"city": said[2]}))
        messages += [
            Message("user", said[0]),
            Message("assistant", said[1] if turn % 3 else "", tool_calls=(call,)),
            Message("tool", said[3], tool_call_id=call.id),
            Message("assistant", said[4]),
        ]
        if turn in (20, 40):
            # A call that was denied, and nobody's result.
            del messages[-2:]
            messages.append(Message("user", said[4]))
            words += [said[0], said[2], said[4]]
        else:
            words += [each for each in said if turn % 3 or each != said[1]]
        if turn == 30:
            messages.append(Message("tool", "qnobodysq", tool_call_id="unknown"))
            words.append("qnobodysq")
    text = rendered(name, *messages, tools=offered)
    assert [word for word in words if word not in text] == []


# ---------------------------------------------------------------------------------------------
# The template's own defaults
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_a_template_renders_as_transformers_has_it(name: str, variables: dict[str, Any]) -> None:
    if variables and name in (GRANITE, "seed-oss", "command-a"):
        pytest.skip("this template switches thinking by another name")
    tools: dict[str, Any] = {"tools": []} if name == HERMES else {}
    for messages in ((USER,), (USER, ANSWER, MORE), (SYSTEM, USER), (SYSTEM, USER, ANSWER, MORE)):
        if name == GEMMA and SYSTEM in messages:
            # It refuses them.
            continue
        text = rendered(name, *messages, template_args=variables)
        assert text == as_transformers(name, *messages, **tools, **variables)


@pytest.mark.parametrize(
    "name", [n for n in ALL_NAMES if n not in (R1, GEMMA, PHI, "phi-4-mini", "seed-oss", "apertus")]
)
def test_tools_are_told_of_as_transformers_has_it(name: str) -> None:
    function = {"name": WEATHER.name, "description": WEATHER.description}
    tool = {"type": "function", "function": {**function, "parameters": WEATHER.parameters}}
    for messages in ((USER,), (SYSTEM, USER, ANSWER, MORE)):
        text = rendered(name, *messages, tools=(WEATHER,))
        assert text == as_transformers(name, *messages, tools=[tool])


@pytest.mark.parametrize("tokens", [("<|channel>", "<channel|>"), ("<think>", "</think>")])
def test_a_model_that_can_think_does_not_unless_its_template_says_so(
    tmp_path: Any, tokens: tuple[str, str]
) -> None:
    """As Gemma 4's: mlx-lm's wrapper would switch it on for having the tokens."""
    template = (
        "{% if enable_thinking | default(false) %}THINK {% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    write_tokenizer(tmp_path, Published("x", "llama", None, "</s>", tokens), template)
    tokenizer = load(tmp_path)
    assert tokenizer.has_thinking
    adapter = get_adapter({"model_type": "llama"}, "x", tokenizer)

    def text(**variables: object) -> str:
        return adapter.render_text(Conversation((USER,), template_args=variables), tokenizer)

    assert text() == text(enable_thinking=False) == f"user: {USER.content}\n"
    assert text(enable_thinking=True).startswith("THINK ")


# ---------------------------------------------------------------------------------------------
# Whatever it is
# ---------------------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Conversation, list[str]]:
    """A conversation, each of whose texts is a word of its own, and these words."""
    numbers, words, ids = count(), [], ["unknown"]

    def word() -> str:
        words.append(f"wo{next(numbers)}rd")
        return words[-1]

    def call() -> ToolCall:
        ids.append(draw(st.sampled_from(["call_1", "call_2", "abcdefgh9", "functions.f:0", ""])))
        forms = ["object", "nested", "null", "cut", "list", "text", "{}", "", "null", "5"]
        match draw(st.sampled_from(forms)):
            case "object":
                arguments = json.dumps({word(): word()})
            case "nested":
                arguments = json.dumps({word(): [word(), {word(): 1}], word(): 1.5})
            case "null":
                arguments = json.dumps({word(): None, word(): word()})
            case "cut":
                arguments = f'{{"a": "{word()}'
            case "list":
                arguments = json.dumps([word()])
            case "text":
                arguments = word()
            case other:
                arguments = other
        return ToolCall(ids[-1], word(), arguments)

    def message() -> Message:
        match draw(st.sampled_from(["system", "user", "assistant", "calls", "tool"])):
            case "calls":
                calls = tuple(call() for _ in range(draw(st.integers(1, 3))))
                content = word() if draw(st.booleans()) else ""
                return Message("assistant", content, tool_calls=calls)
            case "tool":
                return Message("tool", word(), tool_call_id=draw(st.sampled_from([*ids, None])))
            case "assistant":
                thought = draw(st.sampled_from([None, "Hm."]))
                return Message("assistant", word(), reasoning=thought)
            case "system":
                return Message("system", word())
            case _:
                return Message("user", word())

    messages = tuple(message() for _ in range(draw(st.integers(1, 8))))
    tools: tuple[Tool, ...] = ()
    if draw(st.booleans()):
        told = {"type": "string", "description": word()}
        tools = (Tool(word(), word(), {"type": "object", "properties": {word(): told}}),)
    variables = draw(st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]))
    return Conversation(messages, tools, template_args=variables), words


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(ALL_NAMES), made=conversations())
def test_no_text_of_a_conversation_is_lost(name: str, made: tuple[Conversation, list[str]]) -> None:
    conversation, words = made
    adapter, tokenizer = model(name)
    text = adapter.render_text(conversation, tokenizer)
    assert [word for word in words if word not in text] == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(ALL_NAMES),
    texts=st.lists(st.text(), min_size=1, max_size=5),
    arguments=st.one_of(st.text(), st.from_regex(r'\{"\w+": .*')),
    schema=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    [
                        *("type", "properties", "items", "$ref", "anyOf", "allOf", "required"),
                        *("description", "enum", "$defs", "additionalProperties", "a"),
                    ]
                ),
                inner,
                max_size=4,
            ),
        ),
        max_leaves=12,
    ),
)
def test_whatever_is_said_is_rendered_or_refused(
    name: str, texts: list[str], arguments: str, schema: Any
) -> None:
    parameters = schema if isinstance(schema, dict) else {"type": "object", "properties": schema}
    roles = ("user", "assistant", "system", "user", "assistant")
    said = [Message(role, text) for role, text in zip(roles, texts, strict=False)]  # type: ignore[arg-type]
    calls = Message("assistant", texts[-1], tool_calls=(ToolCall("c", "f", arguments),))
    adapter, tokenizer = model(name)
    conversation = Conversation((*said, calls), (Tool("f", texts[0], parameters),))
    with suppress(InvalidRequest):
        assert adapter.render_text(conversation, tokenizer)

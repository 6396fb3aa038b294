"""What a chat template can express, found out by rendering small conversations with it.

Templates differ in what they support and fail in many ways: some raise, some leave a message out
without a word. Trying is what llama.cpp does too; it holds for templates nobody has seen yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jinja2

RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises: its own refusals, and mishaps such as adding None to a string."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class Render(Protocol):
    """Messages, tools and variables to the template's text; it opens no turn unless they say so."""

    def __call__(self, messages: Messages, tools: Tools | None, **variables: Any) -> str: ...


_SYSTEM, _LATER, _USER, _ANSWER, _RESULT = "qsystemq", "qlaterq", "quserq", "qanswerq", "qresultq"
_ID = "abcdefghi"


ToolPlace = Literal["anywhere", "in system", "nowhere"]
ToolForm = Literal["tools", "functions", "text"]
ThinkingSwitch = Literal["enable_thinking", "thinking", "reasoning", "thinking_budget"]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What conversations a template renders in full.

    system: where system messages may be. tools: whether it tells the model of tools, and whether
    only in a system message. tools_as: what it reads them from: its `tools`, in the form of
    OpenAI's API or as their functions, or JSON text of these, a system message's `tools`. calls:
    how many calls a message of the assistant may hold. object_arguments: their arguments are an
    object, not JSON text. results: whether it renders messages of role tool. answered: whether the
    user's next message may come only after an answer to them. short_ids: call ids must have 9
    characters. empty_tools: it wants an empty list where no tools are offered.
    history_wants_tools: it leaves past calls or results out where it gets no list at all.
    turn_end: what it writes between an answer and the next user's message. thinking: its name of
    the variable that switches thinking on and off (a budget does so by 0), if it has one.
    opens_thinking: it begins answers with `<think>` itself, if only where it is told to.
    drops_thinking: it leaves out of past answers what stands before `</think>`.
    """

    system: Literal["anywhere", "first", "nowhere"] = "anywhere"
    tools: ToolPlace = "anywhere"
    tools_as: ToolForm = "tools"
    calls: Literal["many", "one", "none"] = "many"
    object_arguments: bool = True
    results: bool = True
    answered: bool = False
    short_ids: bool = False
    empty_tools: bool = False
    history_wants_tools: bool = False
    turn_end: str = ""
    thinking: ThinkingSwitch = "enable_thinking"
    opens_thinking: bool = False
    drops_thinking: bool = False


def probe(render: Render) -> TemplateTraits:
    """The traits of the template behind `render`."""
    user, answer = _message("user", _USER), _message("assistant", _ANSWER)
    place, tools_as = _tools(render, user)
    if tools_as == "functions":
        render = _given_functions(render)
    empty_tools = not _shows(render, [user], None, _USER) and _shows(render, [user], [], _USER)
    nothing: Tools | None = [] if empty_tools else None
    called, object_arguments = _calls(render, user)
    call = _call("qcalledq", _ID, object_arguments)
    turn = [user, _message("assistant", "", tool_calls=[call]), _result(_ID)]
    long_id = "call_" + _ID * 2
    long_turn = [
        user,
        _message("assistant", "", tool_calls=[_call("qcalledq", long_id, object_arguments)]),
        _result(long_id),
    ]
    past = (_RESULT,) if called == "none" else ("qcalledq", "qvalueq", _RESULT)
    return TemplateTraits(
        system=_system(render, user, answer, nothing),
        tools=place,
        tools_as=tools_as,
        calls=called,
        object_arguments=object_arguments,
        results=_shows(render, turn, [_tool("qofferedq")], _RESULT),
        answered=_answered(render, turn),
        short_ids=called != "none" and not _shows(render, long_turn, [_tool("qofferedq")], _RESULT),
        empty_tools=empty_tools,
        history_wants_tools=not _shows(render, turn, nothing, *past)
        and _shows(render, turn, [], *past),
        turn_end=_turn_end(render, [user, answer, _message("user", _LATER)], nothing),
        thinking=_thinking(render, user, nothing),
        opens_thinking=_opens_thinking(render, user, nothing),
        drops_thinking=_drops_thinking(render, user, nothing),
    )


def _system(
    render: Render, user: Mapping[str, Any], answer: Mapping[str, Any], tools: Tools | None
) -> Literal["anywhere", "first", "nowhere"]:
    first, later = _message("system", _SYSTEM), _message("system", _LATER)
    if not _shows(render, [first, user], tools, _SYSTEM, _USER):
        return "nowhere"
    for messages in ([first, later, user], [first, user, answer, later, user]):
        if not _shows(render, messages, tools, _SYSTEM, _LATER):
            return "first"
    return "anywhere"


def _tools(render: Render, user: Mapping[str, Any]) -> tuple[ToolPlace, ToolForm]:
    tool, system = _tool("qofferedq"), _message("system", "")
    forms: tuple[tuple[ToolForm, Tools], ...] = (
        ("tools", [tool]),
        ("functions", functions_of([tool])),
    )
    for form, tools in forms:
        if _shows(render, [user], tools, _USER, "qofferedq"):
            return "anywhere", form
        if _shows(render, [system, user], tools, _USER, "qofferedq"):
            return "in system", form
    told = {**system, "tools": functions_text([tool])}
    if _shows(render, [told, user], None, _USER, "qofferedq"):
        return "in system", "text"
    return "nowhere", "tools"


def functions_of(tools: Tools) -> list[Mapping[str, Any]]:
    return [tool["function"] for tool in tools]


def functions_text(tools: Tools) -> str:
    """The functions as JSON text."""
    return json.dumps(functions_of(tools), ensure_ascii=False)


def _given_functions(render: Render) -> Render:
    def given(messages: Messages, tools: Tools | None, **variables: Any) -> str:
        return render(messages, tools and functions_of(tools), **variables)

    return given


def _calls(render: Render, user: Mapping[str, Any]) -> tuple[Literal["many", "one", "none"], bool]:
    """How many calls a message may hold, and whether their arguments are objects."""
    tools = [_tool("qofferedq")]
    for as_object in (True, False):
        one = _call("qcalledq", _ID, as_object)
        two = _call("qotherq", "bcdefghij", as_object)
        turn = [user, _message("assistant", "", tool_calls=[one]), _result(_ID)]
        if not _shows(render, turn, tools, "qcalledq", "qvalueq"):
            continue
        turn = [
            user,
            _message("assistant", "", tool_calls=[one, two]),
            _result(_ID),
            _result("bcdefghij"),
        ]
        many = _shows(render, turn, tools, "qcalledq", "qotherq")
        return ("many" if many else "one"), as_object
    return "none", True


def _answered(render: Render, turn: Messages) -> bool:
    """Whether the user can't go on after results, but for an answer in between."""
    tools, later = [_tool("qofferedq")], _message("user", _LATER)
    if _shows(render, [*turn, later], tools, _RESULT, _LATER):
        return False
    return _shows(render, [*turn, _message("assistant", ""), later], tools, _RESULT, _LATER)


def _turn_end(render: Render, messages: Messages, tools: Tools | None) -> str:
    try:
        text = render(messages, tools)
    except RENDER_ERRORS:
        return ""
    _, answered, rest = text.partition(_ANSWER)
    return rest.partition(_LATER)[0] if answered else ""


def _thinking(render: Render, user: Mapping[str, Any], tools: Tools | None) -> ThinkingSwitch:
    def heeds(name: str, off: bool | int = False, on: bool | int = True) -> bool:
        try:
            without, thinking = (
                render([user], tools, add_generation_prompt=True, **{name: switch})
                for switch in (off, on)
            )
        except RENDER_ERRORS:
            return False
        return without != thinking

    names: tuple[ThinkingSwitch, ...] = ("enable_thinking", "thinking", "reasoning")
    for name in names:
        if heeds(name):
            return name
    # As Seed-OSS's, which has no other; -1 is its own default.
    return "thinking_budget" if heeds("thinking_budget", 0, -1) else "enable_thinking"


def _opens_thinking(render: Render, user: Mapping[str, Any], tools: Tools | None) -> bool:
    switches = {"enable_thinking": True, "thinking": True}
    for variables in ({}, switches):
        try:
            text = render([user], tools, add_generation_prompt=True, **variables)
        except RENDER_ERRORS:
            continue
        if text.rstrip().endswith("<think>"):
            return True
    return False


def _drops_thinking(render: Render, user: Mapping[str, Any], tools: Tools | None) -> bool:
    thought = _message("assistant", f"<think>\nqthoughtq\n</think>\n\n{_ANSWER}")
    messages = [user, thought, _message("user", _LATER)]
    shown = _shows(render, messages, tools, _USER, _ANSWER, _LATER)
    return shown and not _shows(render, messages, tools, "qthoughtq")


def _shows(render: Render, messages: Messages, tools: Tools | None, *words: str) -> bool:
    try:
        text = render(messages, tools)
    except RENDER_ERRORS:
        return False
    return all(word in text for word in words)


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(name: str, call_id: str, as_object: bool) -> dict[str, Any]:
    arguments = {"word": "qvalueq"} if as_object else '{"word": "qvalueq"}'
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _result(call_id: str) -> dict[str, Any]:
    return _message("tool", _RESULT, tool_call_id=call_id, name="qcalledq")


def _tool(name: str) -> dict[str, Any]:
    properties = {"word": {"type": "string", "description": "A word"}}
    parameters = {"type": "object", "properties": properties, "required": ["word"]}
    function = {"name": name, "description": "Does something", "parameters": parameters}
    return {"type": "function", "function": function}

"""Probing of a chat template: small conversations are rendered to find out its abilities.

Templates differ in what they support and fail in many ways: some raise, some leave a message out
silently. llama.cpp probes templates, too; this works for templates that nobody has seen yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import jinja2

from mlx_manager.mlx_server.models.adapters.tool_schemas import SchemaTraits, probe_schemas

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
"""Errors that a template raises: its own refusals, and bugs such as adding None to a string."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class RenderTemplate(Protocol):
    """A function that renders messages and tools to the template's text. It opens no turn for the
    assistant unless the variables say so."""

    def __call__(self, messages: Messages, tools: Tools | None, **variables: Any) -> str: ...


_SYSTEM, _LATER, _USER, _ANSWER, _RESULT = "qsystemq", "qlaterq", "quserq", "qanswerq", "qresultq"
_ID, _OTHER_ID = "abcdefghi", "bcdefghij"


SystemPlace = Literal["anywhere", "first", "before last", "nowhere"]
ToolPlace = Literal["anywhere", "in system", "nowhere"]
ToolForm = Literal["tools", "functions", "text"]
CallIds = Literal["any", "short", "numbered", "numbered anew"]
ThinkingSwitch = Literal["enable_thinking", "thinking", "reasoning", "thinking_budget"]
Contents = Literal["text", "parts", "both"]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The kinds of conversations that a template renders in full.

    system: the places of system messages; "before last" is one that is shown with the user's last
    message, and only where that ends the conversation. tools: whether the template lists tools, and
    whether only in a system message. tools_as: the source of the list: "tools" in the form of
    OpenAI's API, their "functions" only, or a system message's `tools`, the functions' JSON "text".
    schemas: the shown parts of the tools' parameter schemas. calls: the calls that a message of the
    assistant may hold. object_arguments: the calls' arguments are an object, not JSON text.
    text_arguments: arguments may also be text that is no JSON. results: messages of role tool are
    rendered. told_apart: results are shown with their call. call_ids: the form of the calls' ids:
    "short" ones have 9 characters, "numbered" ones are `functions.NAME:N`, counted from the
    conversation's beginning or anew in each message. filler: the text of an answer without text.
    empty_tools: an empty list is needed where no tools are offered. history_wants_tools: past calls
    or results are left out where there is no list at all. turn_end: the text between an answer and
    the user's next message. thinking: the variable that switches thinking on and off (a budget does
    so by 0). opens_thinking: the template begins answers with `<think>` itself, always or if told
    to. drops_thinking: the text before `</think>` is left out of past answers. content: the forms
    of contents that it shows: texts, lists of parts (which alone hold pictures), or both.
    """

    system: SystemPlace = "anywhere"
    tools: ToolPlace = "anywhere"
    tools_as: ToolForm = "tools"
    schemas: SchemaTraits = field(default_factory=SchemaTraits)
    calls: Literal["many", "one", "none"] = "many"
    object_arguments: bool = True
    text_arguments: bool = True
    results: bool = True
    told_apart: bool = True
    call_ids: CallIds = "any"
    filler: str = ""
    empty_tools: bool = False
    history_wants_tools: bool = False
    turn_end: str = ""
    thinking: ThinkingSwitch = "enable_thinking"
    opens_thinking: bool = False
    drops_thinking: bool = False
    content: Contents = "text"


def probe(render: RenderTemplate, placeholder: str = "") -> TemplateTraits:
    """Return the traits of the template behind `render`.

    placeholder: the text that stands for a picture, of a model that sees.
    """
    user, answer = _message("user", _USER), _message("assistant", _ANSWER)
    content = _contents(render, placeholder)
    if content == "parts":
        render = _given_parts(render)
    place, tools_as = _tools(render, user)
    if tools_as == "functions":
        render = _given_functions(render)
    empty_tools = not _shows(render, [user], None, _USER) and _shows(render, [user], [], _USER)
    nothing: Tools | None = [] if empty_tools else None
    called, object_arguments = _calls(render, user)
    turn = [user, _called(_call("qcalledq", _ID, object_arguments)), _result(_ID)]
    past = (_RESULT,) if called == "none" else ("qcalledq", "qvalueq", _RESULT)
    return TemplateTraits(
        system=_system(render, user, answer, nothing),
        tools=place,
        tools_as=tools_as,
        schemas=_schemas(render, user, place, tools_as),
        calls=called,
        object_arguments=object_arguments,
        text_arguments=_text_arguments(render, user),
        results=_shows(render, turn, [_tool("qofferedq")], _RESULT),
        told_apart=_told_apart(render, user, object_arguments),
        call_ids="any" if called == "none" else _call_ids(render, user, object_arguments),
        filler=_filler(render, user, nothing),
        empty_tools=empty_tools,
        history_wants_tools=not _shows(render, turn, nothing, *past)
        and _shows(render, turn, [], *past),
        turn_end=_turn_end(render, [user, answer, _message("user", _LATER)], nothing),
        thinking=_thinking(render, user, nothing),
        opens_thinking=_opens_thinking(render, user, nothing),
        drops_thinking=_drops_thinking(render, user, nothing),
        content=content,
    )


def _contents(render: RenderTemplate, placeholder: str) -> Contents:
    """Return the forms of contents that the template shows. Some templates of models that see
    leave out contents that are no lists."""
    pictured = [*text_parts(_USER), {"type": "image"}, *text_parts(_LATER)]

    def takes(content: Any, *words: str) -> bool:
        said = [{"role": "user", "content": content}]
        return _shows(render, said, None, *words) or _shows(render, said, [], *words)

    if not placeholder or not takes(pictured, _USER, placeholder, _LATER):
        return "text"
    return "both" if takes(_USER, _USER) else "parts"


def text_parts(text: str) -> list[dict[str, Any]]:
    """Return a text as a list of parts."""
    return [{"type": "text", "text": text}]


def _given_parts(render: RenderTemplate) -> RenderTemplate:
    def given(messages: Messages, tools: Tools | None, **variables: Any) -> str:
        shown = [{**message, "content": text_parts(message["content"])} for message in messages]
        return render(shown, tools, **variables)

    return given


def _system(
    render: RenderTemplate, user: Mapping[str, Any], answer: Mapping[str, Any], tools: Tools | None
) -> SystemPlace:
    first, later = _message("system", _SYSTEM), _message("system", _LATER)
    more = _message("user", "qmoreq")
    if not _shows(render, [first, user], tools, _SYSTEM, _USER):
        return "nowhere"
    text = _rendered(render, [first, user, answer, more], tools)
    if _ANSWER in text.partition(_SYSTEM)[0] and not _shows(
        render, [first, user, answer], tools, _SYSTEM
    ):
        return "before last"
    for messages in ([first, later, user], [first, user, answer, later, user]):
        if not _shows(render, messages, tools, _SYSTEM, _LATER):
            return "first"
    return "anywhere"


def _tools(render: RenderTemplate, user: Mapping[str, Any]) -> tuple[ToolPlace, ToolForm]:
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
    """Return the tools' functions as JSON text."""
    return json.dumps(functions_of(tools), ensure_ascii=False)


def _given_functions(render: RenderTemplate) -> RenderTemplate:
    def given(messages: Messages, tools: Tools | None, **variables: Any) -> str:
        return render(messages, tools and functions_of(tools), **variables)

    return given


def _schemas(
    render: RenderTemplate, user: Mapping[str, Any], place: ToolPlace, tools_as: ToolForm
) -> SchemaTraits:
    if place == "nowhere" or tools_as == "text":
        return SchemaTraits()

    def told(parameters: Mapping[str, Any]) -> str:
        function = {"name": "f", "description": "d", "parameters": parameters}
        tool = {"type": "function", "function": function}
        system = [_message("system", "")] if place == "in system" else []
        return _rendered(render, [*system, user], [tool])

    return probe_schemas(told)


def _calls(
    render: RenderTemplate, user: Mapping[str, Any]
) -> tuple[Literal["many", "one", "none"], bool]:
    """Return the number of calls that a message may hold, and whether arguments are objects."""
    tools = [_tool("qofferedq")]
    for as_object in (True, False):
        one = _call("qcalledq", "functions.qcalledq:0", as_object)
        short_one = _call("qcalledq", _ID, as_object)
        two = _call("qotherq", _OTHER_ID, as_object)
        turns = ([user, _called(each), _result(each["id"])] for each in (short_one, one))
        if not any(_shows(render, turn, tools, "qcalledq", "qvalueq") for turn in turns):
            continue
        for pair in ((short_one, two), (one, {**two, "id": "functions.qotherq:1"})):
            turn = [user, _called(*pair), *(_result(call["id"]) for call in pair)]
            if _shows(render, turn, tools, "qcalledq", "qotherq"):
                return "many", as_object
        return "one", as_object
    return "none", True


def _text_arguments(render: RenderTemplate, user: Mapping[str, Any]) -> bool:
    call = _call("qcalledq", _ID, True)
    call["function"]["arguments"] = '{"word": "qbrokenq'
    turn = [user, _called(call), _result(_ID)]
    return _shows(render, turn, [_tool("qofferedq")], "qcalledq", "qbrokenq")


def _told_apart(render: RenderTemplate, user: Mapping[str, Any], as_object: bool) -> bool:
    """True if results are shown with the id or the name of their call."""
    calls = [_call(f"q{id}q", id, as_object) for id in (_ID, _OTHER_ID)]

    def told(*ids: str) -> str:
        results = [_message("tool", _RESULT, tool_call_id=id, name=f"q{id}q") for id in ids]
        return _rendered(render, [user, _called(*calls), *results], [_tool("qofferedq")])

    return told(_ID, _OTHER_ID) != told(_OTHER_ID, _ID)


def _call_ids(render: RenderTemplate, user: Mapping[str, Any], as_object: bool) -> CallIds:
    def turn(call_id: str) -> list[Mapping[str, Any]]:
        return [user, _called(_call("qcalledq", call_id, as_object)), _result(call_id)]

    tools, long_id = [_tool("qofferedq")], "call_" + _ID * 2
    text = _rendered(render, turn(long_id), tools)
    if _RESULT not in text and _RESULT in _rendered(render, turn(_ID), tools):
        return "short"
    if "functions.qcalledq:0" in text and long_id in text:
        return "numbered anew"
    return "any" if "qcalledq" in text else "numbered"


def _filler(render: RenderTemplate, user: Mapping[str, Any], tools: Tools | None) -> str:
    """Return the text for an empty answer, which some templates, such as Ministral 3's, refuse."""

    def takes(content: str) -> bool:
        answer, later = _message("assistant", content), _message("user", _LATER)
        return _shows(render, [user, answer, later], tools, _USER, _LATER)

    return " " if not takes("") and takes(" ") else ""


def _turn_end(render: RenderTemplate, messages: Messages, tools: Tools | None) -> str:
    text = _rendered(render, messages, tools)
    _, answered, rest = text.partition(_ANSWER)
    return rest.partition(_LATER)[0] if answered else ""


def _thinking(
    render: RenderTemplate, user: Mapping[str, Any], tools: Tools | None
) -> ThinkingSwitch:
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
    # Seed-OSS's template has only the budget, whose default is -1.
    return "thinking_budget" if heeds("thinking_budget", 0, -1) else "enable_thinking"


def _opens_thinking(render: RenderTemplate, user: Mapping[str, Any], tools: Tools | None) -> bool:
    switches = {"enable_thinking": True, "thinking": True}
    for variables in ({}, switches):
        try:
            text = render([user], tools, add_generation_prompt=True, **variables)
        except RENDER_ERRORS:
            continue
        if text.rstrip().endswith("<think>"):
            return True
    return False


def _drops_thinking(render: RenderTemplate, user: Mapping[str, Any], tools: Tools | None) -> bool:
    thought = _message("assistant", f"<think>\nqthoughtq\n</think>\n\n{_ANSWER}")
    messages = [user, thought, _message("user", _LATER)]
    shown = _shows(render, messages, tools, _USER, _ANSWER, _LATER)
    return shown and not _shows(render, messages, tools, "qthoughtq")


def _shows(render: RenderTemplate, messages: Messages, tools: Tools | None, *words: str) -> bool:
    text = _rendered(render, messages, tools)
    return all(word in text for word in words)


def _rendered(render: RenderTemplate, messages: Messages, tools: Tools | None) -> str:
    """Return the template's text, "" if the template refuses the messages."""
    try:
        return render(messages, tools)
    except RENDER_ERRORS:
        return ""


def _message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _called(*calls: Mapping[str, Any]) -> dict[str, Any]:
    return _message("assistant", "", tool_calls=list(calls))


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

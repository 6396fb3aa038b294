from __future__ import annotations

import itertools
import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from sdk_models import events, strictly

from mlx_manager.mlx_server.core import (
    Conversation,
    Event,
    Finished,
    Message,
    NamedTool,
    Started,
    ToolCall,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.protocols import messages, responses
from mlx_manager.mlx_server.protocols.client_tools import InputReader
from mlx_manager.mlx_server.protocols.responses import ResponseAnswer, ResponseHead, ResponseStream
from mlx_manager.mlx_server.schemas.anthropic import MessagesRequest
from mlx_manager.mlx_server.schemas.responses import ResponsesRequest

CUSTOM: dict[str, Any] = {"type": "custom", "name": "apply", "description": "Applies a patch."}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    CUSTOM,
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "namespace", "name": "fs", "description": "Files", "tools": [CUSTOM]},
]
CALLS: list[tuple[str, Any, dict[str, Any]]] = [
    ("apply", {"input": 'a "b"\n\u00e9\U0001f600'}, {"input": 'a "b"\n\u00e9\U0001f600'}),
    ("fs__apply", {"input": "x"}, {"input": "x", "name": "apply", "namespace": "fs"}),
    (
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 5},
        {
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {},
                "timeout_ms": 5,
                "user": None,
                "working_directory": None,
            }
        },
    ),
    (
        "shell",
        {"commands": ["ls", "pwd"]},
        {"action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}},
    ),
    (
        "apply_patch",
        {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},
        {"operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}},
    ),
    (
        "apply_patch",
        {"type": "delete_file", "path": "a.py"},
        {"operation": {"type": "delete_file", "path": "a.py"}},
    ),
]
KINDS = {
    "apply": "custom_tool_call",
    "fs__apply": "custom_tool_call",
    "local_shell": "local_shell_call",
    "shell": "shell_call",
    "apply_patch": "apply_patch_call",
}


def head(**fields: Any) -> ResponseHead:
    body = ResponsesRequest.model_validate_json(json.dumps({"input": "hi"} | fields))
    return ResponseHead("m", body, id="resp_1", created=5)


def conversation(**fields: Any) -> Conversation:
    asked = head(**fields)
    prompt = responses.request(asked, [], responses.input_items(asked.body, {})).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def happened(name: str, pieces: list[str], reason: Any = "tool_calls") -> list[Event]:
    deltas: list[Event] = [ToolCallDelta(0, piece) for piece in pieces]
    return [Started(3), ToolCallStarted(0, "call_1", name), *deltas, Finished(reason, Usage(3, 4))]


def collected(name: str, pieces: list[str], reason: Any = "tool_calls") -> dict[str, Any]:
    answer = ResponseAnswer(ResponseStream(head(tools=TOOLS)))
    answer.add([(0, happened(name, pieces, reason))])
    body = json.loads("".join(answer.body()))
    strictly(Response, body)
    item: dict[str, Any] = body["output"][0]
    return item


def streamed(name: str, pieces: list[str], reason: Any = "tool_calls") -> list[dict[str, Any]]:
    stream = ResponseStream(head(tools=TOOLS))
    wire = b"".join(stream.write([(0, [event])]) for event in happened(name, pieces, reason))
    return [data for _, data in events((wire + stream.end()).decode())]


@pytest.mark.parametrize(("name", "arguments", "fields"), CALLS)
def test_a_call_is_an_item_of_its_tools_own_shape(
    name: str, arguments: Any, fields: dict[str, Any]
):
    item = collected(name, [json.dumps(arguments)])
    assert item["type"] == KINDS[name]
    assert item["call_id"] == "call_1"
    assert {key: item[key] for key in fields} == fields


@pytest.mark.parametrize(("name", "arguments", "fields"), CALLS)
def test_what_openais_package_accumulates_is_what_is_collected(
    name: str, arguments: Any, fields: dict[str, Any]
):
    text = json.dumps(arguments)
    found = streamed(name, list(text))
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in found:
        parsed = strictly(ResponseStreamEvent, event)
        state.handle_event(cast(Any, parsed))
    whole = state._completed_response
    assert whole is not None
    ours = collected(name, [text])
    given = whole.output[0].to_dict()
    assert {**given, "id": ""} == {**ours, "id": ""}
    added = next(e for e in found if e["type"] == "response.output_item.added")
    done = next(e for e in found if e["type"] == "response.output_item.done")
    assert added["item"]["id"] == done["item"]["id"] == given["id"]


def test_a_custom_tools_text_is_streamed_as_it_is_written():
    found = streamed("apply", ['{"in', 'put": "ab', "c\\", "n\\u00", 'e9d"', "}"])
    deltas = [e["delta"] for e in found if e["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["ab", "c", "\n", "\u00e9d"]
    done = next(e for e in found if e["type"] == "response.custom_tool_call_input.done")
    assert done["input"] == "abc\n\u00e9d"


@given(st.text(), st.lists(st.integers(0, 200)), st.booleans())
def test_the_text_of_a_call_is_read_wherever_it_is_cut(
    text: str, cuts: list[int], ascii_only: bool
):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    places = sorted({0, len(arguments), *(cut for cut in cuts if cut < len(arguments))})
    reader = InputReader()
    pieces = [arguments[a:b] for a, b in itertools.pairwise(places)]
    assert "".join(map(reader.feed, pieces)) + reader.end() == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"other": 1, "input": "x"}', "x"),
        ('"x"', "x"),
        ("*** Begin Patch", "*** Begin Patch"),
        ("", ""),
        ('{"input": "a\\ud83d"}', "a\ufffd"),
        ('{"input": "cut', "cut"),
    ],
)
def test_arguments_of_another_form_lose_nothing(arguments: str, text: str):
    assert collected("apply", [arguments])["input"] == text


@pytest.mark.parametrize("name", ["local_shell", "shell", "apply_patch"])
@pytest.mark.parametrize("arguments", ["", "[]", '{"comm', '{"command": 5}', "nonsense"])
def test_a_call_that_was_cut_off_or_is_malformed_still_has_its_shape(name: str, arguments: str):
    assert collected(name, [arguments], "length")["type"] == KINDS[name]


def test_a_command_as_one_text_is_run_by_a_shell():
    item = collected("local_shell", ['{"command": "ls -l"}'])
    assert item["action"]["command"] == ["bash", "-lc", "ls -l"]


def test_the_model_is_offered_a_function_for_each():
    tools = {tool.name: tool for tool in conversation(tools=TOOLS).tools}
    assert list(tools) == ["weather", *KINDS] or set(tools) == {"weather", *KINDS}
    assert tools["apply"].parameters["required"] == ["input"]
    assert tools["apply"].description == "Applies a patch."
    assert tools["local_shell"].parameters["required"] == ["command"]


def test_history_has_calls_and_results_as_calls_and_results():
    said = conversation(
        input=[
            {"type": "custom_tool_call", "call_id": "1", "name": "apply", "input": "é\n"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "Done!"},
            {
                "type": "local_shell_call",
                "id": "lsh_1",
                "call_id": "2",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
            },
            {"type": "local_shell_call_output", "id": "2", "output": "a.py"},
            {"type": "shell_call", "call_id": "3", "action": {"commands": ["ls"]}},
            {
                "type": "shell_call_output",
                "call_id": "3",
                "output": [
                    {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}},
                    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
                ],
            },
            {
                "type": "apply_patch_call",
                "call_id": "4",
                "status": "completed",
                "operation": {"type": "delete_file", "path": "a"},
            },
            {"type": "apply_patch_call_output", "call_id": "4", "status": "failed"},
        ]
    ).messages

    def call(number: str, name: str, arguments: Any) -> Message:
        text = json.dumps(arguments, ensure_ascii=False)
        return Message("assistant", tool_calls=(ToolCall(number, name, text),))

    assert said == (
        call("1", "apply", {"input": "é\n"}),
        Message("tool", "Done!", tool_call_id="1"),
        call("2", "local_shell", {"command": ["ls"]}),
        Message("tool", "a.py", tool_call_id="2"),
        call("3", "shell", {"commands": ["ls"]}),
        Message("tool", "a\nb\n(exit code 1)\n(timed out)", tool_call_id="3"),
        call("4", "apply_patch", {"type": "delete_file", "path": "a"}),
        Message("tool", "(failed)", tool_call_id="4"),
    )


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "apply"}, "apply"),
        ({"type": "shell"}, "shell"),
        ({"type": "apply_patch"}, "apply_patch"),
    ],
)
def test_a_call_of_each_may_be_demanded(choice: dict[str, Any], name: str):
    assert conversation(tools=TOOLS, tool_choice=choice).tool_choice == NamedTool(name)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    assert [t.name for t in conversation(tools=TOOLS, tool_choice=allowed).tools] == [name]


def test_a_shell_in_a_providers_container_is_left_out():
    away = {"type": "shell", "environment": {"type": "container_auto"}}
    here = {"type": "shell", "environment": {"type": "local"}}
    assert conversation(tools=[away]).tools == ()
    assert [tool.name for tool in conversation(tools=[here]).tools] == ["shell"]
    with pytest.raises(UnsupportedParameter, match="only its provider"):
        conversation(tools=[away], tool_choice="required")


def test_a_grammar_needs_its_definition():
    form = {"type": "grammar", "syntax": "regex"}
    with pytest.raises(InvalidParameter, match=r"tools\[0\]\.format\.definition"):
        conversation(tools=[CUSTOM | {"format": form}])


def test_a_regular_expression_is_a_pattern_of_the_text():
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    (tool,) = conversation(tools=[CUSTOM | {"format": form}]).tools
    assert tool.strict
    assert tool.parameters["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"


# Messages

DATED: list[tuple[dict[str, Any], set[str]]] = [
    ({"type": "bash_20250124", "name": "bash"}, {"command", "restart"}),
    (
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {
            *("command", "path", "view_range", "file_text", "old_str", "new_str"),
            *("insert_line", "insert_text"),
        },
    ),
    (
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {
            *("command", "path", "view_range", "file_text", "old_str", "new_str"),
            "insert_line",
        },
    ),
    (
        {"type": "memory_20250818", "name": "memory"},
        {
            *("command", "path", "view_range", "file_text", "old_str", "new_str"),
            *("insert_line", "insert_text", "old_path", "new_path"),
        },
    ),
    (
        {
            "type": "computer_20251124",
            "name": "computer",
            "display_width_px": 800,
            "display_height_px": 600,
            "enable_zoom": True,
        },
        {
            *("action", "coordinate", "text", "start_coordinate", "scroll_direction"),
            *("scroll_amount", "duration", "region"),
        },
    ),
    (
        {
            "type": "computer_20241022",
            "name": "computer",
            "display_width_px": 8,
            "display_height_px": 6,
        },
        {"action", "coordinate", "text"},
    ),
]


@pytest.mark.parametrize(("tool", "names"), DATED, ids=[tool["type"] for tool, _ in DATED])
def test_anthropics_own_tools_are_functions_with_their_schemas(
    tool: dict[str, Any], names: set[str]
):
    body = MessagesRequest.model_validate(
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [tool],
            "tool_choice": {"type": "tool", "name": tool["name"]},
        }
    )
    prompt = messages.conversation(body)
    assert prompt.tool_choice == NamedTool(tool["name"])
    (offered,) = prompt.tools
    assert offered.name == tool["name"]
    assert set(offered.parameters["properties"]) == names
    assert body.ignored_tools() == []
    assert body.unknown_fields() == []

"""Tools with a shape of their own that the client runs: functions for the model, their own items
for the client.

The schemas are what the providers document: the `openai` package's types of `LocalShellCall`,
`ResponseFunctionShellToolCall`, `ResponseApplyPatchToolCall` and `ResponseCustomToolCall`, and
Anthropic's pages on the bash, text editor, memory and computer use tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic_core import from_json

JsonObject = dict[str, Any]

CallKind = Literal["local_shell", "shell", "apply_patch"]
"""Tools of Responses whose calls are items with fields of their own."""

CALLABLE = "The tool {} can be called now."
"""Tells the model of a tool that is offered, though it was not at the conversation's beginning."""

_STRING: JsonObject = {"type": "string"}
_STRINGS: JsonObject = {"type": "array", "items": _STRING}
_NUMBER: JsonObject = {"type": "integer"}


def _object(properties: JsonObject, *required: str) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _told(kind: JsonObject, description: str) -> JsonObject:
    return {**kind, "description": description}


# ---------------------------------------------------------------------------------------------
# Responses
# ---------------------------------------------------------------------------------------------

DESCRIPTIONS: Mapping[CallKind, str] = {
    "local_shell": "Runs a command on the user's machine, and returns its output.",
    "shell": "Runs shell commands on the user's machine, and returns the output of each.",
    "apply_patch": "Creates, updates or deletes a file. `diff` is in the V4A format: lines that "
    "begin with ' ', '+' or '-', under headers '@@'; a file that is created has '+' lines only.",
}
PARAMETERS: Mapping[CallKind, JsonObject] = {
    "local_shell": _object(
        {
            "command": _told(_STRINGS, "The program and its arguments"),
            "working_directory": _told(_STRING, "Folder to run the command in"),
            "timeout_ms": _told(_NUMBER, "Milliseconds after which the command is ended"),
            "env": _told(
                {"type": "object", "additionalProperties": _STRING}, "Environment variables"
            ),
            "user": _told(_STRING, "User to run the command as"),
        },
        "command",
    ),
    "shell": _object(
        {
            "commands": _told(_STRINGS, "Shell commands, each run by itself"),
            "timeout_ms": _told(_NUMBER, "Milliseconds after which the commands are ended"),
            "max_output_length": _told(_NUMBER, "Most characters of output of each command"),
        },
        "commands",
    ),
    "apply_patch": _object(
        {
            "type": {**_STRING, "enum": ["create_file", "update_file", "delete_file"]},
            "path": _told(_STRING, "Path of the file"),
            "diff": _told(_STRING, "The change; not for delete_file"),
        },
        "type",
        "path",
    ),
}


def custom_parameters(pattern: str | None = None) -> JsonObject:
    """Return the parameters of a tool that takes a text. pattern: what the whole text matches."""
    text = _STRING if pattern is None else {**_STRING, "pattern": f"^(?:{pattern})$"}
    return _object({"input": text}, "input")


def custom_arguments(text: str) -> str:
    """Return the arguments of a call that passes `text`."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _read(arguments: str) -> JsonObject:
    """Return a call's arguments as far as they were written; none if they are no object."""
    try:
        given = from_json(arguments, allow_partial="trailing-strings") if arguments else {}
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def call_fields(kind: CallKind, arguments: str) -> JsonObject:
    """Return the fields in which an item tells of a call.

    A command that the model wrote as one text is run by a shell. What it left out is empty.
    """
    given = _read(arguments)
    match kind:
        case "local_shell":
            command = given.get("command")
            shell = ["bash", "-lc", command] if isinstance(command, str) else _texts(command)
            env = given.get("env")
            variables = env.items() if isinstance(env, dict) else ()
            action = {
                "type": "exec",
                "command": shell,
                "env": {name: value for name, value in variables if isinstance(value, str)},
                "timeout_ms": _count(given.get("timeout_ms")),
                "user": _text(given.get("user")),
                "working_directory": _text(given.get("working_directory")),
            }
            return {"action": action}
        case "shell":
            commands = given.get("commands")
            action = {
                "commands": [commands] if isinstance(commands, str) else _texts(commands),
                "timeout_ms": _count(given.get("timeout_ms")),
                "max_output_length": _count(given.get("max_output_length")),
            }
            return {"action": action, "environment": {"type": "local"}}
        case "apply_patch":
            path, diff = _text(given.get("path")) or "", _text(given.get("diff")) or ""
            if given.get("type") == "delete_file":
                return {"operation": {"type": "delete_file", "path": path}}
            made = "create_file" if given.get("type") == "create_file" else "update_file"
            return {"operation": {"type": made, "path": path, "diff": diff}}


def call_arguments(fields: Mapping[str, Any]) -> str:
    """Return the arguments of a call, from an item's `action` or `operation`."""
    given = {
        name: value
        for name, value in fields.items()
        if value not in (None, {}) and (name, value) != ("type", "exec")
    }
    return json.dumps(given, ensure_ascii=False)


def shell_output(outputs: Sequence[Mapping[str, Any]]) -> str:
    """Return what shell commands brought as text: output, errors, and how each ended."""
    texts: list[str] = []
    for output in outputs:
        texts += [str(output[name]) for name in ("stdout", "stderr") if output.get(name)]
        match output.get("outcome"):
            case {"type": "timeout"}:
                texts.append("(timed out)")
            case {"exit_code": int(code)}:
                texts.append(f"(exit code {code})")
    return "\n".join(texts)


class InputReader:
    """Reads the text of a custom tool's call out of its arguments while they are written.

    The pieces that it returns are, joined, the text as it is at the end.
    """

    _OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    _SPECIAL = re.compile(r'["\\]')
    _ESCAPE = re.compile(
        r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]",
        re.DOTALL,
    )
    _CUT = re.compile(
        r"\\(u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(\\(u([dD]([c-fC-F].?)?)?)?)?)?"
    )
    _HALF = re.compile("[\ud800-\udfff]")

    def __init__(self) -> None:
        self._held = ""
        self._within = False
        self._done = False

    def feed(self, arguments: str) -> str:
        """Return what more of the text there is."""
        if self._done:
            return ""
        self._held += arguments
        if not self._within:
            opened = self._OPENING.match(self._held)
            if opened is None:
                return ""
            self._held, self._within = self._held[opened.end() :], True
        return self._read()

    def end(self) -> str:
        """Return the rest: all of it, where the arguments have another form than was asked for."""
        if self._within or self._done:
            return ""
        self._done = True
        try:
            given = from_json(self._held, allow_partial="trailing-strings")
        except ValueError:
            return self._held
        match given:
            case str(text) | {"input": str(text)}:
                return text
        return self._held

    def _read(self) -> str:
        """Decode what is held of a JSON string, but for an escape that has only begun."""
        text: list[str] = []
        held, at = self._held, 0
        while at < len(held):
            stop = self._SPECIAL.search(held, at)
            text.append(held[at : stop.start() if stop else len(held)])
            if stop is None:
                at = len(held)
                break
            at = stop.start()
            if held[at] == '"':
                self._done = True
                break
            escaped = self._escaped(held, at)
            if escaped is None:
                break
            character, at = escaped
            text.append(character)
        self._held = held[at:]
        return "".join(text)

    def _escaped(self, held: str, at: int) -> tuple[str, int] | None:
        """Return the character that is escaped at `at` and the place after it; None if it is cut.

        Half a character without the other is U+FFFD.
        """
        if self._CUT.fullmatch(held, at):
            return None
        whole = self._ESCAPE.match(held, at)
        if whole is None:
            return held[at], at + 1
        try:
            character: str = json.loads(f'"{whole[0]}"')
        except ValueError:
            character = whole[0][1:]
        return self._HALF.sub("\ufffd", character), whole.end()


# ---------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------

_DATED = re.compile(r"(bash|text_editor|memory|computer)_(\d{8})")

_RANGE = _told({"type": "array", "items": _NUMBER}, "First and last line, -1 for the end")
_EDITOR: JsonObject = {
    "command": {**_STRING, "enum": ["view", "create", "str_replace", "insert"]},
    "path": _told(_STRING, "Path of the file or folder"),
    "view_range": _RANGE,
    "file_text": _told(_STRING, "Of create: the file's text"),
    "old_str": _told(_STRING, "Of str_replace: the text to replace, which must be there once"),
    "new_str": _told(_STRING, "Of str_replace: the text in its place"),
    "insert_line": _told(_NUMBER, "Of insert: the line after which, 0 for the beginning"),
    "insert_text": _told(_STRING, "Of insert: the text to insert"),
}
_MEMORY: JsonObject = {
    **_EDITOR,
    "command": {
        **_STRING,
        "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
    },
    "path": _told(_STRING, "Path below /memories; not for rename"),
    "old_path": _told(_STRING, "Of rename: the path as it is"),
    "new_path": _told(_STRING, "Of rename: the path as it is to be"),
}
_POINT: JsonObject = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}
_ACTIONS = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"),
    *("middle_click", "double_click", "screenshot", "cursor_position"),
)
_LATER_ACTIONS = (
    *("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click"),
)


def dated_tool(kind: str, options: Mapping[str, Any]) -> tuple[str, JsonObject]:
    """Return what a tool of Messages does, and its parameters.

    kind: its type, such as bash_20250124. options: other fields of its definition.
    """
    found = _DATED.fullmatch(kind)
    assert found is not None
    name, date = found.groups()
    match name:
        case "bash":
            return "Runs a command in a bash session that lasts, and returns its output.", _object(
                {
                    "command": _told(_STRING, "The command; required unless `restart` is true"),
                    "restart": _told({"type": "boolean"}, "Start the session anew"),
                }
            )
        case "text_editor":
            return _editor(date, options)
        case "memory":
            return (
                "Reads and writes files below /memories, which last from one conversation to the "
                "next.",
                _object(_MEMORY, "command"),
            )
    return _computer(date, options)


def _editor(date: str, options: Mapping[str, Any]) -> tuple[str, JsonObject]:
    properties = dict(_EDITOR)
    if date < "20250728":
        # The elder ones take the text to insert as `new_str`.
        del properties["insert_text"]
        properties["new_str"] = _told(_STRING, "Of str_replace and insert: the new text")
    if date < "20250429":
        commands = [*_EDITOR["command"]["enum"], "undo_edit"]
        properties["command"] = {**_STRING, "enum": commands}
    most = options.get("max_characters")
    cut = f" A view shows at most {most} characters." if most else ""
    return f"Views, creates and edits text files.{cut}", _object(properties, "command", "path")


def _computer(date: str, options: Mapping[str, Any]) -> tuple[str, JsonObject]:
    actions = [*_ACTIONS]
    properties: JsonObject = {
        "action": _STRING,
        "coordinate": _told(_POINT, "x and y in pixels from the upper left"),
        "text": _told(_STRING, "Text to type, or keys to press or hold, such as ctrl+s"),
    }
    if date >= "20250124":
        actions += _LATER_ACTIONS
        directions = ["up", "down", "left", "right"]
        properties |= {
            "start_coordinate": _told(_POINT, "Of left_click_drag: where the drag begins"),
            "scroll_direction": {**_STRING, "enum": directions},
            "scroll_amount": _told(_NUMBER, "Of scroll: wheel clicks"),
            "duration": _told({"type": "number"}, "Of hold_key and wait: seconds"),
        }
    if date >= "20251124" and options.get("enable_zoom"):
        actions.append("zoom")
        corners = {**_POINT, "minItems": 4, "maxItems": 4}
        properties["region"] = _told(corners, "Of zoom: x0, y0, x1 and y1")
    properties["action"] = {**_STRING, "enum": actions}
    width, height = options.get("display_width_px"), options.get("display_height_px")
    size = f" The screen has {width} x {height} pixels." if width and height else ""
    told = f"Sees the screen and uses the mouse and keyboard of a computer.{size}"
    return told, _object(properties, "action")

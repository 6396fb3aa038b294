"""Tools that a provider would run: left out where they are offered, refused where demanded.

What they did earlier in a conversation is text for a model here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mlx_manager.mlx_server.core import Image, NamedTool, Tool, ToolChoice
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.schemas.hosted import is_tool

_WITHOUT_MEANING = frozenset({"type", "id", "status", "call_id", "tool_use_id", "cache_control"})
"""Fields that tie a record to others, and say nothing to a model."""
_IMAGE = "(an image)"


def unknown_tool(path: str, kind: str | None) -> UnsupportedParameter:
    """Return the error for a tool of a type that nobody here knows."""
    return UnsupportedParameter(
        f"`{path}.type` {kind!r} is not supported by this server, which does not know that type: "
        "functions can be called, and the tools with shapes of their own that docs/api.md lists.",
        param=f"{path}.type",
    )


def demanded(kind: str, param: str = "tool_choice") -> UnsupportedParameter:
    """Return the error for a choice of a tool that nothing here runs."""
    why = (
        "only its provider can run it. Here, tools that the client itself runs can be called"
        if is_tool(kind.partition(",")[0])
        else "that is no type of tool known here"
    )
    return UnsupportedParameter(
        f"`{param}` demands {kind!r}, which is not supported by this server: {why}.", param=param
    )


def check_demand(choice: ToolChoice, tools: Sequence[Tool], left_out: Sequence[str]) -> None:
    """Refuse a choice that demands a tool that nothing here runs.

    left_out: types of the offered tools that nothing here runs.

    Raises:
        UnsupportedParameter: a call is required and all tools are left out, or one of those is
            named.
    """
    if choice == "required" and left_out and not tools:
        raise demanded(", ".join(left_out))
    match choice:
        case NamedTool(name) if name in left_out and all(tool.name != name for tool in tools):
            raise demanded(name)


def permitted(
    tools: Sequence[Tool], allowed: Collection[str] | None, param: str
) -> tuple[Tool, ...]:
    """Return those of `tools` that may be called; all if `allowed` is None.

    Raises:
        InvalidParameter: `allowed`, from the field `param`, has a name that is none of the tools'.
    """
    if allowed is None:
        return tuple(tools)
    unknown = set(allowed) - {tool.name for tool in tools}
    if unknown:
        raise InvalidParameter(
            f"`{param}` allows {min(unknown)!r}, which is none of `tools`.", param=param
        )
    return tuple(tool for tool in tools if tool.name in allowed)


def told(kind: str, fields: Mapping[str, Any]) -> str:
    """Return what such a tool was asked, or gave, as text: its type, and the rest as JSON.

    Images and what only its provider can read are left out.
    """
    said = {
        name: _IMAGE if (kind, name) == ("image_generation_call", "result") else _readable(value)
        for name, value in fields.items()
        if name not in _WITHOUT_MEANING and _is_readable(name, value)
    }
    if said.keys() == {"content"}:
        content = said["content"]
        return f"{kind}: {content if isinstance(content, str) else _written(content)}"
    return f"{kind}: {_written(said)}"


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_readable(name: str, value: object) -> bool:
    return value is not None and not name.startswith("encrypted_")


def _readable(value: Any) -> Any:
    match value:
        case Image():
            return _IMAGE
        case str() if value.startswith("data:"):
            return _IMAGE
        case {"type": "base64", "data": str()}:
            return "(binary data)"
        case dict():
            return {
                name: _readable(inner) for name, inner in value.items() if _is_readable(name, inner)
            }
        case list():
            return [_readable(inner) for inner in value]
    return value

"""Tools, calls and results as text, for templates that have no place for them.

The form is Hermes's: JSON between `<tools>`, `<tool_call>` and `<tool_response>`, which most models
have seen. The calls are in the format `GENERIC`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_manager.mlx_server.core import Parts
from mlx_manager.mlx_server.models.adapters.parts import in_one

_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>

Results are given to you within <tool_response></tool_response> XML tags."""


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of a system message that lists the tools."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _INSTRUCTIONS.format(tools=listed)


def result_parts(content: Parts) -> Parts:
    """Return the result of a call as content of the user."""
    return in_one("<tool_response>\n", content, "\n</tool_response>")

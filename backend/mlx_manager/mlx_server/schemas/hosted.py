"""Tools that a provider runs itself, by the types that OpenAI's and Anthropic's APIs give them.

Nothing here runs them. An offer of one is left out; what one did earlier in a conversation is read
as text.

Source: the tools, items and content blocks in the types of the `openai` and `anthropic` packages.
"""

from __future__ import annotations

import re

_TOOLS = re.compile(
    "(?:advisor|apply_patch|bash|browser_toolset|code_execution|code_interpreter|computer|custom"
    "|file_search|image_generation|local_shell|mcp|memory|programmatic_tool_calling|shell"
    "|text_editor|tool_search|web_fetch|web_search|x_search)(?:[_-].*)?"
)
"""Their names have dates and other suffixes."""
_ITEMS = frozenset(
    {
        *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call"),
        *("computer_call", "computer_call_output", "custom_tool_call", "custom_tool_call_output"),
        *("file_search_call", "image_generation_call", "local_shell_call"),
        *("local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
        *("mcp_list_tools", "program", "program_output", "shell_call", "shell_call_output"),
        *("tool_search_call", "tool_search_output", "web_search_call"),
    }
)
_BLOCKS = re.compile(
    "server_tool_use|mcp_tool_use|mcp_tool_listing|container_upload|compaction|fallback"
    "|[a-z_]+_tool_result"
)


def is_tool(kind: str | None) -> bool:
    """Return True for a type of tool that a provider runs, or that its own models alone call."""
    return kind is not None and _TOOLS.fullmatch(kind) is not None


def searches_tools(kind: str | None) -> bool:
    """Return True for a type of tool that finds those whose loading is deferred."""
    return kind is not None and kind.startswith("tool_search")


def is_item(kind: str) -> bool:
    """Return True for a type of item of Responses that tells of such a tool."""
    return kind in _ITEMS


def is_block(kind: str) -> bool:
    """Return True for a type of content block of Messages that tells of such a tool."""
    return _BLOCKS.fullmatch(kind) is not None

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
"""Types of tools, which may end in dates and other suffixes."""
_CLIENT_RUN = re.compile(r"(?:bash|text_editor|memory|computer)_\d{8}")
_ITEMS = frozenset(
    {
        *("code_interpreter_call", "computer_call", "computer_call_output", "file_search_call"),
        *("image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
        *("mcp_list_tools", "program", "program_output", "tool_search_call"),
        *("tool_search_output", "web_search_call"),
    }
)
_BLOCKS = re.compile(
    "server_tool_use|mcp_tool_use|mcp_tool_listing|container_upload|compaction|fallback"
    "|[a-z_]+_tool_result"
)


def is_tool(kind: str | None) -> bool:
    """Return True for a type of tool that a provider runs, or that its own models alone call."""
    return kind is not None and _TOOLS.fullmatch(kind) is not None


def is_client_run(kind: str | None) -> bool:
    """Return True for a type of tool of Messages whose schema is Anthropic's, and which the client
    runs."""
    return kind is not None and _CLIENT_RUN.fullmatch(kind) is not None


def is_hosted(kind: str | None) -> bool:
    """Return True for a type of tool of Messages that only its provider can run."""
    return is_tool(kind) and not is_client_run(kind)


def searches_tools(kind: str | None) -> bool:
    """Return True for a type of tool that finds those whose loading is deferred."""
    return kind is not None and kind.startswith("tool_search")


def is_item(kind: str) -> bool:
    """Return True for a type of item of Responses that tells of such a tool."""
    return kind in _ITEMS


def is_block(kind: str) -> bool:
    """Return True for a type of content block of Messages that tells of such a tool."""
    return _BLOCKS.fullmatch(kind) is not None

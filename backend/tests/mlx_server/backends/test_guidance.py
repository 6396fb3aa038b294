"""Requests that need a grammar."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_manager.mlx_server.backends.guidance import compiles
from mlx_manager.mlx_server.core import Conversation, GenerationRequest, Message, Tool
from mlx_manager.mlx_server.formats import PLAIN, ToolFormat
from mlx_manager.mlx_server.text.tool_calls.formats import GENERIC, HERMES


@pytest.mark.parametrize(
    ("calls", "strict", "compiled"),
    [(HERMES, False, False), (HERMES, True, True), (GENERIC, False, True), (None, False, False)],
)
def test_a_grammar_for_the_calls_of_a_free_answer_is_compiled_apart(
    calls: ToolFormat | None, strict: bool, compiled: bool
) -> None:
    """On another thread, since it takes up to seconds."""
    conversation = Conversation((Message("user", "x"),), tools=(Tool("look", strict=strict),))
    output = replace(PLAIN, calls=calls)
    assert compiles(GenerationRequest("m", conversation), output) is compiled

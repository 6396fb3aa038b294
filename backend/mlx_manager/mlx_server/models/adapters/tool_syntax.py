"""The format in which a model writes tool calls: as mlx-lm infers it, else by its template."""

from __future__ import annotations

from typing import Any

from mlx_manager.mlx_server.formats import ToolFormat
from mlx_manager.mlx_server.models.adapters.vocabulary import token_id
from mlx_manager.mlx_server.text.tool_calls.formats import DSML, told_format


def syntax_of(tokenizer: Any) -> ToolFormat:
    """Return the format of the tokenizer's model.

    mlx-lm infers nothing for a model with several templates, or with a function in their place.
    """
    template = str(tokenizer.chat_template)
    if tokenizer.has_tool_calling:
        return told_format(template, tokenizer.tool_parser.__module__.rpartition(".")[2])
    return told_format(template + DSML * (token_id(tokenizer, DSML) is not None))

"""Tokens' log probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from mlx_manager.mlx_server.core import TokenLogprob

LEAST = -9999.0
"""Stands for a probability of nothing, as at OpenAI: JSON has no infinity. Also for what is no
number, which compares as less than nothing: hence `max(LEAST, x)`, in that order."""


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat's choice or chunk."""
    content = [
        _entry(token.piece, token.logprob or 0.0)
        | {"top_logprobs": [_entry(piece, logprob) for _, piece, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    text = piece.decode("utf-8", "replace")
    return {"token": text, "logprob": max(LEAST, logprob), "bytes": list(piece)}


class CompletionLogprobs:
    """The `logprobs` of a completion's choice, chunk by chunk.

    `text_offset` counts characters in the text of all tokens. The drawn token is always among
    `top_logprobs`; with `best` 0 there are none.
    """

    def __init__(self, best: int) -> None:
        self._best = best
        self._offset = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def write(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token in tokens:
            texts.append(_name(token.piece))
            values.append(None if token.logprob is None else max(LEAST, token.logprob))
            tops.append(None if token.logprob is None else _top(token, token.logprob))
            offsets.append(self._offset)
            self._offset += len(self._decode(token.piece))
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if self._best else None,
            "text_offset": offsets,
        }


def _top(token: TokenLogprob, logprob: float) -> dict[str, float]:
    top = {_name(piece): max(LEAST, value) for _, piece, value in reversed(token.top)}
    return dict(reversed(top.items())) | {_name(token.piece): max(LEAST, logprob)}


def _name(piece: bytes) -> str:
    """A token's text; its bytes where they are no text, so that no two tokens share a name."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

"""Tokens' log probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_manager.mlx_server.core import TokenLogprob
from mlx_manager.mlx_server.protocols.pieces import sliced

PIECE = 16
"""Number of tokens in a piece: with twenty alternatives each they take a millisecond."""

LEAST = -9999.0
"""Least log probability, in place of minus infinity, which JSON lacks; OpenAI's value. Also in
place of NaN, which is not greater than any number: hence `max(LEAST, x)`, in that order."""


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` of a chat's chunk."""
    return {"content": entries(tokens), "refusal": None}


def chat_logprobs_in_pieces(tokens: Sequence[TokenLogprob]) -> Iterator[str]:
    """Yield the `logprobs` of a chat's choice, in pieces."""
    yield '{"content":'
    yield from sliced(tokens, PIECE, entries)
    yield ',"refusal":null}'


def entries(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return the entries of a chat's `logprobs`, one for each token."""
    return [
        _entry(token.piece, token.logprob or 0.0)
        | {"top_logprobs": [_entry(piece, logprob) for _, piece, logprob in token.top]}
        for token in tokens
    ]


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

    def write(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the `logprobs` of one chunk."""
        return {name: column and column(tokens) for name, column in self._columns().items()}

    def pieces(self, tokens: Sequence[TokenLogprob]) -> Iterator[str]:
        """Yield the `logprobs` of a whole choice, in pieces."""
        before = "{"
        for name, column in self._columns().items():
            yield f'{before}"{name}":'
            yield from sliced(tokens, PIECE, column) if column else ("null",)
            before = ","
        yield "}"

    def _columns(self) -> Mapping[str, Callable[[Sequence[TokenLogprob]], list[Any]] | None]:
        return {
            "tokens": lambda tokens: [_name(token.piece) for token in tokens],
            "token_logprobs": lambda tokens: [_value(token.logprob) for token in tokens],
            "top_logprobs": (lambda tokens: list(map(_top, tokens))) if self._best else None,
            "text_offset": self._offsets,
        }

    def _offsets(self, tokens: Sequence[TokenLogprob]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decode(token.piece))
        return offsets


def _value(logprob: float | None) -> float | None:
    return None if logprob is None else max(LEAST, logprob)


def _top(token: TokenLogprob) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top = {_name(piece): max(LEAST, value) for _, piece, value in reversed(token.top)}
    return dict(reversed(top.items())) | {_name(token.piece): max(LEAST, token.logprob)}


def _name(piece: bytes) -> str:
    """Return a token's text, or its bytes if they are no text: no two tokens share a name."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

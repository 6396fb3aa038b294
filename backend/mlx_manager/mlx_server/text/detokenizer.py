"""Detokenizers: token ids to text, one at a time, exactly as decoding them all at once would.

mlx-lm's own streaming detokenizers drop a leading space (" world" after "Hello" would become
"world") and hold others back; `tokenizers.decoders.DecodeStream` raises on byte-fallback
tokenizers and takes quadratic time on bytes that are no UTF-8. Of mlx-lm only the
recognition of the tokenizer's kind is used.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_manager.mlx_server.formats import OutputFormat


class Detokenizer(Protocol):
    """The text of one sequence, token by token."""

    def add(self, token_id: int) -> str:
        """Return the text that this token completes; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Return the text that is left: U+FFFD for a character that never became complete."""
        ...


# Most tokens that the beginning of an answer's turn may have.
_BEGINNING = 64


class TokenTexts:
    """The vocabulary of a loaded tokenizer as bytes; makes a `Detokenizer` for each sequence."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._strip_first_space = False
        self._pieces: _Pieces | None = None
        match tokenizer.detokenizer:
            case BPEStreamingDetokenizer():
                self._pieces = _Pieces(tokenizer, _byte_level)
            case SPMStreamingDetokenizer(trim_space=trim):
                self._pieces = _Pieces(tokenizer, _byte_fallback)
                self._strip_first_space = trim

    def stream(self, output: OutputFormat) -> Detokenizer:
        """Return a detokenizer that shows the special tokens of `output.keep` and no others."""
        hidden = self._special - output.keep
        if self._pieces is None:
            return _WindowDetokenizer(self._decode, hidden)
        strip = self._strip_first_space and not output.continues
        return _ByteDetokenizer(self._pieces, hidden, strip)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one token, special ones included."""
        if self._pieces is None:
            return self._decode([token_id]).encode()
        return self._pieces[token_id]

    def last_turn(self, ids: Sequence[int]) -> int:
        """Return how many tokens of a prompt come before its last turn but the answer's, which is
        before the special token that begins both turns; 0 if that can't be told.

        A chat template ends with the beginning of the answer's turn, whose special token, or the
        last of them, is that of every turn.
        """
        near = range(len(ids) - 1, max(len(ids) - 1 - _BEGINNING, -1), -1)
        last = next((i for i in near if ids[i] in self._special), 0)
        return next((i for i in range(last - 1, -1, -1) if ids[i] == ids[last]), 0)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


# ---------------------------------------------------------------------------------------------
# Vocabularies whose tokens are bytes
# ---------------------------------------------------------------------------------------------


class _Pieces(dict[int, bytes]):
    """Token id to bytes, filled as tokens turn up. Ids outside of the vocabulary have none.

    texts: the texts of tokens that are whole characters.
    """

    def __init__(self, tokenizer: TokenizerWrapper, to_bytes: Callable[[str], bytes]) -> None:
        super().__init__()
        self.texts = _Texts(self)
        self._tokenizer = tokenizer
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token: str | None = None
        if token_id < len(self._tokenizer):
            token = self._tokenizer.convert_ids_to_tokens(token_id)
        piece = self[token_id] = b"" if token is None else self._to_bytes(token)
        return piece


class _Texts(dict[int, str | None]):
    """Token id to text, filled as tokens turn up; None for those that are no whole characters."""

    def __init__(self, pieces: _Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = None
        with suppress(UnicodeDecodeError):
            text = self._pieces[token_id].decode()
        self[token_id] = text
        return text


_BYTE_OF_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token in GPT-2's alphabet; an added token with any character outside of
    it stands for itself."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: U+2581 is a space, and `<0x0A>` a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


class _ByteDetokenizer:
    def __init__(self, pieces: _Pieces, hidden: frozenset[int], strip_first_space: bool) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._strip = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Whether bytes of an incomplete character have been seen.
        self._within = False

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        text = None if self._within else self._pieces.texts[token_id]
        if text is None:
            text = self._decoder.decode(self._pieces[token_id])
            self._within = self._decoder.getstate()[0] != b""
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


# ---------------------------------------------------------------------------------------------
# Any other tokenizer
# ---------------------------------------------------------------------------------------------

_LONGEST_CHARACTER = 8
"""Tokens after which text that ends in U+FFFD is no longer an incomplete character."""


class _WindowDetokenizer:
    """Decodes the last few tokens twice, without and with the new one; the difference is its text.

    Two tokens of context are enough for a decoder that joins words with spaces.
    """

    def __init__(self, decode: Callable[[list[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._context: list[int] = []
        self._new: list[int] = []

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._new.append(token_id)
        text = self._difference()
        if text.endswith("\ufffd") and len(self._new) < _LONGEST_CHARACTER:
            return ""
        self._context, self._new = (self._context + self._new)[-_LONGEST_CHARACTER:], []
        return text

    def finish(self) -> str:
        text, self._new = self._difference(), []
        return text

    def _difference(self) -> str:
        if not self._new:
            return ""
        known = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._new)[len(known) :]

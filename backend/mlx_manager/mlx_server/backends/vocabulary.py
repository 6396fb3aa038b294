"""Vocabulary of a model, for requests that name tokens and clients that ask for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from mlx_manager.mlx_server.core import TokenizerInfo
from mlx_manager.mlx_server.errors import InvalidRequest, OutOfRange


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids of a model and its tokenizer. size: all ids are below it."""

    tokenizer: Any
    size: int

    def check(self, ids: Collection[int], param: str) -> None:
        """Check ids: one that the model lacks would be read or written out of an array's bounds.

        Raises:
            OutOfRange: there is no such token.
        """
        if min(ids, default=0) < 0 or max(ids, default=0) >= self.size:
            raise OutOfRange(
                f"`{param}`: token ids must be between 0 and {self.size - 1}, as this model's own "
                "tokenizer gives them.",
                param=param,
            )

    def check_embedded(self, ids: Iterable[int], rows: int, param: str) -> None:
        """Check ids of a text: a tokenizer may know tokens that the model, of `rows` tokens, lacks.

        Raises:
            InvalidRequest: there is one among the text's.
        """
        highest = max(ids, default=0)
        if highest >= rows:
            token = self.tokenizer.decode([highest], skip_special_tokens=False)
            raise InvalidRequest(
                f"`{param}` has the token {token!r} ({highest}), which this model's tokenizer "
                f"knows and the model does not: it has {rows} tokens. Leave that text out.",
                param=param,
            )

    def text(self, ids: Iterable[int], param: str) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            OutOfRange: there is no such token.
        """
        given = list(ids)
        self.check(given, param)
        text: str = self.tokenizer.decode(given, skip_special_tokens=False)
        return text

    def info(self, context_length: int, chat_template: str | None = None) -> TokenizerInfo:
        """Return the description of the tokenizer that clients need."""
        return TokenizerInfo(
            bos_token=self.tokenizer.bos_token,
            eos_token=self.tokenizer.eos_token,
            pad_token=self.tokenizer.pad_token,
            unk_token=self.tokenizer.unk_token,
            vocab_size=self.size,
            context_length=context_length,
            chat_template=chat_template,
        )

"""Tokenisation of texts a few at a time, and of a long text no further than its use needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mlx_manager.mlx_server.errors import ContextLengthExceeded

Sized = TypeVar("Sized", bound=Sequence[object])
Encode = Callable[[Sequence[str]], list[list[int]]]

AT_ONCE = 64
"""Texts of a slice: no other thread of Python runs while a tokenizer's result is freed."""
SLICE = 2**18
"""Characters or token ids of a slice, unless it is a single text."""
HEAD = 4096
"""Fewest characters of a text that are tokenised first."""
PER_TOKEN = 8
"""Characters that are tokenised first for each of the tokens that are enough; prose has 3 to 5 a
token."""
GROWTH = 8
"""Factor on the characters each time they give too few tokens, as blanks do."""
BORDER = 128
"""Tokens before a cut that might be others without it: WordPiece knows words of 100 characters."""
COUNTED = 4
"""Most tokens of a text that are told to a client, in contexts of the model. A client learns by how
much a text is too long, but of megabytes only that they are too long."""
LEAST_COUNTED = 2**18
"""Tokens of a text that are told to a client even where the model's context is short."""


def most_counted(context: int) -> int:
    """Return the most tokens of a text that are told to a client."""
    return max(COUNTED * context, LEAST_COUNTED)


def check_counted(count: int, context: int, param: str) -> None:
    """Check that so many tokens may be told to a client.

    param: the field with the text or the tokens.

    Raises:
        ContextLengthExceeded: they are more than `most_counted`.
    """
    if count > (most := most_counted(context)):
        raise ContextLengthExceeded(
            f"`{param}` has more than {most} tokens, and that many are read at once here. This "
            f"model's context is {context} tokens.",
            param=param,
        )


@dataclass(frozen=True, slots=True)
class TokenisedText:
    """Tokens of a text: all of them, or its first ones, which are more than enough.

    unread: about how many more tokens the text has; 0 if `ids` are all of them.
    """

    ids: list[int]
    unread: int = 0

    @property
    def total(self) -> int:
        """Return about how many tokens the whole text has."""
        return len(self.ids) + self.unread


def sliced(inputs: Sequence[Sized], enough: int) -> Iterator[tuple[int, Sequence[Sized]]]:
    """Yield the inputs, which are texts or token ids, in parts of one call of the tokenizer each,
    with the index of each part's first input."""
    first = size = 0
    for index, given in enumerate(inputs):
        length = min(len(given), head(enough))
        if index > first and (index - first == AT_ONCE or size + length > SLICE):
            yield first, inputs[first:index]
            first, size = index, 0
        size += length
    if inputs:
        yield first, inputs[first:]


def tokenised(encode: Encode, texts: Sequence[str], enough: int) -> list[TokenisedText]:
    """Return all tokens of each text, or more than `enough` of its first. The rest of a text does
    not change its first tokens, except for a choice between two ways to say the same, which a
    Unigram leaves to the end.

    No count of characters tells that a text is too long: WordPiece makes a word of any length one
    token, and of blanks none.
    """
    begun = encode([text[: head(enough)] for text in texts]) if texts else []
    return [continued(encode, text, ids, enough) for text, ids in zip(texts, begun, strict=True)]


def continued(encode: Encode, text: str, ids: list[int], enough: int) -> TokenisedText:
    size = head(enough)
    while size < len(text) and len(ids) <= enough + BORDER:
        size *= GROWTH
        [ids] = encode([text[:size]])
    if size >= len(text):
        return TokenisedText(ids)
    kept = ids[: len(ids) - BORDER]
    # Estimated by the tokens a character in the part that was read.
    return TokenisedText(kept, max(1, len(ids) * len(text) // size - len(kept)))


def head(enough: int) -> int:
    return max(HEAD, PER_TOKEN * enough)

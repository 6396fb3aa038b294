"""Texts of callers that look like tokens of pictures: they stay text.

A template writes tokens such as `<image>` as text, where a caller's text may have the same
characters. So in callers' texts a word is put inside them before the template is rendered. The
word is in no text, and where it stands the tokeniser's input is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import regex

from mlx_manager.mlx_server.models.adapters.vocabulary import token_id


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a template. cut: a word that is no part of the text; "" if there is none."""

    marked: str
    cut: str = ""

    @property
    def text(self) -> str:
        """Return the text as the model gets to see it."""
        return self.marked.replace(self.cut, "") if self.cut else self.marked

    def changed(self, change: Callable[[str], str]) -> Rendered:
        """Return the text with a change made."""
        return Rendered(change(self.marked), self.cut)


class Literals:
    """The tokens of pictures that one tokenizer has."""

    def __init__(self, words: Iterable[str], tokenizer: Any = None) -> None:
        known = [
            word for word in words if tokenizer is None or token_id(tokenizer, word) is not None
        ]
        longest_first = sorted(known, key=len, reverse=True)
        self._known = bool(known)
        self._pattern = regex.compile("|".join(map(regex.escape, longest_first)))

    def cut(self, *inputs: Any) -> tuple[str, tuple[Any, ...]]:
        """Return a word and the inputs of a template with the word inside every token that their
        texts spell. The word is "", and the inputs are the same, where they spell none."""
        if not self._known or not any(map(self._pattern.search, texts_of(inputs))):
            return "", inputs
        word = unused("cut", inputs)

        def split(text: str) -> str:
            cut: str = self._pattern.sub(lambda found: f"{found[0][0]}{word}{found[0][1:]}", text)
            return cut

        return word, tuple(with_texts(value, split) for value in inputs)


def unused(name: str, inputs: Any) -> str:
    """Return a word that no text of the inputs has, of letters and digits, which no template
    escapes."""
    texts = list(texts_of(inputs))
    words = (f"q{name}{number}q" for number in count())
    return next(word for word in words if not any(word in text for text in texts))


def texts_of(value: Any) -> Iterator[str]:
    """Yield all texts in nested lists and mappings, names included."""
    match value:
        case str():
            yield value
        case Mapping():
            for name, part in value.items():
                yield from texts_of(name)
                yield from texts_of(part)
        case list() | tuple():
            for part in value:
                yield from texts_of(part)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return nested lists and mappings with each text changed."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {with_texts(k, change): with_texts(v, change) for k, v in value.items()}
        case list() | tuple():
            return [with_texts(part, change) for part in value]
    return value

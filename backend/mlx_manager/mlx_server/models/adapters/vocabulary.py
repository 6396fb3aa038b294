"""What a tokenizer's vocabulary holds."""

from __future__ import annotations

from typing import Any


def token_id(tokenizer: Any, name: str) -> int | None:
    """The id of a token of this very name, None if the vocabulary has none."""
    found = tokenizer.convert_tokens_to_ids(name)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return found if isinstance(found, int) and found != unknown else None


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of `text`, none before or after it. Whether there are too many for the model is
    for the caller to say: `transformers` keeps quiet about it."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids

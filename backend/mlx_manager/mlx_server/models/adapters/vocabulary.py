"""Look-ups in a tokenizer's vocabulary."""

from __future__ import annotations

from typing import Any


def token_id(tokenizer: Any, name: str) -> int | None:
    """Return the id of the token of exactly this name; None if the vocabulary has none."""
    found = tokenizer.convert_tokens_to_ids(name)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return found if isinstance(found, int) and found != unknown else None


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of `text`, with none added before or after. The caller must check whether
    they are too many for the model: `transformers` is told not to warn."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids

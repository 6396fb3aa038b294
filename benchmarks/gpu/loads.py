"""Loads by name: "32 x 4096" is 32 rows of 4 096 tokens, "8192 + 31 x 64" one of 8 192 beside 31
of 64."""

from __future__ import annotations

LOADS = [
    # First, while no pages are kept: its memory is looked at.
    "8192 + 31 x 64",
    "1 x 128",
    "8 x 128",
    "32 x 128",
    "64 x 128",
    "128 x 128",
    "32 x 4096",
]
"""What steps are raced and timed on."""


def lengths_of(load: str) -> list[int]:
    """Each row's tokens."""
    lengths: list[int] = []
    for part in load.split("+"):
        rows, _, tokens = part.rpartition("x")
        lengths += [int(tokens)] * int(rows or 1)
    return lengths

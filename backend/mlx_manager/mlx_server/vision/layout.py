"""Form of a picture in a prompt: by its size alone, before any pixel is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """One picture as a prompt has it.

    text: stands where the template has the placeholder; it has the row token once for each run.
    runs: rows of features in each run. grid: rows of features by height and width, for M-RoPE;
    None: their positions are their places.
    """

    text: str
    runs: tuple[int, ...]
    grid: tuple[int, int] | None = None

"""Sampling parameters of a row, as numbers."""

from __future__ import annotations

from enum import IntEnum


class Parameter(IntEnum):
    """Columns of an array that has a row of float32 numbers for each row that draws.

    TEMPERATURE is above 0. GREEDY is 1 for rows that want the best token. LOG_MIN_P is the
    logarithm of min_p. TOP_K is 0 for all tokens.
    """

    TEMPERATURE = 0
    GREEDY = 1
    LOG_MIN_P = 2
    TOP_K = 3
    TOP_P = 4

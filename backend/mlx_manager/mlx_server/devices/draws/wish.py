"""Sampling parameters of a row, as numbers."""

from __future__ import annotations

from enum import IntEnum


class Wish(IntEnum):
    """Columns of an array that has a row of float32 numbers for each row that draws.

    HEAT is the temperature, above 0. GREEDY is 1 for rows that want the best token. FLOOR is the
    logarithm of min_p, KEEP how many of the best tokens top_k leaves (0: all), MASS top_p.
    """

    HEAT = 0
    GREEDY = 1
    FLOOR = 2
    KEEP = 3
    MASS = 4

"""Random numbers for sampling, from a row's seed and the token's position in the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_STEP = 0x9E3779B97F4A7C15


def chances(seeds: NDArray[np.uint64], drawn: Sequence[int]) -> NDArray[np.float32]:
    """Return (rows,) numbers in [0, 1) that decide each row's next token.

    drawn: tokens that each row has drawn before. The numbers have 23 bits, so that their product
    with a float32 sum stays below that sum.
    """
    steps = (np.array(drawn, np.uint64) + np.uint64(1)) * np.uint64(_STEP)
    return (_mix(seeds + steps) >> np.uint64(41)).astype(np.float32) / np.float32(2**23)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_of(chance: float) -> int:
    """Return a seed that gives `chance`, of 23 bits, to a row's first token: `chances` inverted."""
    x = int(chance * 2**23) << 41
    x = _unshifted(x, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    x = _unshifted(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return (_unshifted(x, 30) - _STEP) % 2**64


def _unshifted(x: int, by: int) -> int:
    """Return the value of `x` before `x ^= x >> by`."""
    return x ^ x >> by ^ x >> 2 * by


def halves(seeds: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return (rows, 2) 32-bit halves of the seeds, the lower half first."""
    lower, upper = seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)
    return np.stack([lower, upper], axis=1).astype(np.uint32)

"""Comparison of logits with a model's own, within the model's precision.

Half precision rounds differently in matrix products of different shapes. If a router scores two
experts nearly equal, rounding decides which of them a row goes through. This is no error, though it
changes the logits of a random model by a third (as measured on GPT-OSS). So a few such rows are
allowed, and the distance between two runs of the model itself is the yardstick. The same yardstick
applies where a recurrent state carries one token's rounding error on to all later tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

# Largest allowed distance of rows that went through other experts. Logits of another text are 1.4
# away.
MOST = 0.5
# Allowed distance from a model, as a multiple of the distance between two runs of that model.
MARGIN = 3


def distance(mine: mx.array, theirs: mx.array) -> float:
    """Return the distance relative to `theirs`; infinite if it is NaN. Both are (numbers,)."""
    wide = theirs.astype(mx.float32)
    ratio = mx.linalg.norm(mine.astype(mx.float32) - wide) / mx.linalg.norm(wide)
    off = float(np.array(ratio))
    return float("inf") if np.isnan(off) else off


def may_stray(model: nn.Module, logits: mx.array) -> bool:
    """Return whether rounding may send a row of `model` through other experts.

    logits: any logits of the model; only their dtype is read.
    """
    experts = SwitchLinear | QuantizedSwitchLinear
    return logits.dtype != mx.float32 and any(isinstance(each, experts) for each in model.modules())


def carries_on(model: nn.Module, logits: mx.array) -> bool:
    """Return whether rounding errors accumulate from token to token, as in recurrent states.

    logits: any logits of `model`; only their dtype is read.
    """
    kept = make_prompt_cache(model)
    return logits.dtype != mx.float32 and any(isinstance(each, ArraysCache) for each in kept)


def difference(distances: Sequence[float], allowed: float, *, strays: bool) -> str | None:
    """Return the error for logits at these distances from a model's own; None if they are right.

    strays: see `may_stray`.
    """
    worst = max(distances)
    if worst <= allowed:
        return None
    if strays and worst <= max(allowed, MOST) and median(distances) <= allowed:
        return None
    return f"by {worst:.2g} (relative; allowed {allowed:.2g})"

"""Whether logits are those of a model, as far as its precision can tell.

Half precision rounds differently in products of different shapes. Where layers have experts, a row
whose router finds two nearly equal goes through the one or the other by that: no mistake, though it
changes the logits of a random model by a third (NOTES 113). So such rows may be few, and how far a
model is from itself is the yardstick. So it is where a state carries what was rounded for one token
on to all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

# Of rows that went through other experts: logits of another text are 1.4 away.
MOST = 0.5
# How much farther from a model than it is from itself is still like it.
MARGIN = 3


def distance(mine: mx.array, theirs: mx.array) -> float:
    """Relative to `theirs`; infinite if there is no number. Both are (numbers,)."""
    wide = theirs.astype(mx.float32)
    ratio = mx.linalg.norm(mine.astype(mx.float32) - wide) / mx.linalg.norm(wide)
    off = float(np.array(ratio))
    return float("inf") if np.isnan(off) else off


def may_stray(model: nn.Module, logits: mx.array) -> bool:
    """Whether rounding may send a row of `model` through other experts. logits: some of its."""
    experts = SwitchLinear | QuantizedSwitchLinear
    return logits.dtype != mx.float32 and any(isinstance(each, experts) for each in model.modules())


def carries_on(model: nn.Module, logits: mx.array) -> bool:
    """Whether rounding adds up from token to token. logits: some of `model`'s."""
    kept = make_prompt_cache(model)
    return logits.dtype != mx.float32 and any(isinstance(each, ArraysCache) for each in kept)


def difference(distances: Sequence[float], allowed: float, *, strays: bool) -> str | None:
    """How logits so far from a model's own are wrong, if they are. strays: see `may_stray`."""
    worst = max(distances)
    if worst <= allowed:
        return None
    if strays and worst <= max(allowed, MOST) and median(distances) <= allowed:
        return None
    return f"by {worst:.2g} (relative; allowed {allowed:.2g})"

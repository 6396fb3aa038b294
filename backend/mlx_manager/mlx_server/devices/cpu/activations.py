"""SiLU on CPUs on which MLX's exponentials are slow (see `powers`), in mlx-lm's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.cpu.powers import gated_by, pays, silu_of
from mlx_manager.mlx_server.devices.namespaces import namespaces_of

Activation = Callable[..., mx.array]


class ByPowers:
    """Activation that calls `ours` where it is faster, and `original` otherwise."""

    def __init__(self, original: Activation, ours: Activation) -> None:
        self.original = original
        self._ours = ours

    def __call__(self, *arrays: mx.array) -> mx.array:
        by_powers = all(pays(x, x.size) for x in arrays)
        return (self._ours if by_powers else self.original)(*arrays)


OURS: dict[str, Activation] = {
    "swiglu": gated_by,
    "precise_swiglu": lambda like, gate, up: gated_by(gate, up),
}
"""Replacements of functions of `mlx_lm.models.activations`. The second is "precise" because it
computes in float32, as the replacements always do."""


def silu_by_powers(model: nn.Module) -> None:
    """Let `model`'s modules compute SiLU by powers of two where that is faster.

    This replaces, as `attention.paged.route` does, the names that modules of `mlx_lm.models` have
    imported, and `mlx.nn.silu`, which these modules call by that name. All models are affected; at
    each call `pays` decides.
    """
    spaces: list[tuple[dict[str, Any], str, Activation]] = [(vars(nn), "silu", silu_of)]
    for names in namespaces_of(model):
        spaces += [(names, name, ours) for name, ours in OURS.items()]
    for space, name, ours in spaces:
        original = space.get(name)
        if original is not None and not isinstance(original, ByPowers):
            space[name] = ByPowers(original, ours)

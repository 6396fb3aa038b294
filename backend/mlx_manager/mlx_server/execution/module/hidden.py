"""Logits of the tokens that are wanted, and of no others.

mlx-lm's models are a body that gives hidden states and a head that gives logits, with no seam
between them, and a vocabulary of 128 000 costs more than a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.execution.module.wrapped import wrapped


def as_it_is(hidden: mx.array) -> mx.array:
    return hidden


class HiddenSelection:
    """Selection of the tokens whose logits are wanted, before the output projection.

    The model's body is replaced by one that selects hidden states for the head: see `wrapped`.
    Models without a recognisable body compute all logits, and the selection is made afterwards.

    Attributes:
        found: whether the body is recognisable.
        kept: the body's hidden states, those behind its last norm, of each pass since the list was
            last cleared, (tokens, width); None: they are not kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._select: Callable[[mx.array], mx.array] | None = None
        self.kept: list[mx.array] | None = None
        place = _place_of_body(model)
        self.found = place is not None
        if place is not None:
            parent, name = place

            def select(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                hidden = body(*args, **kwargs)
                if self.kept is not None:
                    self.kept.append(hidden.reshape(-1, hidden.shape[-1]))
                return self.selected(hidden)

            parent[name] = wrapped(parent[name], select)

    def logits(
        self,
        model: nn.Module,
        caches: Sequence[Any],
        tokens: mx.array,
        select: Callable[[mx.array], mx.array] = as_it_is,
    ) -> mx.array:
        """Return logits of `model`, (rows, vocabulary), of the tokens that `select` picks out of
        (batch, tokens, …)."""
        self._select = select
        # If the body is none of the model's own, nothing has been selected yet.
        logits = self.selected(model(tokens, cache=caches))
        return logits[:, -1] if logits.shape[1] == 1 else logits.reshape(-1, logits.shape[-1])

    def take(self) -> list[mx.array]:
        """Return the hidden states that have been kept, and keep these no longer."""
        if self.kept is None:
            return []
        taken, self.kept = self.kept, []
        return taken

    def selected(self, hidden: mx.array) -> mx.array:
        """Return what the pass under way selects of `hidden`, all of it after the first time."""
        select, self._select = self._select, None
        return hidden if select is None else select(hidden)


def _place_of_body(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the module that holds the body, and the body's name in it: every family calls it
    `model`, `transformer` or `backbone`. None if there is no module of such a name."""
    while "language_model" in model.children():
        model = model["language_model"]
    for name in ("model", "transformer", "backbone"):
        if name in model.children():
            return model, name
    return None


def body_of(model: nn.Module) -> nn.Module | None:
    """Return the part of `model` that gives hidden states, if it is recognisable."""
    place = _place_of_body(model)
    return None if place is None else place[0][place[1]]

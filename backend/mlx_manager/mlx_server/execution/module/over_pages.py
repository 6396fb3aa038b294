"""Common part of both ways of running mlx-lm's module over pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore
from mlx_manager.mlx_server.execution import caches
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess, Pass, route
from mlx_manager.mlx_server.execution.base import PlainForward
from mlx_manager.mlx_server.execution.compiled import Compile
from mlx_manager.mlx_server.execution.forward import Decode
from mlx_manager.mlx_server.execution.images import VisionTraits
from mlx_manager.mlx_server.execution.module.hidden import HiddenSelection
from mlx_manager.mlx_server.execution.module.shown import show
from mlx_manager.mlx_server.execution.module.steps import ModuleSteps, serves

GATHERING = (KeyAccess.GATHERED, KeyAccess.GROUPED)


class OverPages(PlainForward):
    """mlx-lm's module with pages in place of the caches of keys and values.

    kernels: those that write to the pages on a GPU, and read them where the module attends over
    pages. compile: compiles steps of running rows alone. vision: of a model that sees.

    Raises:
        NotApplicable: a cache is of a kind that cannot be batched, or the module of a model that
            sees has no place for pictures.
    """

    def __init__(
        self,
        model: nn.Module,
        page_size: int,
        reading: KeyAccess,
        kernels: KernelSet | None = None,
        compile: Compile = mx.compile,
        *,
        vision: VisionTraits | None = None,
    ) -> None:
        self._model = model
        self._page_size = page_size
        self._compile = compile
        self._pass = Pass()
        self._selection = HiddenSelection(model)
        self.looks_ahead = kernels is not None
        if kernels is not None:
            self.order_of_launches = kernels.order
        self.attends_whole = reading in GATHERING

        def store(shape: LayerShape) -> LayerStore:
            return LayerStore(shape, page_size, kernels, gathered=self.attends_whole)

        shapes = caches.shapes_of(model)
        self._shared = caches.paged(make_prompt_cache(model), shapes, store, self._pass, reading)
        self.layers = caches.layers_of(self._shared)
        self.stores = [layer.store for layer in self.layers]
        self.rows: ModuleSteps | None = None
        route(model)
        if vision is not None:
            show(model, vision, self._pass)

    def _steps(self, of: Sequence[Any], size: Callable[[int], int]) -> ModuleSteps | None:
        """Return the steps of rows alone over the caches `of`, if kernels read all pages; None
        otherwise. size: returns the number that so many rows are padded to."""
        if not (self.looks_ahead and serves(self.layers)):
            return None
        call = partial(self._selection.logits, self._model, of)
        states = caches.unpaged(of)
        return ModuleSteps(
            call,
            self.layers,
            states,
            self._pass,
            self._page_size,
            self._compile,
            size,
            self._selection.take,
        )

    def _run_rows(
        self, rows: ModuleSteps, decode: Decode, kept: Sequence[ArraysCache] = ()
    ) -> mx.array:
        """Return the logits of rows alone; see `ModuleSteps.run`."""
        logits = rows.run(decode, kept)
        if self._selection.kept is not None:
            self._selection.kept += rows.hidden
        return logits

    def keep_in_8_bits(self, readers: KernelSet | None = None) -> None:
        super().keep_in_8_bits(readers)
        for layer, store in zip(self.layers, self.stores, strict=True):
            layer.store = store

    def keep_hidden(self, *, fed: bool = False) -> bool:
        if not self._selection.found:
            return False
        self._selection.kept = []
        if self.rows is not None and fed:
            self.rows.kinds.give_up()
        elif self.rows is not None:
            # Steps that have been compiled return no states.
            self.rows.kinds.forget()
        return True

    @property
    def hidden(self) -> mx.array | None:
        passes = self._selection.kept
        if not passes:
            return None
        return passes[0] if len(passes) == 1 else mx.concatenate(passes)

    def _begin_run(self) -> None:
        """Forget the hidden states of the last run."""
        if self._selection.kept is not None:
            self._selection.kept = []

    def abandon(self) -> None:
        super().abandon()
        self._begin_run()
        if self.rows is not None:
            self.rows.pause()

    def state(self) -> list[mx.array]:
        return self._pages() + ([] if self.rows is None else self.rows.state())

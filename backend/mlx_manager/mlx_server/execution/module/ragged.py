"""mlx-lm's module over pages, all tokens of a step in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess
from mlx_manager.mlx_server.execution.base import ABREAST_ON_CPU, OnPages, shortest_first
from mlx_manager.mlx_server.execution.compiled import Compile
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, NotApplicable
from mlx_manager.mlx_server.execution.images import VisionTraits
from mlx_manager.mlx_server.execution.module.hidden import as_it_is
from mlx_manager.mlx_server.execution.module.over_pages import OverPages
from mlx_manager.mlx_server.execution.running import padded_rows
from mlx_manager.mlx_server.execution.step import RaggedStep


class RaggedForward(OverPages, OnPages):
    """Forward that runs all tokens of a step in one pass, (tokens, 1)."""

    kind: ClassVar[str] = "ragged"

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
        super().__init__(model, page_size, reading, kernels, compile, vision=vision)
        if len(self.stores) < len(self._shared):
            raise NotApplicable("some layers keep another kind of state than keys and values")
        self.rows = self._steps(self._shared, padded_rows)
        if kernels is None and mx.default_device() == mx.cpu:
            self.abreast = ABREAST_ON_CPU

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        # Kernels divide the work by themselves. Without kernels, rows of similar length are
        # gathered.
        if self.looks_ahead:
            return list(range(len(lengths)))
        return shortest_first(lengths)

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        self._begin_run()
        logits = self._run(decode, chunks)
        self.order_of_launches.then(logits)
        return logits

    def _run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        order = self.order_of_launches
        if self.rows is not None:
            if decode is not None and not chunks:
                return self._run_rows(self.rows, decode.after(order))
            self.rows.pause()
        step = RaggedStep.of(decode, chunks, self._page_size, order=order)
        self._pass.begin(step.plan, step.insertion)
        tokens, wanted = step.tokens[:, None], step.wanted
        hidden = as_it_is if wanted is None else (lambda h: h[wanted])
        return self._selection.logits(self._model, self._shared, tokens, hidden)

"""mlx-lm's module over pages, running rows as one pass and each chunk as another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.cpu.convolution import with_taps
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess, StepPlan
from mlx_manager.mlx_server.execution.base import order_after
from mlx_manager.mlx_server.execution.caches import (
    bytes_of,
    combine,
    extend,
    extract,
    filled,
    filter_rows,
    is_paged,
    kept_in,
    merge,
    unpaged,
)
from mlx_manager.mlx_server.execution.compiled import Compile
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Prefixes, Snapshot
from mlx_manager.mlx_server.execution.images import Insertion, VisionTraits, angles_in, tokens_of
from mlx_manager.mlx_server.execution.module.hidden import as_it_is
from mlx_manager.mlx_server.execution.module.over_pages import OverPages


class SeparateForward(OverPages):
    """Forward that runs the running rows as one batch, (rows, 1), and each chunk as (1, tokens)."""

    kind: ClassVar[str] = "separate"

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
        # A step's state exists beside the last one's, and a grown batch beside the new row's state.
        states = [leaf for leaf in filled(model, 2) if isinstance(leaf, ArraysCache)]
        self.row_bytes = 2 * sum(map(bytes_of, states))
        paged = all(is_paged(entry) for entry in self._shared)
        self.prefixes: Prefixes = "pages" if paged else "snapshot"
        self._own: dict[int, list[Any]] = {}
        self._batch: list[Any] = []
        self._rows: list[int] = []
        # The caches of a batch's steps are empty except during a pass.
        self.rows = self._steps(self._fresh(), int)
        if mx.default_device() == mx.cpu:
            with_taps(model)

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        return order_after(self._rows, keys)

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        self._begin_run()
        logits: list[mx.array] = []
        out, order = mx.zeros((1, 1)), self.order_of_launches
        self._take_out([chunk.key for chunk in chunks])
        if decode:
            self._arrange(decode.keys)
            out = self._pass_of_rows(decode.after(order))
            logits.append(out)
        elif self.rows is not None:
            self.rows.pause()
        for number, chunk in enumerate(chunks):
            if (decode or number) and not self.looks_ahead:
                # Each pass writes to the same pages. When the passes before have been evaluated, it
                # writes in place.
                mx.eval(logits, self.state())
            own = self._own.get(chunk.key)
            if own is None:
                own = self._own[chunk.key] = self._fresh()
            tokens = order.after(mx.array([tokens_of(chunk)], mx.int32))
            if self.looks_ahead:
                # A GPU would run several passes at a time, whose launches count arrivals in one
                # place. The added number is 0: it makes this pass depend on the one before.
                tokens = tokens + (out.reshape(-1)[:1] < -mx.inf).astype(mx.int32)
            out = self._pass_of_chunk(chunk, tokens, own)
            if chunk.final or chunk.every:
                logits.append(out)
        # The last pass comes after all others.
        order.then(out)
        # Where no logits are wanted, the result is evaluated all the same, to wait for the pass.
        return mx.concatenate(logits) if logits else out

    def forget(self, key: int) -> None:
        self._own.pop(key, None)
        if key in self._rows:
            self._leave([key])

    def state(self) -> list[mx.array]:
        own = [*self._batch, *chain.from_iterable(self._own.values())]
        return super().state() + kept_in(own)

    def snapshot(self, key: int) -> Snapshot | None:
        own = self._extracted(key) if key in self._rows else self._own.get(key)
        if own is None:
            return None
        # Layers replace their arrays and never write into them, so keeping the arrays suffices.
        # Slices, as convolutions leave them, are copied: they would keep all of the chunk's inputs.
        leaves = [[None if a is None else mx.contiguous(a) for a in c.cache] for c in unpaged(own)]
        mx.async_eval(leaves)  # type: ignore[no-untyped-call]
        return Snapshot(leaves)

    def restore(self, key: int, snapshot: Snapshot) -> None:
        self.forget(key)
        own = self._own[key] = self._fresh()
        for leaf, arrays in zip(unpaged(own), snapshot.leaves, strict=True):
            leaf.cache = list(arrays)

    def _fresh(self) -> list[Any]:
        """Return a row's own caches, with the pages that all rows share."""
        return [
            combine(shared, fresh)
            for shared, fresh in zip(self._shared, make_prompt_cache(self._model), strict=True)
        ]

    def _take_out(self, keys: Sequence[int]) -> None:
        """Give the rows of the batch that now have a chunk, a draft, caches of their own."""
        out = [key for key in keys if key in self._rows]
        if out:
            self._own |= {key: self._extracted(key) for key in out}
            self._leave(out)

    def _extracted(self, key: int) -> list[Any]:
        return [extract(entry, self._rows.index(key)) for entry in self._batch]

    def _leave(self, keys: Sequence[int]) -> None:
        """Take rows out of the batch."""
        keep = [i for i, row in enumerate(self._rows) if row not in keys]
        self._rows = [self._rows[i] for i in keep]
        self._batch = [filter_rows(entry, keep) for entry in self._batch] if keep else []

    def _arrange(self, keys: list[int]) -> None:
        """Make the batch hold exactly `keys`, in that order."""
        gone = [key for key in self._rows if key not in set(keys)]
        if gone:
            self._leave(gone)
        joining = [key for key in keys if key not in set(self._rows)]
        if joining:
            rows = [self._caches_of(key) for key in joining]
            merged = [merge(list(entries)) for entries in zip(*rows, strict=True)]
            self._batch = (
                [extend(a, b) for a, b in zip(self._batch, merged, strict=True)]
                if self._batch
                else merged
            )
            self._rows += joining

    def _caches_of(self, key: int) -> list[Any]:
        """Take the caches of a row that joins the batch. Where all is on pages, it may have had no
        chunk since it left: a draft model's rows come and go."""
        if self.prefixes == "pages" and key not in self._own:
            return self._fresh()
        return self._own.pop(key)

    def _pass_of_rows(self, decode: Decode) -> mx.array:
        if self.rows is not None:
            return self._run_rows(self.rows, decode, unpaged(self._batch))
        self._pass.begin(StepPlan(decode.spans, self._page_size, angles=angles_in(decode, [])))
        return self._selection.logits(self._model, self._batch, decode.tokens[:, None])

    def _pass_of_chunk(self, chunk: Chunk, tokens: mx.array, caches: list[Any]) -> mx.array:
        plan = StepPlan([chunk.span], self._page_size, angles=chunk.angles)
        insertion = None if chunk.shown is None else Insertion(chunk.shown)
        self._pass.begin(plan, insertion, chunk=True)
        wanted = as_it_is if chunk.every else (lambda h: h[:, -1:])
        return self._selection.logits(self._model, caches, tokens, wanted)

"""Decode steps through a module of mlx-lm's, on a GPU.

Such a module puts 20 to 30 operations a layer together in Python, which takes longer than a GPU
takes to compute them. So a step is a function of arrays alone, which can be compiled. Its arrays
are the tokens, lengths and page tables, the pages, which are written in place, and the state that
recurrent layers keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_manager.mlx_server.devices.attention.splits import BlockKind, Splits
from mlx_manager.mlx_server.execution.attention.paged import (
    KeyAccess,
    PagedLayer,
    Pass,
    ReadBy,
    RowsPlan,
)
from mlx_manager.mlx_server.execution.compiled import Compile, Kinds
from mlx_manager.mlx_server.execution.running import Running

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mlx_manager.mlx_server.execution.forward import Decode

Cut = tuple[ReadBy, bool, BlockKind]
"""Static part of one kind of attention's `Splits`: `divided` and `blocks`."""
Pages = tuple[mx.array, mx.array, mx.array]
"""Keys and values of one layer, and the array that says what has been written to them."""
Kept = list["mx.array | None"]
"""State of one recurrent layer for a batch, as `_kept_by` lists it."""


def serves(layers: Sequence[PagedLayer]) -> bool:
    """Return whether decode steps over `layers` can be compiled: whether kernels read the pages of
    all layers.

    Without `layers`, return whether the device is a GPU: for a CPU, MLX would compile by the
    machine's own compiler, if it has one, for seconds.
    """
    if not layers:
        return mx.default_device() == mx.gpu
    by_kernels = (KeyAccess.PAGES, KeyAccess.HANDED_ON)
    return all(layer.store.kernels is not None and layer.reading in by_kernels for layer in layers)


class ModuleSteps:
    """Decode steps of a module, compiled where their kind keeps coming.

    Args:
        call: gives the logits, (rows, vocabulary), of a pass over tokens, (rows, 1).
        layers: the caches of that pass that are pages. states: those that are not; they are empty
            except during a pass.
        current: the pass that `layers` see.
        page_size: tokens a page.
        compile: as `mx.compile`.
        size: returns the number that so many rows are padded to.
        states_kept: returns the hidden states of the last `call`, (rows, width); none if they are
            not kept.

    Attributes:
        hidden: what that is of the rows of the last step.
        kinds: the kinds of step that there have been.
    """

    def __init__(  # noqa: PLR0917
        self,
        call: Callable[[mx.array], mx.array],
        layers: Sequence[PagedLayer],
        states: Sequence[ArraysCache],
        current: Pass,
        page_size: int,
        compile: Compile,
        size: Callable[[int], int],
        states_kept: Callable[[], list[mx.array]] = list,
    ) -> None:
        self._call, self._states_kept = call, states_kept
        self.hidden: list[mx.array] = []
        self._stores = [layer.store for layer in layers]
        self._states = states
        self._pass = current
        self._page_size = page_size
        self._running = Running(partial(_cut, current), size)
        self.kinds = Kinds(compile)

    def run(self, decode: Decode, kept: Sequence[ArraysCache] = ()) -> mx.array:
        """Return the logits of the rows, and then of padding, not evaluated.

        kept: the rows' caches that are not pages. Their arrays take the place of `states` for the
        pass, and are replaced by those after it.
        """
        batch = self._running.next(decode.keys, decode.tables, decode.lengths, decode.shifts)
        cuts = [(by, cut.divided, cut.blocks) for by, cut in batch.splits.items()]
        work = [cut.items for cut in batch.splits.values()]
        logits, batch.before, pages, after, hidden = self.kinds.run(
            (batch.table.shape, len(batch.shifts), *cuts, *(items.shape for items in work)),
            partial(self._step, cuts),
            batch.padded(decode.tokens),
            batch.before,
            batch.table,
            list(batch.shifts),
            work,
            [store.arrays for store in self._stores],
            list(map(_kept_by, kept)),
        )
        for store, arrays in zip(self._stores, pages, strict=True):
            store.arrays = arrays
        for state, arrays in zip(kept, after, strict=True):
            _keep(state, arrays)
        self.hidden = [states[: len(decode.keys)] for states in hidden]
        found: mx.array = logits
        return found

    def pause(self) -> None:
        """Forget the last step's rows: the next step does not follow it, or has prompts in it."""
        self._running.batch = None

    def state(self) -> list[mx.array]:
        """Return the arrays that outlive a step besides pages and states."""
        last = self._running.batch
        return [] if last is None else [last.before]

    def _step(  # noqa: PLR0917
        self,
        cuts: Sequence[Cut],
        tokens: mx.array,
        before: mx.array,
        table: mx.array,
        shifts: Sequence[mx.array],
        work: Sequence[mx.array],
        pages: Sequence[Pages],
        kept: Sequence[Kept],
    ) -> tuple[mx.array, mx.array, list[Pages], list[Kept], list[mx.array]]:
        """Return the logits, the lengths `before` the next step, and the pages and states after
        this one."""
        splits = {
            by: Splits(items, divided, blocks)
            for (by, divided, blocks), items in zip(cuts, work, strict=True)
        }
        plan = RowsPlan.of(before, table, splits, self._page_size, shifts)
        own = [store.arrays for store in self._stores]
        try:
            self._pass.begin(plan)
            for store, arrays in zip(self._stores, pages, strict=True):
                store.arrays = arrays
            for state, held in zip(self._states, kept, strict=True):
                _keep(state, held)
            logits = self._call(tokens[:, None])
            written = [store.arrays for store in self._stores]
            after = list(map(_kept_by, self._states))
            return logits, plan.decoding.lengths, written, after, self._states_kept()
        finally:
            # While a step is being compiled its arrays are placeholders: none may stay in the
            # caches.
            self._pass.plan = None
            for store, arrays in zip(self._stores, own, strict=True):
                store.arrays = arrays
            for state in self._states:
                _keep(state, [None] * (len(state.cache) + 2))


def _cut(current: Pass, lengths: NDArray[Any]) -> dict[ReadBy, Splits]:
    """Return the splits of all attention that has run in any pass."""
    return {
        (shape, window): kernels.plan(lengths, window=window)
        for (shape, window), kernels in current.readers.items()
    }


def _kept_by(state: ArraysCache) -> Kept:
    return [*state.cache, state.lengths, state.left_padding]


def _keep(state: ArraysCache, kept: Kept) -> None:
    *state.cache, state.lengths, state.left_padding = kept

"""The `Forward` protocol: a step of rows and chunks of prompts goes in, logits come out.

There are three ways of running a model, and `select.choose` finds the right one when it is loaded:
a decoder of our own (`decoder`), mlx-lm's module over our pages (`module`), and each row alone over
mlx-lm's own caches (`alone`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.metal.order import LaunchOrder
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.kv.store import LayerShape
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.images import Shown


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one sequence's prompt.

    A `final` chunk gives logits for the first token that follows the prompt. A chunk with `every`
    gives the logits of all its tokens.

    shown: rows of pictures in place of tokens' embeddings. angles: (tokens,) or (3, tokens), the
    positions by which the tokens are rotated; None: their places in the sequence.
    """

    key: int
    span: Span
    tokens: list[int]
    final: bool
    every: bool = False
    shown: Shown | None = None
    angles: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """The running rows of a step, each with one query.

    keys, tables: the rows' own, in order. lengths: of each row, its newest token included. tokens:
    uint32, the rows' newest; entries after those mean nothing. shifts: added to each row's place
    for the position by which it is rotated; empty where nothing is added to any. waited: whether
    the device waits for the step.
    """

    keys: list[int]
    tables: list[PageTable]
    lengths: list[int]
    tokens: mx.array
    shifts: Sequence[int] = ()
    waited: bool = False

    @property
    def spans(self) -> list[Span]:
        return list(map(Span, self.tables, self.lengths))

    def after(self, order: LaunchOrder) -> Decode:
        """Return the same rows, in a step whose launches come after earlier ones in `order`."""
        return self if order.kept else replace(self, tokens=order.after(self.tokens))


Prefixes = Literal["pages", "snapshot", "copy"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a row's layers that are not on pages, after some prefix.

    leaves: the arrays of each such layer. caches: all the row's caches, where none are on pages.
    """

    leaves: list[list[mx.array | None]]
    caches: Sequence[Any] = ()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for leaf in self.leaves for array in leaf if array is not None)


class PageStore(Protocol):
    """Pages of one layer, as far as the engine sees to them; see `LayerStore`."""

    @property
    def shape(self) -> LayerShape: ...

    @property
    def format(self) -> str: ...

    @property
    def token_bytes(self) -> int: ...

    def resize(self, pages: int) -> bool: ...

    def clear(self, pages: Sequence[int]) -> None: ...


class Forward(Protocol):
    """Protocol of a way of running one model's steps.

    Attributes:
        kind: "fused", "ragged", "separate" or "alone".
        stores: the layers' pages; empty when the rows keep mlx-lm's own caches.
        token_bytes: bytes that a row keeps for each of its tokens besides pages. row_bytes: bytes
            that a row keeps whatever its length, while one step's state follows the other's.
        prefixes: the parts of a prefix: "pages" alone, pages and a "snapshot" of the other layers'
            state, or a "copy" of all that a row keeps, of which each row that continues the prefix
            has its own. worth: tokens that a snapshot must save to be worth the step that ends at
            it.
        looks_ahead: whether a step may be queued before the last one's tokens have been read: not
            where the pages would be copied, since the step under way holds them.
        puts_together_ahead: whether `run` may be called before the last step's tokens have been
            read, even if its result is computed only afterwards.
        horizon: tokens that the rows' pages are wanted to reach ahead, so that the tables need not
            be sent to the device at every step.
        grain: a step with prompts in it had best have a multiple of so many tokens.
        attends_whole: whether modules attend by themselves, all queries of a chunk at once.
        copies: processes that run the model with their arrays in this memory, this one included.
        abreast: running rows that are enough for a step: twice as many take little longer in two. 0
            where a step takes about as long however many rows there are, or where the other rows'
            state would have to be put aside.
    """

    token_bytes: int
    row_bytes: int
    prefixes: Prefixes
    worth: int
    looks_ahead: bool
    puts_together_ahead: bool
    horizon: int
    grain: int
    abreast: int
    attends_whole: bool
    copies: int

    @property
    def kind(self) -> str: ...

    @property
    def stores(self) -> Sequence[PageStore]: ...

    def serve(self) -> None:
        """End the load: from now on the thread that calls `run` computes its result, too."""
        ...

    def keep_in_8_bits(self, readers: KernelSet | None = None) -> None:
        """Replace the stores, which are empty and which no kernel writes to, by stores in 8 bits.
        Called before `serve`.

        readers: kernels that attend over them, where there are some.

        Raises:
            ValueError: a layer's keys and values can't be kept in 8 bits.
        """
        ...

    def keep_hidden(self, *, fed: bool = False) -> bool:
        """Keep hidden states from now on; return whether this way of running can. fed: the module
        is also given arrays that are no arguments of its own, so its steps can't be compiled."""
        ...

    @property
    def hidden(self) -> mx.array | None:
        """Return the hidden states behind the last norm of all tokens of the last `run`, (tokens,
        width): those of rows, in order, and then those of each chunk. None where they are not
        kept."""
        ...

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return the indices that put decoding rows in the order that `run` wants."""
        ...

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        """Return logits (rows + those of chunks, vocabulary), rows first; not evaluated.

        Rows that mean nothing may follow, unless there is a chunk that wants logits of its last
        token alone. Where no logits are wanted, the result is
        one row that means nothing. The step has been done when the result and `state` have been
        evaluated.
        """
        ...

    def queue(self) -> None:
        """Queue the pass of the last `run` by itself, before anything that is made of its result,
        where other devices run the same pass."""
        ...

    @property
    def repeats(self) -> bool:
        """Return whether the last `run` took the host no longer than later ones of its kind: False
        for one that is put together anew, as it is not compiled yet."""
        ...

    @property
    def unfinished(self) -> bool:
        """Return whether `run` has left a part of its pass to `finish`, since a GPU's memory should
        not hold all of the pass at once. The device is busy with the first part."""
        ...

    def finish(self) -> None:
        """Queue the rest of the last `run`, waiting for the device in between."""
        ...

    def abandon(self) -> None:
        """Drop the rest of a failed step, which refers to pages that are gone."""
        ...

    def forget(self, key: int) -> None:
        """Drop the state of a sequence besides its pages: it has ended or is paused."""
        ...

    def state(self) -> list[mx.array]:
        """Return the arrays that outlive a step and must be evaluated with it."""
        ...

    def tokens_at_once(self, tokens: int) -> int:
        """Return the number of tokens whose results of all layers a GPU's memory holds together,
        while steps of so many tokens follow each other."""
        ...

    def unpacked_bytes(self, tokens: int) -> int:
        """Return the bytes that steps of so many tokens take for what they unpack: weights, made
        dense, and latents, made keys and values of heads."""
        ...

    def keep_packed(self) -> None:
        """Unpack nothing from now on: there is no memory for it."""
        ...

    def snapshot(self, key: int) -> Snapshot | None:
        """Return a snapshot of a sequence whose prompt is being processed, or None if it has no
        state of its own. The snapshot is of the state after the last step, which has been queued
        whole."""
        ...

    def restore(self, key: int, snapshot: Snapshot) -> None:
        """Begin a sequence with the state of another one that had the same prefix."""
        ...


class NotApplicable(Exception):
    """Error: this way of running cannot serve this model; the message says why."""

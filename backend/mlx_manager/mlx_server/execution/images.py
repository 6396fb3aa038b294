"""Pictures in steps: rows of features in place of embeddings, and positions with several axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices.cuda.mapped import send

if TYPE_CHECKING:
    from mlx_manager.mlx_server.execution.forward import Chunk, Decode

AXES = 3
"""Axes of positions with M-RoPE: time, height and width."""


@dataclass(frozen=True, slots=True)
class MRope:
    """RoPE with positions in time, height and width.

    sections: pairs of each head that turn by temporal, height and width positions. interleaved:
    Qwen3-VL's order (THW THW ... T), else in blocks (Qwen2.5-VL).
    """

    sections: tuple[int, int, int]
    interleaved: bool

    def axes(self, pairs: int) -> NDArray[np.int32]:
        """Return the axis by whose position each of a head's `pairs` turns, (pairs,)."""
        if not self.interleaved:
            axes = np.repeat(np.arange(AXES, dtype=np.int32), self.sections)[:pairs]
            return np.pad(axes, (0, pairs - len(axes)))
        axes = np.zeros(pairs, np.int32)
        for axis in (1, 2):
            axes[axis : AXES * self.sections[axis] : AXES] = axis
        return axes


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A picture as the language model reads it.

    rows: (n, hidden) in the model's dtype; they replace the embeddings, and are already divided by
    the embedding scale where the module scales (Gemma). levels: (n, hidden) each; level i is added
    after layer i (DeepStack).
    """

    rows: mx.array
    levels: tuple[mx.array, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.rows.nbytes + sum(level.nbytes for level in self.levels)


class VisionTraits(Protocol):
    """Facts of a model that sees, as far as running it depends on them.

    mrope: None where positions have one axis. levels: the number of DeepStack's levels.
    """

    @property
    def mrope(self) -> MRope | None: ...

    @property
    def levels(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """Rows of pictures among the tokens of a chunk or of a step.

    places: (n,) int32, the tokens whose embeddings the rows replace. features: n rows.
    """

    places: NDArray[np.int32]
    features: Features

    @staticmethod
    def joined(parts: Sequence[Shown]) -> Shown:
        """Return the rows of all parts, at least one, whose places are of the same tokens."""
        if len(parts) == 1:
            return parts[0]
        levels = zip(*(part.features.levels for part in parts), strict=True)
        rows = mx.concatenate([part.features.rows for part in parts])
        features = Features(rows, tuple(mx.concatenate(list(level)) for level in levels))
        return Shown(np.concatenate([part.places for part in parts]), features)

    def from_token(self, first: int) -> Shown:
        """Return the same rows where the tokens come after `first` others."""
        return Shown(self.places + np.int32(first), self.features)


class Insertion:
    """Rows of pictures in a pass.

    Attributes:
        levels: the number of DeepStack's levels.
    """

    def __init__(self, shown: Shown) -> None:
        self.levels = len(shown.features.levels)
        self._places = send(shown.places.astype(np.int32))
        self._features = shown.features

    def into(self, embeddings: mx.array, scale: float | None = None) -> mx.array:
        """Return `embeddings`, of any shape whose last axis is the width, with the pictures' rows
        in place of theirs.

        scale: the factor by which `embeddings` are multiplied already.
        """
        flat = embeddings.reshape(-1, embeddings.shape[-1])
        rows = self._features.rows.astype(flat.dtype)
        flat[self._places] = rows if scale is None else rows * scale
        return flat.reshape(embeddings.shape)

    def added(self, layer: int, hidden: mx.array) -> mx.array:
        """Return the result of a layer with its level added, if there is one for it."""
        if layer >= self.levels:
            return hidden
        flat = hidden.reshape(-1, hidden.shape[-1])
        level = self._features.levels[layer].astype(flat.dtype)
        return flat.at[self._places].add(level).reshape(hidden.shape)


def tokens_of(chunk: Chunk) -> list[int]:
    """Return the tokens of a chunk to embed: 0 where a picture's row takes the place."""
    if chunk.shown is None:
        return chunk.tokens
    tokens = np.array(chunk.tokens, np.int32)
    tokens[chunk.shown.places] = 0
    found: list[int] = tokens.tolist()
    return found


def shown_in(chunks: Sequence[Chunk], rows: int) -> Shown | None:
    """Return the pictures' rows in a step of so many running rows and then `chunks`; None if it has
    none."""
    parts, start = [], rows
    for chunk in chunks:
        if chunk.shown is not None:
            parts.append(chunk.shown.from_token(start))
        start += len(chunk.tokens)
    return Shown.joined(parts) if parts else None


def angles_in(decode: Decode | None, chunks: Sequence[Chunk]) -> NDArray[np.int32] | None:
    """Return the positions by which a step's tokens are rotated, (tokens,) or (3, tokens) where
    axes differ; None where each is the token's place in its sequence."""
    shifted = decode is not None and len(decode.shifts) > 0
    if not shifted and all(chunk.angles is None for chunk in chunks):
        return None
    parts = []
    if decode is not None:
        places = np.array(decode.lengths, np.int32) - 1
        parts.append(places + np.array(decode.shifts, np.int32) if shifted else places)
    for chunk in chunks:
        span = chunk.span
        own = np.arange(span.length - span.queries, span.length, dtype=np.int32)
        parts.append(own if chunk.angles is None else chunk.angles)
    if any(part.ndim > 1 for part in parts):
        parts = [np.broadcast_to(part, (AXES, part.shape[-1])) for part in parts]
    found: NDArray[np.int32] = np.concatenate(parts, axis=-1)
    return found

"""Pictures in prompts, as `vision` hands them to the engine: places, digests and positions; and the
protocol of the tower that turns pictures into rows (`vision/towers` has them).

A picture's rows of features replace the embeddings of its placeholder tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.execution.images import Features, MRope, Shown

__all__ = ["Features", "MRope", "Picture", "PromptImages", "Tower"]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture of a prompt.

    image: its file. digest: the file's SHA-256, by which features are kept and pages found, with
    the salt of who may find them: all else that changes features is the model's. places: (rows,)
    int32, ascending: the prompt's tokens that are rows of its features. They need not be
    contiguous: tiles and row breaks may lie between. Row k of the features stands at places[k].
    """

    image: core.Image
    digest: str
    places: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """Pictures of a prompt, in the order of their places.

    angles: (3, prompt tokens) int32, temporal, height and width positions (M-RoPE); None: positions
    are the tokens' places. shift: added to a token's place for its position after the prompt
    (M-RoPE's rope delta). whole: queries of a picture see to its end, and no chunk ends inside one
    (Gemma 3, 4). windowed: they do so only in layers with a sliding window, and only within it
    (Gemma 4).
    """

    pictures: tuple[Picture, ...]
    angles: np.ndarray | None = None
    shift: int = 0
    whole: bool = False
    windowed: bool = False

    def renamed(self, name: Callable[[str], str]) -> PromptImages:
        """Return the same pictures by what `name` makes of their digests."""
        renamed = (replace(picture, digest=name(picture.digest)) for picture in self.pictures)
        return replace(self, pictures=tuple(renamed))

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first, behind the last) of each picture's neighbouring places, if `whole`."""
        if not self.whole:
            return ()
        return tuple(
            (int(run[0]), int(run[-1]) + 1)
            for picture in self.pictures
            for run in np.split(picture.places, np.flatnonzero(np.diff(picture.places) > 1) + 1)
        )

    def angles_of(self, start: int, stop: int) -> NDArray[np.int32] | None:
        """Return the positions by which the tokens from `start` to `stop` are rotated, (tokens,) or
        (3, tokens) where axes differ; None where each is the token's place. Tokens may come after
        the prompt."""
        if self.angles is None:
            return None
        behind = np.arange(max(start, self.angles.shape[1]), stop, dtype=np.int32) + self.shift
        own = self.angles[:, start:stop]
        found = np.concatenate([own, np.broadcast_to(behind, (len(own), len(behind)))], axis=1)
        if (found != found[0]).any():
            return found
        return None if np.array_equal(found[0], np.arange(start, stop)) else found[0]

    def shown(self, start: int, stop: int, features: Mapping[str, Features]) -> Shown | None:
        """Return the rows of pictures among the tokens from `start` to `stop`, if there are any.

        features: those of the pictures in this span, by digest.
        """
        parts = []
        for picture in self.pictures:
            first, last = np.searchsorted(picture.places, [start, stop])
            if first < last:
                of = features[picture.digest]
                rows, levels = of.rows[first:last], tuple(x[first:last] for x in of.levels)
                places = picture.places[first:last] - np.int32(start)
                parts.append(Shown(places, Features(rows, levels)))
        return Shown.joined(parts) if parts else None


class Tower(Protocol):
    """A vision tower with its projector. width, levels: of the features that it makes."""

    @property
    def width(self) -> int: ...

    @property
    def levels(self) -> int: ...

    def pixels(self, image: core.Image) -> Any:
        """Return what `stages` takes: decoded, resized, normalised. Host work, on any thread."""
        ...

    def stages(self, pixels: Any) -> Generator[Sequence[mx.array], None, Features]:
        """Yield the arrays to evaluate before each next slice of work; return the features.

        On the MLX thread.
        """
        ...

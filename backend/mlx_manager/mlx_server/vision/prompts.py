"""Pictures of a prompt: the text that stands for them, their places and their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.engine.prompt_images import MRope, Picture, PromptImages
from mlx_manager.mlx_server.errors import InvalidRequest
from mlx_manager.mlx_server.vision.layout import Layout
from mlx_manager.mlx_server.vision.towers.base import VisionTower


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """Sight of a loaded model: its tower, and the tokens of pictures.

    placeholder: the text that stands for a picture in the template's text. row: the token whose
    embedding a row of features replaces.
    """

    tower: VisionTower
    placeholder: str
    row: int

    @property
    def mrope(self) -> MRope | None:
        """Return how positions in time, height and width turn the heads; None for a model whose
        positions are places."""
        return self.tower.mrope

    @property
    def levels(self) -> int:
        """Return the number of levels of features that are added after the first layers."""
        return self.tower.levels

    def layouts(self, images: Sequence[core.Image]) -> list[Layout]:
        """Return the form of each picture.

        Raises:
            InvalidParameter: a picture's size is none that the model takes.
        """
        return [self.tower.layout(image) for image in images]

    def expanded(self, text: str, layouts: Sequence[Layout], param: str) -> str:
        """Return the template's text with each picture in its form.

        Raises:
            InvalidRequest: the text has another number of placeholders.
        """
        parts = text.split(self.placeholder)
        if len(parts) != len(layouts) + 1:
            raise InvalidRequest(
                f"The model's chat template shows {len(parts) - 1} of {len(layouts)} pictures.",
                param=param,
            )
        joined = [parts[0]]
        for layout, part in zip(layouts, parts[1:], strict=True):
            joined += [layout.text, part]
        return "".join(joined)

    def placed(
        self,
        ids: Sequence[int],
        images: Sequence[core.Image],
        layouts: Sequence[Layout],
        param: str,
    ) -> tuple[list[int], PromptImages]:
        """Return a prompt's tokens, and its pictures at their places.

        ids: tokens of the expanded text, in which one token stands for each run of rows.

        Raises:
            InvalidRequest: the tokens are not those of the pictures' forms.
        """
        found = np.asarray(ids, dtype=np.int64)
        stands = np.flatnonzero(found == self.row)
        runs = [run for layout in layouts for run in layout.runs]
        if len(stands) != len(runs):
            raise InvalidRequest(
                "The model's chat template does not show the pictures as its family does.",
                param=param,
            )
        counts = np.ones(len(found), dtype=np.int64)
        counts[stands] = runs
        tokens = np.repeat(found, counts)
        places = np.flatnonzero(tokens == self.row).astype(np.int32)
        ends = np.cumsum([sum(layout.runs) for layout in layouts])
        pictures = tuple(
            Picture(image, image.digest, own)
            for image, own in zip(images, np.split(places, ends[:-1]), strict=True)
        )
        whole, windowed = self.tower.whole, self.tower.windowed
        if self.mrope is None:
            return tokens.tolist(), PromptImages(pictures, whole=whole, windowed=windowed)
        grids = [layout.grid for layout in layouts if layout.grid is not None]
        angles = angles_of(len(tokens), [picture.places for picture in pictures], grids)
        shift = int(angles.max()) + 1 - len(tokens)
        return tokens.tolist(), PromptImages(pictures, angles, shift, whole, windowed)


def angles_of(
    length: int, places: Sequence[np.ndarray], grids: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return the positions in time, height and width of a prompt's tokens, (3, length) int32.

    places: of each picture's rows, next to each other. grids: each picture's rows of features by
    height and width. A picture's rows have one time, and the text goes on after its longer side.

    Source: transformers 5.24, `Qwen3VLModel.get_rope_index`.
    """
    angles = np.empty((3, length), dtype=np.int32)
    done = position = 0
    for own, (height, width) in zip(places, grids, strict=True):
        first, end = int(own[0]), int(own[-1]) + 1
        angles[:, done:first] = np.arange(position, position + first - done)
        position += first - done
        rows, columns = np.divmod(np.arange(height * width), width)
        angles[:, first:end] = position + np.stack([np.zeros_like(rows), rows, columns])
        position += max(height, width)
        done = end
    angles[:, done:] = np.arange(position, position + length - done)
    return angles

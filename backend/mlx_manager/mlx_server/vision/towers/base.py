"""The parts that all towers share: settings, tensors, and evaluation layer by layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.engine.prompt_images import Features, MRope
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.vision.layout import Layout

Pixels = np.ndarray[Any, np.dtype[np.float32]]
PATCHES = 4096
"""Patches of which a GPU's slice of work consists, where there are as many."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Settings of a checkpoint that sees.

    config: its config.json, with transformers' defaults. processor: settings of its image
    processor; empty if it has none. more: settings of the processor around that one.
    """

    folder: Path
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    more: Mapping[str, Any]

    @property
    def encoder(self) -> Mapping[str, Any]:
        """Return the settings of the vision encoder."""
        found: Mapping[str, Any] = self.config["vision_config"]
        return found

    @property
    def text(self) -> Mapping[str, Any]:
        """Return the settings of the language model."""
        found: Mapping[str, Any] = self.config["text_config"]
        return found

    def namespace(self, encoder: Any, **more: Any) -> SimpleNamespace:
        """Return the settings in the form that mlx-vlm's projectors read. encoder: mlx-vlm's form
        of the encoder's."""
        text = SimpleNamespace(**self.text)
        return SimpleNamespace(**{"vision_config": encoder, "text_config": text, **more})


@dataclass(slots=True)
class Recording:
    """Outputs of a tower's layers, in their order, not evaluated."""

    outputs: list[mx.array] = field(default_factory=list)


ATTENTIONS = {"self_attn", "attn", "attention"}
"""Names of a layer's attention in mlx-vlm's modules."""


class Recorded(nn.Module):  # type: ignore[misc]
    """A module whose outputs are recorded."""

    def __init__(self, layer: nn.Module, recording: Recording) -> None:
        super().__init__()
        self.layer = layer
        self._recording = recording

    def __call__(self, *args: Any, **more: Any) -> mx.array:
        output: mx.array = self.layer(*args, **more)
        self._recording.outputs.append(output)
        return output


def expect_activation(checkpoint: Checkpoint, *known: str) -> None:
    """Check that an encoder has the activation that mlx-vlm's module computes.

    Raises:
        ValueError: it has another one.
    """
    found = checkpoint.encoder.get("hidden_act", known[0])
    if found not in known:
        raise ValueError(f"its vision encoder's activation is {found!r}, not {known[0]!r}")


def in_parts(tiles: Pixels, patches: int) -> Iterator[Pixels]:
    """Yield tiles of one size, (tiles, ...), in parts: a CPU's are one tile, so that a slice of
    work is short, and a GPU's have about `PATCHES` patches.

    patches: those of a tile.
    """
    many = devices.current().kind != "cpu"
    size = max(1, PATCHES // patches) if many else 1
    yield from (tiles[place : place + size] for place in range(0, len(tiles), size))


def under_vision_model(name: str) -> str:
    """Return the name of a tensor for modules with a `vision_tower.vision_model`, which some
    checkpoints leave out of names. Names that are not of the tower lose `model.` alone."""
    rest = name.removeprefix("model.")
    inner = rest.removeprefix("vision_tower.").removeprefix("vision_model.")
    return rest if inner == rest else f"vision_tower.vision_model.{inner}"


class VisionTower(ABC):
    """A vision tower with its projector, of one checkpoint; see `engine.prompt_images.Tower`.

    Attributes:
        module: tower and projector; its parameters have the names that `renamed` gives.
        row: the token whose embedding a row of features replaces.
        whole, windowed: see `PromptImages`.
        mrope: positions of the language model in time, height and width, if it has any.
        levels: levels of features that are added after the language model's first layers.
        dtype, width: type and width of the features, which are the language model's.
        scale: what the language model multiplies its embeddings by.
    """

    module: nn.Module
    row: str
    whole: bool = False
    windowed: bool = False
    mrope: MRope | None = None
    levels: int = 0
    dtype: mx.Dtype = mx.float32
    width: int = 0
    scale: float = 1.0

    def __init__(self) -> None:
        self._recording = Recording()

    @abstractmethod
    def layout(self, image: core.Image) -> Layout:
        """Return the form of a picture in a prompt.

        Raises:
            InvalidParameter: the picture's size is none that the model takes.
        """

    @abstractmethod
    def pixels(self, image: core.Image) -> Any:
        """Return what `stages` takes. Host work, on any thread."""

    @abstractmethod
    def renamed(self, name: str) -> str:
        """Return the name of a checkpoint's tensor among the parameters of `module`."""

    def sanitized(self, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return tensors in the shapes that `module` has: transformers has a convolution's channels
        before its kernel, and mlx-vlm after it."""
        wanted = dict(tree_flatten(self.module.parameters()))
        return {
            name: mx.moveaxis(array, 1, -1)
            if array.ndim > 3 and name in wanted and array.shape != wanted[name].shape
            else array
            for name, array in tensors.items()
        }

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Return the list in which `module` has its layers."""

    @abstractmethod
    def parts(self, pixels: Any) -> Iterable[Any]:
        """Yield the parts of a picture that are computed one after the other."""

    @abstractmethod
    def features(self, part: Any) -> Features:
        """Return the features of a part, not evaluated."""

    def record_layers(self) -> None:
        """Have layers' outputs recorded, once the weights are there. On a CPU, where a whole layer
        takes several times as long as a small model's step, those of attention, too."""
        layers = self.layers()
        if mx.default_device() == mx.cpu:
            for layer in layers:
                for name in ATTENTIONS & layer.keys():
                    setattr(layer, name, Recorded(layer[name], self._recording))
        layers[:] = [Recorded(layer, self._recording) for layer in layers]

    def stages(self, pixels: Any) -> Generator[Sequence[mx.array], None, Features]:
        """Yield the arrays to evaluate before each next slice of work: the output of each layer,
        and on a CPU of each layer's attention. Return the features. On the MLX thread."""
        found = []
        for part in self.parts(pixels):
            self._recording.outputs = []
            features = self._scaled(self.features(part))
            outputs, self._recording.outputs = self._recording.outputs, []
            for place in range(len(outputs)):
                yield [outputs[place]]
                # A layer's output is needed by the next one alone.
                outputs[place] = mx.array(0)
            yield [features.rows, *features.levels]
            found.append(features)
        if len(found) == 1:
            return found[0]
        levels = zip(*(each.levels for each in found), strict=True)
        return Features(
            mx.concatenate([each.rows for each in found]),
            tuple(mx.concatenate(list(level)) for level in levels),
        )

    def _scaled(self, features: Features) -> Features:
        rows = features.rows.astype(self.dtype)
        if self.scale != 1.0:
            rows = (features.rows.astype(mx.float32) / self.scale).astype(self.dtype)
        return Features(rows, tuple(level.astype(self.dtype) for level in features.levels))


def refused(image: core.Image, why: str) -> InvalidParameter:
    """Return the error over a picture that a model can't take."""
    return InvalidParameter(f"This model can't take the picture: {why}.", param=image.param)

"""Parts that the architectures of encoders share: their settings, sizes and attention. (Families of
models that generate are declared in `models/family.py`.)"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.encoders.batch import Mask, PaddedBatch
from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.checkpoint.rope import rotations

Activate = Callable[[mx.array], mx.array]
Chosen = TypeVar("Chosen")

ACTIVATIONS: dict[str, Activate] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
}
"""Activations by transformers' names (`transformers.activations.ACT2FN`)."""


@dataclass(frozen=True, slots=True)
class Config:
    """A model's config.json. A missing setting has the default of transformers' class."""

    values: Mapping[str, Any]
    model_id: str

    def whole(self, name: str, default: int, least: int = 1) -> int:
        """
        Raises:
            ModelLoadFailed: the setting is no whole number, or below `least`.
        """
        value = self._given(name, default)
        if type(value) is not int or value < least:
            raise self._wrong(name, f"a whole number from {least} on")
        return value

    def number(self, name: str, default: float) -> float:
        """
        Raises:
            ModelLoadFailed: the setting is no positive number.
        """
        value = self._given(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """
        Raises:
            ModelLoadFailed: the setting is neither true nor false.
        """
        value = self._given(name, default)
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def choice(self, name: str, offered: Mapping[str, Chosen], default: str) -> Chosen:
        """Return what the setting names.

        Raises:
            ModelNotSupported: it names none of `offered`.
        """
        value = self._given(name, default)
        if not isinstance(value, str) or value not in offered:
            known = ", ".join(map(repr, offered))
            only = f"only {known} is" if len(offered) == 1 else f"{known} are"
            raise ModelNotSupported(f"{self.model_id} has {name} {value!r}; {only} known.")
        return offered[value]

    def activation(self, name: str, default: str) -> Activate:
        return self.choice(name, ACTIVATIONS, default)

    def must_be(self, name: str, only: object) -> None:
        """Check a setting whose other values are variations that are not known here.

        Raises:
            ModelNotSupported: it is another one than `only`.
        """
        value = self._given(name, only)
        if value != only:
            raise ModelNotSupported(
                f"{self.model_id} has {name} {value!r}; only {only!r} is known."
            )

    def layer_types(self, layers: int, default: Callable[[int], bool]) -> list[bool]:
        """Return for each layer whether it attends to a window only. `default` tells it of a
        layer by its number, for a config that does not say.

        Raises:
            ModelNotSupported: a layer is of another type.
            ModelLoadFailed: there is not one type for each layer.
        """
        given = self.values.get("layer_types")
        if given is None:
            return [default(index) for index in range(layers)]
        if not isinstance(given, list) or len(given) != layers:
            raise self._wrong("layer_types", f"a list of {layers} types, one for each layer")
        kinds = {"full_attention": False, "sliding_attention": True}
        if odd := [kind for kind in given if kind not in kinds]:
            raise ModelNotSupported(
                f"{self.model_id} has a layer of type {odd[0]!r}; known are {', '.join(kinds)}."
            )
        return [kinds[kind] for kind in given]

    def rotary_base(self, default: float, kind: str = "", old_name: str = "rope_theta") -> float:
        """Return the base of RoPE for the layers of type `kind`; "" stands for all.

        old_name: the setting's name before transformers 5.

        Raises:
            ModelNotSupported: positions are scaled, or not all of a head is rotated.
            ModelLoadFailed: a setting has an unknown form.
        """
        found = rotations(self.values)
        for rope in found.values():
            if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1) != 1:
                raise ModelNotSupported(
                    f"{self.model_id} has a RoPE scaling, or one of a part of each head: not done "
                    "here."
                )
        everywhere = found.get("", {}) if old_name == "rope_theta" else {}
        base = found.get(kind, everywhere).get("rope_theta")
        return float(base) if base is not None else self.number(old_name, default)

    def check_code(self) -> None:
        """Check that the checkpoint has no code of its own, by which a decoder may see a text in
        both directions.

        Raises:
            ModelNotSupported: it has.
        """
        if self.values.get("auto_map"):
            raise ModelNotSupported(
                f"{self.model_id} comes with code of its own (auto_map in its config.json), which "
                "is not run; its architecture may be another one than its model_type says."
            )

    def _given(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def _wrong(self, name: str, allowed: str) -> ModelLoadFailed:
        return ModelLoadFailed(
            f"{self.model_id} can't be loaded: its config.json has {name} "
            f"{self.values.get(name)!r}; it should be {allowed}."
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Figures of an architecture that memory and limits are told from.

    widest: numbers of the widest product for a token. head: numbers of an attention head. segments:
    the number of them; 2 for an architecture that reads none. biased: attention has a bias for each
    head, so that all its scores are in memory at once.
    """

    vocabulary: int
    hidden: int
    widest: int
    heads: int
    head: int
    segments: int = 2
    biased: bool = False


class Body(nn.Module):  # type: ignore[misc]
    """An architecture without pooling and head."""

    sizes: Sizes

    @abstractmethod
    def __call__(self, batch: PaddedBatch, made: list[mx.array]) -> mx.array:
        """Return the last layer's output (rows, longest, hidden), and append each layer's to
        `made`, not evaluated."""


class ScoreHead(nn.Module):  # type: ignore[misc]
    """The layers that make scores of an architecture's output."""

    @abstractmethod
    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        """Return (rows, labels) for `hidden`, (rows, longest, hidden)."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture, and the names of its checkpoints.

    sizes: checks a config, and returns its figures; no module is made.
    head: makes the head of `...ForSequenceClassification`. prefix: what the names of the bare model
    begin with in a checkpoint of a model with a head. unread: beginnings of the names that a model
    may have beside what is read: heads for other tasks, and tables that can be computed.
    renamed: old parts of names, with those of today. wide: activations outgrow float16.
    """

    sizes: Callable[[Config], Sizes]
    body: Callable[[Config], Body]
    head: Callable[[Config, int], ScoreHead] | None
    prefix: str
    unread: tuple[str, ...]
    renamed: Mapping[str, str] | None = None
    wide: bool = False

    def plain(self, name: str) -> str:
        """Return a parameter's name as the modules have it."""
        name = name.removeprefix(self.prefix)
        for old, new in (self.renamed or {}).items():
            name = name.replace(old, new)
        return name


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, mask: Mask | None, scale: float
) -> mx.array:
    """Return (rows, longest, heads * head) for queries, keys and values (rows, heads, longest,
    head), of which keys and values may have fewer heads."""
    mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return mixed.transpose(0, 2, 1, 3).flatten(2)


def split(x: mx.array, heads: int) -> mx.array:
    """Return (rows, heads, longest, head) for x (rows, longest, heads * head)."""
    rows, longest, _ = x.shape
    return x.reshape(rows, longest, heads, -1).transpose(0, 2, 1, 3)


def head_size(config: Config, hidden: int, heads: int) -> int:
    """
    Raises:
        ModelLoadFailed: the heads don't divide the hidden size.
    """
    if hidden % heads:
        raise ModelLoadFailed(
            f"{config.model_id} can't be loaded: by its config.json the hidden size {hidden} is to "
            f"be divided among {heads} attention heads."
        )
    return hidden // heads

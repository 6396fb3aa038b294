"""Check that a built model computes its rotations (RoPE) as its config.json says.

A class that does not know a setting silently falls back on a default, and the model answers
fluently and wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mlx import nn
from mlx_lm.models import rope_utils

from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.models.checkpoint.rope import SECTIONS, rotations, scaling

Frequencies = np.ndarray[Any, np.dtype[np.float64]]
FREQUENCIES = (
    rope_utils.SuScaledRoPE,
    rope_utils.Llama3RoPE,
    rope_utils.YarnRoPE,
    rope_utils.ProportionalRoPE,
)
ALIKE = ("default", "mrope")
"""RoPE types whose rotations of text depend on the base alone."""
KNOWN = (nn.RoPE, rope_utils.DynamicNTKScalingRoPE, *FREQUENCIES)


def check_rotations(model: nn.Module, config: Mapping[str, Any], file: Path) -> None:
    """Check that the model applies every base and scaling of its config.

    Raises:
        ModelNotSupported: the model does not apply a base or a scaling that `config`, read from
            `file`, has for its layers; the message names it.
    """
    ropes = [module for module in model.modules() if is_rotation(module)]
    if not ropes or not all(isinstance(rope, KNOWN) for rope in ropes):
        # The model has no rotations, or code of its own for them, which reads its own settings.
        return
    section = _section(config)
    kinds = section.get("layer_types")
    for kind, wanted in rotations(section).items():
        if kind and isinstance(kinds, list) and kind not in kinds:
            continue
        if (base := wanted.get("rope_theta")) is None:
            continue
        scaled = None if wanted["rope_type"] in ALIKE else scaling(wanted)
        based = any(_has_base(rope, base, wanted, section) for rope in ropes)
        applied = scaled is None or any(not _is_plain(rope) for rope in ropes)
        if not based or not applied:
            said = f"rope_theta {base:g}" + (f", rope_type {scaled['rope_type']}" if scaled else "")
            raise ModelNotSupported(
                f"{file} has the rotary settings (rope_parameters, or rope_theta and rope_scaling) "
                f"{said}{f' for {kind}' if kind else ''}; mlx-lm {version('mlx-lm')}'s "
                f"{config.get('model_type')} does not apply them."
            )


def is_rotation(module: nn.Module) -> bool:
    name = type(module).__name__
    return isinstance(module, KNOWN) or "RoPE" in name or "Rotary" in name


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text model."""
    sections = (config.get(name) for name in SECTIONS)
    text = next((section for section in sections if isinstance(section, Mapping)), None)
    return text if text is not None and rotations(text) else config


def _has_base(
    rope: nn.Module, base: float, wanted: Mapping[str, Any], section: Mapping[str, Any]
) -> bool:
    """Return whether `rope` rotates by `base`, scaled as `wanted` says or not at all."""
    own = frequencies(rope)
    return any(
        own.shape == expected.shape and bool(np.allclose(own, expected, rtol=1e-3))
        for expected in _expected(rope, base, wanted, section)
    )


def _expected(
    rope: nn.Module, base: float, wanted: Mapping[str, Any], section: Mapping[str, Any]
) -> Iterator[Frequencies]:
    dims = dimensions(rope)
    yield _plain(dims, base)
    if (scaled := scaling(wanted)) is None:
        return
    length = section.get("max_position_embeddings") or 1
    original = section.get("original_max_position_embeddings") or length
    try:
        made = rope_utils.initialize_rope(
            dims,
            base,
            False,
            {"original_max_position_embeddings": original, **scaled},
            length,
        )
    except (LookupError, ValueError, TypeError, ArithmeticError):
        # The type is unknown or lacks a setting: a class that reads it reports which.
        return
    yield frequencies(made)


def _is_plain(rope: nn.Module) -> bool:
    return isinstance(rope, nn.RoPE) and rope.scale == 1.0


def dimensions(rope: nn.Module) -> int:
    size: int = rope.dim if isinstance(rope, rope_utils.SuScaledRoPE) else rope.dims
    return size


def frequencies(rope: nn.Module) -> Frequencies:
    """Return the positions per radian of each pair's rotation, shape (dims / 2,). For a dynamic
    scaling these are the values for texts of the model's own length."""
    match rope:
        case nn.RoPE():
            scale: float = rope.scale
            return _plain(rope.dims, rope.base) / scale
        case rope_utils.DynamicNTKScalingRoPE():
            return _plain(rope.dims, rope.base)
        case _:
            own: Frequencies = np.array(rope._freqs, np.float64)
            return own


def _plain(dims: int, base: float) -> Frequencies:
    turns: Frequencies = np.power(float(base), np.arange(0, dims, 2, dtype=np.float64) / dims)
    return turns

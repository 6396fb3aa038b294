"""The rotary settings (RoPE) of a config.json, in every form that the libraries read them from.

transformers 4 wrote `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`, one
mapping or one for each type of layer. Most classes of mlx-lm read one of these forms and fall back
on a default base where they find the other. So whichever form a config has, it gets all of them.

Source: transformers 5.24, `modeling_rope_utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.families import CONFIG

Settings = Mapping[str, Any]

PARAMETERS = "rope_parameters"
SECTIONS = ("text_config", "language_config", "llm_config")
"""Keys under which a model that also sees or hears has the settings of its text model."""
LAYER_TYPES = ("full_attention", "sliding_attention")

GLOBAL_BASES = ("rope_theta", "rotary_emb_base", "global_rope_theta")
LOCAL_BASES = ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta", "local_rope_theta")
PARTS = ("partial_rotary_factor", "rotary_pct")
NOT_SCALING = ("rope_theta", "partial_rotary_factor")


def in_all_forms(config: Settings) -> dict[str, Any]:
    """Return `config` with its rotary settings, and those of its text model, in every form.

    A config without rotary settings is left as it is.

    Raises:
        ModelLoadFailed: a setting has an unknown form; the message names it.
    """
    changed = {
        name: in_all_forms(section)
        for name in SECTIONS
        if isinstance(section := config.get(name), Mapping)
    }
    return {**config, **_forms(config), **changed}


def rotations(config: Settings) -> dict[str, dict[str, Any]]:
    """Return the settings by type of layer, as in `rope_parameters`; "" stands for every type.

    Each has `rope_theta` if the config names a base, and `rope_type`.

    Raises:
        ModelLoadFailed: a setting has an unknown form; the message names it.
    """
    written = _written(config)
    if not written and config.get("model_type") in CONFIG.rope_by_layer:
        # These classes have defaults by type of layer, which a base without a type leaves alone.
        return {}
    nested = {kind: rope for kind, rope in written.items() if isinstance(rope, Mapping)}
    beside = {name: value for name, value in written.items() if name not in nested}
    named = {
        name: config[name] for name in NOT_SCALING if isinstance(config.get(name), int | float)
    }
    if nested:
        common = {name: beside[name] for name in NOT_SCALING if name in beside}
        return {kind: _standard({**named, **common, **rope}) for kind, rope in nested.items()}
    flat = {**named, **beside}
    return {"": _standard(flat)} if flat else {}


def _written(config: Settings) -> dict[str, Any]:
    """Return `rope_parameters` and `rope_scaling` in one; the latter wins, but is ignored where
    the former is by type of layer."""
    new, old = (_mapping(config, name) for name in (PARAMETERS, "rope_scaling"))
    if any(isinstance(rope, Mapping) for rope in new.values()):
        return dict(new)
    return {**new, **old}


def _mapping(config: Settings, name: str) -> Settings:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelLoadFailed(f"config.json has {name} {value!r}; an object or null is expected.")
    return value


def _standard(rope: Settings) -> dict[str, Any]:
    """Return the settings with both names of their type, as mlx-lm's `initialize_rope` takes
    them."""
    found = {name: value for name, value in rope.items() if value is not None}
    for name in NOT_SCALING:
        value = found.get(name, 1)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise ModelLoadFailed(
                f"config.json has {name} {value!r} in its rotary settings; a positive number is "
                "expected."
            )
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "su" or (kind == "yarn" and "long_factor" in found):
        # Phi-3's first configs have the old names.
        kind = "longrope"
    found |= {"rope_type": kind, "type": kind}
    factor = found.get("factor")
    if isinstance(factor, int) and not isinstance(factor, bool):
        # Some classes assert that it is a float.
        found["factor"] = float(factor)
    return _with_amplitude(found) if kind == "yarn" else found


def _with_amplitude(rope: dict[str, Any]) -> dict[str, Any]:
    """Return YaRN's settings with `attention_factor` as an equal `mscale`, which mlx-lm reads."""
    amplitude, factor = rope.get("attention_factor"), rope.get("factor")
    if not isinstance(amplitude, int | float) or not isinstance(factor, float) or factor <= 1:
        return rope
    # mlx-lm's amplitude is (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
    per_unit, of_all = 0.1 * math.log(factor), rope.get("mscale_all_dim", 0)
    mscale = (amplitude * (per_unit * of_all + 1.0) - 1.0) / per_unit
    return {**rope, "mscale": mscale, "mscale_all_dim": of_all}


def _forms(config: Settings) -> dict[str, Any]:
    found = rotations(config)
    if not found:
        return {}
    main = found.get("") or found.get("full_attention") or next(iter(found.values()))
    local = next((rope for kind, rope in found.items() if kind not in ("", "full_attention")), None)
    forms: dict[str, Any] = {PARAMETERS: _parameters(config, found)}
    if PARAMETERS in config or "rope_scaling" in config:
        forms["rope_scaling"] = scaling(main)
    if (base := main.get("rope_theta")) is not None:
        forms |= dict.fromkeys(GLOBAL_BASES, base)
    if local is not None and (base := local.get("rope_theta")) is not None:
        forms |= dict.fromkeys(LOCAL_BASES, base)
    if "original_max_position_embeddings" in main:
        # Phi-3's class reads it there.
        forms["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", main["original_max_position_embeddings"]
        )
    if (part := main.get("partial_rotary_factor")) is not None:
        forms |= dict.fromkeys(PARTS, part) | dict(_rotary_dim(config, part))
    return forms


def _rotary_dim(config: Settings, part: float) -> Iterator[tuple[str, int]]:
    """Yield MiniMax's `rotary_dim`, the number of rotated elements, if the config lacks it."""
    size = config.get("head_dim")
    if isinstance(size, int) and "rotary_dim" not in config and PARAMETERS in config:
        yield "rotary_dim", int(size * part)


def _parameters(config: Settings, found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return `rope_parameters` as the config's class reads it."""
    if config.get("model_type") not in CONFIG.rope_by_layer:
        alike = [rope for rope in found.values() if rope != next(iter(found.values()))] == []
        return dict(next(iter(found.values()))) if alike else dict(found)
    if "" not in found:
        return dict(found)
    kinds = config.get("layer_types") or LAYER_TYPES
    return {kind: dict(found[""]) for kind in dict.fromkeys(kinds)}


def scaling(rope: Settings) -> dict[str, Any] | None:
    """Return `rope_scaling` in the old form; None where positions are not scaled."""
    kept = {name: value for name, value in rope.items() if name not in NOT_SCALING}
    if kept["rope_type"] == "proportional" and "partial_rotary_factor" in rope:
        kept["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return None if kept["rope_type"] == "default" else kept

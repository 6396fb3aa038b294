"""The base of a model's rotations where its config.json names none.

mlx-lm's classes have defaults, and some differ from those by which the model was made: 100 000
instead of 10 000 for StarCoder 2. A base that a config leaves out is transformers' default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_manager.mlx_server.models.checkpoint.rope import rotations
from mlx_manager.mlx_server.models.families import CONFIG


def with_base(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config`, and its text model's, with transformers' default base, if they name none
    and transformers knows the architecture."""
    changed = {**config, **_base(config)}
    if isinstance(text := config.get("text_config"), Mapping):
        changed["text_config"] = with_base(text)
    return changed


def _base(config: Mapping[str, Any]) -> dict[str, Any]:
    found = rotations(config)
    if any(name in config for name in ("rotary_emb_base", "attn_config", "rope_theta")):
        return {}
    if any("rope_theta" in rope for rope in found.values()):
        return {}
    if not found and config.get("model_type") in CONFIG.rope_by_layer:
        return {}
    default = default_base(str(config.get("model_type", "")))
    if isinstance(default, Mapping):
        local = {"rope_local_base_freq": default["local"]} if "local" in default else {}
        default = default.get("global")
        if default is not None and "rope_local_base_freq" not in config:
            return {"rope_theta": default, **local}
    return {} if default is None else {"rope_theta": default}


def default_base(model_type: str) -> Any:
    """Return the rotation base that transformers takes by default: a number, or one for `global`
    and one for `local` layers; None if transformers does not know the architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    return getattr(CONFIG_MAPPING[model_type], "default_theta", None)

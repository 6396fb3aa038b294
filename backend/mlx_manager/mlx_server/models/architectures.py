"""Kinds of model that the libraries can build, and the libraries' spelling of their names."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mlx_manager.mlx_server.models.families import VISIONS, letters

ENCODERS = frozenset(
    {
        *("bert", "camembert", "distilbert", "gemma3_text", "modernbert", "mpnet", "qwen3"),
        *("roberta", "xlm-roberta"),
    }
)
"""Encoders that are served; `encoders.architectures` has their modules."""
ALSO_GENERATE = frozenset({"gemma3_text", "qwen3"})
"""Those of them whose architecture generates text, too."""
OTHER_ENCODERS = frozenset({"deberta-v2", "electra", "new", "nomic_bert"})
"""Encoders that are not served, listed so that the refusal can say what they are."""
SEEING = frozenset(kind for facts in VISIONS if facts.language for kind in facts.kinds)
"""`model_type`s of models that see, of which mlx-lm builds the language model alone."""


def has_architecture(model_type: str) -> bool:
    """Return whether mlx-lm can build a `model_type`."""
    return architecture(model_type) is not None


@cache
def architecture(model_type: str) -> str | None:
    """Return a `model_type` as mlx-lm spells it; None if mlx-lm can't build one."""
    if (known := known_name(model_type)) in architecture_modules() | SEEING:
        return known
    return _spelled(model_type, renamed_architectures())


@cache
def known_name(model_type: str) -> str:
    """Return a `model_type` in the spelling of a module's or an encoder's name, else unchanged.

    Imports nothing of mlx-lm.
    """
    names = architecture_modules() | ENCODERS | OTHER_ENCODERS | SEEING
    return _spelled(model_type, names) or model_type


def with_known_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its `model_type`, and its text model's, as the libraries spell them, and
    with the text model's settings in `text_config`."""
    changed = dict(config)
    if isinstance(kind := config.get("model_type"), str):
        changed["model_type"] = known_name(kind)
    # InternVL's older configs call it llm_config.
    if isinstance(text := config.get("text_config", config.get("llm_config")), Mapping):
        changed["text_config"] = with_known_names(text)
    return changed


def _spelled(model_type: str, names: Collection[str]) -> str | None:
    if model_type in names:
        return model_type
    meant = letters(model_type)
    return next((name for name in sorted(names) if letters(name) == meant), None)


@cache
def architecture_modules() -> frozenset[str]:
    """Return the `model_type`s that have a module of their name, without importing mlx-lm."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return frozenset(
        file.stem
        for place in spec.submodule_search_locations
        for file in Path(place, "models").glob("*.py")
    )


@cache
def renamed_architectures() -> frozenset[str]:
    """Return the `model_type`s that the module of another one builds."""
    # This imports transformers, which takes a second, so it is done only when needed.
    from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

    modules = architecture_modules()
    renamed = {kind for kind, module in MODEL_REMAPPING.items() if module in modules}
    return frozenset(renamed | {kind for kind, _ in MODEL_ARCHITECTURE_REMAPPING})

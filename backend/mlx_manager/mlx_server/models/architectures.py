"""Which kinds of model mlx-lm can build."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path


@cache
def has_architecture(model_type: str) -> bool:
    """Whether mlx-lm can build a `model_type`."""
    return model_type in architecture_modules() or model_type in renamed_architectures()


@cache
def architecture_modules() -> frozenset[str]:
    """The `model_type`s that have a module of their name. Imports nothing of mlx-lm."""
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
    """The `model_type`s that another one's module builds."""
    # Imports transformers, which takes a second: not before it is needed.
    from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

    modules = architecture_modules()
    renamed = {kind for kind, module in MODEL_REMAPPING.items() if module in modules}
    return frozenset(renamed | {kind for kind, _ in MODEL_ARCHITECTURE_REMAPPING})

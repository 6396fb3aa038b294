"""Families of models: one file each, with one declaration, `FAMILY`. No MLX is imported here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from mlx_manager.mlx_server.models.family import ConfigFacts, Family, MTPFacts, VisionFacts
from mlx_manager.mlx_server.models.module_facts import ModuleFacts

Facts = TypeVar("Facts", ConfigFacts, ModuleFacts)

_FILES = (import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__))

FAMILIES: Mapping[str, Family] = {file.FAMILY.name: file.FAMILY for file in _FILES}
"""Families by their names, each from a file of this folder."""

DEFAULT = Family("default", named=r"(?!)")
"""Family of models of no other: their tokenizers, templates and modules tell everything."""


def _joined(several: Iterable[Facts], empty: Facts) -> Facts:
    found = {each.name: getattr(empty, each.name) for each in fields(empty)}
    for facts in several:
        for name, before in found.items():
            more = getattr(facts, name)
            found[name] = before | more if isinstance(more, dict) else before + more
    return type(empty)(**found)


CONFIG = _joined((family.config for family in FAMILIES.values()), ConfigFacts())
MODULES = _joined((family.modules for family in FAMILIES.values()), ModuleFacts())
"""Facts about the config.json files and the modules of all families."""


VISIONS = tuple(facts for family in FAMILIES.values() for facts in family.vision)
"""Checkpoints that see, of all families."""


def vision_facts(config: Mapping[str, Any]) -> VisionFacts | None:
    """Return the declaration of a checkpoint that sees, by its config.json; None for others."""
    encoder = config.get("vision_config")
    if not isinstance(encoder, Mapping):
        return None
    kind, its = letters(config.get("model_type")), encoder.get("model_type")
    found = (each for each in VISIONS if kind in map(letters, each.kinds))
    return next((each for each in found if each.encoder in ("", its)), None)


def mtp_facts(model_type: str) -> MTPFacts | None:
    """Return the declaration of the MTP heads of checkpoints of this `model_type`, as mlx-lm spells
    it; None if they have none."""
    declared = (facts for family in FAMILIES.values() for facts in family.mtp)
    return next((facts for facts in declared if model_type in facts.kinds), None)


def letters(name: object) -> str:
    """Return a name in lower case, with dashes, dots and blanks as underscores."""
    return re.sub(r"[-_.\s]+", "_", str(name).strip().lower())


@cache
def family_of(text: str) -> Family:
    """Return the family that a `model_type` or a model's name mentions first.

    A distilled model's name ends with the family that it was made from, and its template does not.
    """
    found = {
        match.start(): family
        for family in FAMILIES.values()
        if (match := re.search(family.named, text.lower()))
    }
    return found[min(found)] if found else DEFAULT


def detect_model_family(source: str | Mapping[str, Any]) -> str:
    """Return the name of the family by a model's name or its config.json; "default" if there is
    none."""
    text = source if isinstance(source, str) else str(source.get("model_type", ""))
    return family_of(text).name

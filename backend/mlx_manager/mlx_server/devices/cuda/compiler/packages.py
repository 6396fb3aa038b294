"""Folders of NVIDIA's files in installed packages."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path


def folders_of(names: Iterable[str]) -> list[Path]:
    """Return the folders that there are of "PACKAGE/FOLDER" in installed packages."""
    parts = (name.partition("/") for name in names)
    found = (Path(place) / rest for package, _, rest in parts for place in _places(package))
    return [folder for folder in found if folder.is_dir()]


def _places(package: str) -> list[str]:
    spec = find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or ())

"""Deletion of a model's files, and of nothing else."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_manager.mlx_server.config import EMBEDDED
from mlx_manager.mlx_server.errors import InvalidRequest, ModelNotFound
from mlx_manager.mlx_server.models.hub import repository_folder

NAME = re.compile(r"(?!\.)[^/\\\0-\x1f]+(/(?!\.)[^/\\\0-\x1f]+){0,2}")
"""Pattern of one to three folder names, the depth to which `models_dir` is searched."""


Origin = Literal["models_dir", "hf_cache"]


@dataclass(frozen=True, slots=True)
class Removal:
    """A model's own folders, which hold nothing of another. `nbytes`: what deleting them frees."""

    id: str
    origin: Origin
    folders: tuple[Path, ...]
    nbytes: int

    def carry_out(self) -> None:
        """Delete the folders.

        Raises:
            OSError: a file can't be deleted; others may be gone.
        """
        for folder in self.folders:
            shutil.rmtree(folder)


def plan_removal(name: str, models_dir: Path | None, cache: Path) -> Removal:
    """Return the folders to delete for a name in the catalog; `models_dir` precedes the cache.

    Raises:
        InvalidRequest: the model is embedded or lies elsewhere, or `name` is no name.
        ModelNotFound: neither place has it.
    """
    if name in EMBEDDED:
        raise InvalidRequest(f"{name} is embedded: it is part of the program.")
    if NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{name!r} is no name of a model as `mlx-manager list` shows them; folders elsewhere "
            "are yours to delete."
        )
    if models_dir is not None:
        folder = models_dir / name
        if (folder / "config.json").is_file():
            check_inside(folder, models_dir)
            return Removal(name, "models_dir", (folder,), size_of(folder))
        for place in (models_dir, models_dir / "hub"):
            if (found := _cached(name, "models_dir", place)) is not None:
                return found
    if (found := _cached(name, "hf_cache", cache)) is not None:
        return found
    places = f"{cache} nor {models_dir}" if models_dir else str(cache)
    raise ModelNotFound(f"There is no model {name!r} in {places}.", param="model")


def _cached(name: str, origin: Origin, cache: Path) -> Removal | None:
    folder = repository_folder(cache, name)
    if not folder.is_dir():
        return None
    check_inside(folder, cache)
    locks = repository_folder(cache / ".locks", name)
    folders = (folder, locks) if locks.is_dir() else (folder,)
    return Removal(name, origin, folders, size_of(folder))


def check_inside(folder: Path, place: Path) -> None:
    """Check that no link leads from `folder` out of `place`.

    Raises:
        InvalidRequest: a link leads out of `place`.
    """
    real, name = folder.resolve(), folder.relative_to(place)
    if real != place.resolve() / name:
        raise InvalidRequest(f"{folder} is a link to {real}: delete the link yourself.")


def size_of(folder: Path) -> int:
    files = (file.lstat() for file in folder.rglob("*") if file.is_file() or file.is_symlink())
    return sum(file.st_size for file in files)

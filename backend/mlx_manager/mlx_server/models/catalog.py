"""Catalog of the models that can be loaded; a client can name no others."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Literal

from mlx_manager.demo_model import demo_model_path
from mlx_manager.demo_vision_model import demo_vision_model_path
from mlx_manager.mlx_server.config import (
    DEMO_MODEL,
    DEMO_VISION_MODEL,
    EMBEDDED,
    CatalogSources,
    expanded,
    is_folder,
)
from mlx_manager.mlx_server.core import Kind
from mlx_manager.mlx_server.errors import InvalidSettings, ModelLoadFailed, ModelNotFound
from mlx_manager.mlx_server.models import hub
from mlx_manager.mlx_server.models.architectures import ENCODERS, has_architecture
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.sentence import BERT_LIMITS, longest_text
from mlx_manager.mlx_server.models.checkpoint.weight_files import INDEX
from mlx_manager.mlx_server.models.families import detect_model_family
from mlx_manager.mlx_server.models.kinds import kind_of
from mlx_manager.mlx_server.models.modalities import input_modalities
from mlx_manager.mlx_server.models.removal import Removal, plan_removal
from mlx_manager.mlx_server.models.settings import ModelsFile
from mlx_manager.mlx_server.utils.broken import BROKEN
from mlx_manager.mlx_server.utils.text import encodable

log = logging.getLogger(__name__)

Origin = Literal["embedded", "configured", "models_dir", "hf_cache", "remote"]
RESCAN_SECONDS = 5.0
MOST_NAMED = 20
MOST_DOUBTED = 3
DESCRIBING = ("config.json", "tokenizer_config.json", BERT_LIMITS, INDEX)
"""The files that a source is described by, beside its weights."""
CONFIGS = ("*/config.json", "*/*/config.json", "*/*/*/config.json")
"""Patterns of the places of models in a folder of models, which may also be a cache of the hub."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded, as its files describe it.

    path: its folder; None when `repository` must be downloaded first, which `downloadable` allows
    or not.
    nbytes: the size of its weights' files. kind None, model_type "" and the zeros mean unknown: it
    is not here yet, or loading it will say what is wrong with it.
    urls: the servers on other machines that have it, of origin "remote"; none if it is loaded here.
    """

    id: str
    path: Path | None
    origin: Origin
    model_type: str = ""
    family: str = "default"
    context_length: int = 0
    nbytes: int = 0
    repository: str = ""
    downloadable: bool = False
    kind: Kind | None = None
    input_modalities: tuple[str, ...] = ("text",)
    urls: tuple[str, ...] = ()


class Catalog:
    """The models in the places that the owner named, scanned at most every few seconds.

    Its methods read the disk: call them off the event loop, on any thread.
    """

    def __init__(
        self,
        sources: CatalogSources,
        models: ModelsFile | None = None,
        *,
        cache_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._models = models or ModelsFile()
        self._cache_folder = cache_folder or hub.cache_folder()
        self._clock = clock
        self._lock = threading.Lock()
        self._found: Mapping[str, ModelSource] = {}
        self._fresh_until = float("-inf")
        self._told_empty = False
        if sources.hf_cache and (reason := hub.why_closed(self._cache_folder)):
            log.warning("models in %s are not offered: %s", self._cache_folder, reason)

    def models(self) -> tuple[ModelSource, ...]:
        """Return the models that can be loaded, the default model first."""
        with self._lock:
            if self.stale:
                self._look()
            return tuple(self._found.values())

    @property
    def stale(self) -> bool:
        """Return whether the last scan is so old that the next call of `models` scans again."""
        return self._clock() >= self._fresh_until

    def has(self, model_id: str) -> bool:
        """Return whether a model was on offer at the last scan, without reading the disk."""
        return model_id in self._found and self.allows(model_id)

    def find(self, model_id: str) -> ModelSource:
        """Return the source of a model.

        Raises:
            ModelNotFound: nothing of that name is offered; the message names what is.
        """
        models = self.models()
        for source in models:
            if source.id == model_id:
                return source
        offered = ", ".join(source.id for source in models[:MOST_NAMED])
        more = f" and {len(models) - MOST_NAMED} more" if len(models) > MOST_NAMED else ""
        raise ModelNotFound(
            f"There is no model {model_id!r} here. Offered: {offered}{more}. "
            "The server's owner offers more with "
            "--model, MLX_SERVER_AVAILABLE_MODELS or MLX_SERVER_MODELS_DIR.",
            param="model",
        )

    def named(self, name: str) -> ModelSource:
        """Return the source of a model that the owner's settings name, on offer or not."""
        self.models()
        found = self._found.get(name)
        return found or self._named(name, downloadable=self._sources.allow_download)

    def configure(self, models: ModelsFile) -> None:
        """Apply other settings and scan again: the models that they name are known on return."""
        with self._lock:
            self._models = models
            self._look()

    def rescan(self) -> None:
        """Scan again at the next call of `models`: something was downloaded or removed."""
        with self._lock:
            self._fresh_until = float("-inf")

    def removal(self, model_id: str) -> Removal:
        """Return the folders to delete for a model; see `removal.plan_removal`.

        Raises:
            InvalidRequest: it is embedded, no name, or lies elsewhere.
            ModelNotFound: neither the folder of models nor the cache has it.
        """
        return plan_removal(model_id, self._sources.models_dir, self._cache_folder)

    def allows(self, model_id: str) -> bool:
        """Return whether the owner lets a model be named; it need not be here."""
        return model_id == self._sources.default_model or self._models.allows(model_id)

    def _look(self) -> None:
        everything = self._all()
        self._found = {id: source for id, source in everything.items() if self.allows(id)}
        self._fresh_until = self._clock() + RESCAN_SECONDS
        folder = self._sources.models_dir
        if folder is not None and os.path.isdir(folder):
            within = (source.path for source in everything.values() if source.path is not None)
            empty = not any(path.is_relative_to(folder) for path in within)
            if empty and not self._told_empty:
                log.warning("%s", why_empty(folder))
            self._told_empty = empty

    def _all(self) -> dict[str, ModelSource]:
        """Return all models by id. Those that the owner's file makes from a base, or places on
        other machines, hide others."""
        found: dict[str, ModelSource] = {}
        for source in self._scan():
            if can_be_named(source.id):
                found.setdefault(source.id, source)
        for name, settings in self._models.models.items():
            if settings.url is not None:
                found[name] = ModelSource(
                    name, None, "remote", kind=settings.kind, urls=settings.url
                )
        made: dict[str, ModelSource] = {}
        for name, settings in self._models.models.items():
            if settings.base is not None:
                base = (
                    found.get(settings.base)
                    or made.get(settings.base)
                    or self._named(settings.base, downloadable=self._sources.allow_download)
                )
                made[name] = replace(base, id=name, origin="configured")
        return found | made

    def _scan(self) -> Iterator[ModelSource]:
        # The default model may be downloaded; others only if the owner allows downloads.
        yield self._named(self._sources.default_model, downloadable=True)
        for name in EMBEDDED:
            yield _embedded(name)
        for name in self._sources.available_models:
            yield self._named(name, downloadable=self._sources.allow_download)
        if self._sources.models_dir is not None:
            yield from folders_in(self._sources.models_dir)
        if self._sources.hf_cache:
            yield from cached_in(self._cache_folder, "hf_cache")

    def _named(self, name: str, *, downloadable: bool) -> ModelSource:
        """Return the source of the owner's `name`: an embedded model, a folder, a model in the
        folder of models, or a repository of the hub."""
        if name in EMBEDDED:
            return _embedded(name)
        if is_folder(name):
            return described(name, expanded(Path(name)), "configured")
        if (models_dir := self._sources.models_dir) is not None:
            inside = models_dir / name
            if os.path.isfile(inside / "config.json"):
                return described(name, inside, "models_dir")
            if (snapshot := hub.cached_model(models_dir, name)) is not None:
                return described(name, snapshot, "models_dir")
        if (snapshot := hub.cached_model(self._cache_folder, name)) is not None:
            return described(name, snapshot, "configured")
        return ModelSource(name, None, "configured", repository=name, downloadable=downloadable)


def _embedded(name: str) -> ModelSource:
    """Return the source of an embedded model."""
    folders = {DEMO_MODEL: demo_model_path, DEMO_VISION_MODEL: demo_vision_model_path}
    return described(name, folders[name](), "embedded")


def can_be_named(model_id: str) -> bool:
    """Return whether an id is valid text: a file's name may hold any bytes, a request may not."""
    return encodable(model_id) == model_id


def check_models_dir(models_dir: Path | None) -> None:
    """Check that the folder of models can be read; None passes.

    Raises:
        InvalidSettings: there is no such folder, or this user can't read it.
    """
    if models_dir is None:
        return
    try:
        os.scandir(models_dir).close()
    except OSError as error:
        reason = {
            FileNotFoundError: "there is no such folder",
            NotADirectoryError: "it is a file, not a folder",
        }.get(type(error), f"it can't be read: {error.strerror}")
        raise InvalidSettings(
            f"--models-dir (MLX_SERVER_MODELS_DIR) {models_dir}: {reason}."
        ) from None


def cached_in(cache: Path, origin: Origin) -> Iterator[ModelSource]:
    """Yield the models in a cache of the hub that can be run; other programs' are left out."""
    for repository, snapshot in hub.cached_models(cache):
        source = described(repository, snapshot, origin)
        text = source.kind == "text"
        if has_architecture(source.model_type) if text else source.model_type in ENCODERS:
            yield source


def folders_in(models_dir: Path) -> Iterator[ModelSource]:
    """Yield the models in `<models_dir>/<name>`, `<owner>/<name>` and `<owner>/<name>/<variant>`,
    and those of a hub's cache at `models_dir` or `<models_dir>/hub`."""
    if not os.path.isdir(models_dir):  # Path.is_dir raises for a name that is too long.
        return
    # Path.glob would stop at a folder that vanishes meanwhile or can't be read.
    found = (glob(name, root_dir=models_dir, include_hidden=True) for name in CONFIGS)
    configs = (models_dir / config for config in chain.from_iterable(found))
    folders = {config.parent for config in configs if os.path.exists(config)}
    for folder in sorted(folders):
        within = folder.relative_to(models_dir)
        if any(hub.is_repository(part) for part in within.parts):
            continue
        if not folders.isdisjoint(folder.parents):
            continue  # A part of that model, as sentence-transformers' 1_Pooling is.
        yield described(within.as_posix(), folder, "models_dir")
    for cache in (models_dir, models_dir / "hub"):
        yield from cached_in(cache, "models_dir")


def why_empty(models_dir: Path) -> str:
    """Return a sentence for people that says why a folder of models has no model."""
    if reason := hub.why_closed(models_dir):
        return f"{models_dir} can't be looked into: {reason}"
    if os.path.isfile(models_dir / "config.json"):
        return (
            f"{models_dir} is a model and no folder of models: name it with --model or "
            "MLX_SERVER_AVAILABLE_MODELS, or give the folder that it is in"
        )
    if repositories := hub.repositories_in(models_dir):
        named = ", ".join(repositories[:MOST_DOUBTED])
        return (
            f"none of the models in {models_dir} can be served: {named}"
            f"{', ...' if len(repositories) > MOST_DOUBTED else ''}. A model is complete if a "
            "snapshot has config.json and every file of its weights, in safetensors"
        )
    return (
        f"no model was found in {models_dir}. Looked for were NAME/config.json, "
        "OWNER/NAME/config.json and OWNER/NAME/VARIANT/config.json in it, and a Hugging Face "
        "cache's models--OWNER--NAME/snapshots"
    )


def described(model_id: str, folder: Path, origin: Origin) -> ModelSource:
    """Return a source as its folder's files describe it; unreadable facts are left unknown."""
    try:
        # The folder's own mtime shows files that are added later, as weights are in a download.
        files = (folder, *(file for name in DESCRIBING if (file := folder / name).is_file()))
        changed = tuple(file.stat().st_mtime_ns for file in files)
        model_type, context, nbytes, kind, modalities = _description(folder, changed)
    except (ModelLoadFailed, *BROKEN):
        # One folder of nonsense must not hide the others.
        return ModelSource(model_id, folder, origin)
    text = kind == "text"
    family = detect_model_family({"model_type": model_type}) if text else model_type
    return ModelSource(
        model_id,
        folder,
        origin,
        model_type,
        family,
        context,
        nbytes,
        kind=kind,
        input_modalities=modalities,
    )


@lru_cache(maxsize=4096)
def _description(
    folder: Path, changed: tuple[int, ...]
) -> tuple[str, int, int, Kind, tuple[str, ...]]:
    """Return (model_type, context length, bytes, kind, input modalities) of a folder; `changed`
    keys the cache."""
    model = ModelFolder.read(folder)
    kind = kind_of(model)
    try:
        context = model.context_length if kind == "text" else longest_text(model)
    except (ModelLoadFailed, *BROKEN):
        # The kind is known, so the model can be loaded; the load reports the error.
        context = 0
    modalities = input_modalities(model.config, folder) if kind == "text" else ("text",)
    return model.model_type, context, model.nbytes, kind, modalities

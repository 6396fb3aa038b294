"""Models from the Hugging Face hub: found in its cache, or fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mlx_manager.mlx_server.errors import ModelGated, ModelLoadFailed, ModelNotFound
from mlx_manager.mlx_server.models.folder import INDEX, WEIGHTS

# What mlx-lm reads; a repository may hold the same weights in several other formats.
FILES = (
    "*.json",
    WEIGHTS,
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)


def cache_folder() -> Path:
    """Where the hub's clients keep what they fetched (`HF_HUB_CACHE`, `HF_HOME`)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def cached_models(cache: Path) -> Iterator[tuple[str, Path]]:
    """(repository, folder) of every complete model in a cache, at its main revision.

    Layout: `models--<owner>--<name>/{refs/main, snapshots/<commit>/}`; a snapshot's files are
    links that are made once their content is there.
    """
    if not cache.is_dir():
        return
    for folder in sorted(cache.glob("models--*")):
        repository = folder.name.removeprefix("models--").replace("--", "/")
        snapshot = main_snapshot(folder)
        if snapshot is not None and is_complete(snapshot):
            yield repository, snapshot


def main_snapshot(folder: Path) -> Path | None:
    """The snapshot that `main` names, else the latest."""
    reference = folder / "refs" / "main"
    if reference.is_file():
        return folder / "snapshots" / reference.read_text().strip()
    snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def is_complete(snapshot: Path) -> bool:
    """Whether config.json and every weights file are there."""
    if not (snapshot / "config.json").is_file():
        return False
    files = {file.name for file in snapshot.glob(WEIGHTS) if file.is_file()}
    index = snapshot / INDEX
    if not index.is_file():
        return bool(files)
    try:
        return files >= set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False


def fetch(repository: str) -> Path:
    """Download a model, or what of it is missing, and return its folder. Blocks; shows progress.

    Raises:
        ModelNotFound: there is no such repository, or it is private.
        ModelGated: its owner asks for a licence to be accepted, or for a token.
        ModelLoadFailed: the download failed.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    page = f"https://huggingface.co/{repository}"
    try:
        return Path(snapshot_download(repository, allow_patterns=list(FILES)))
    except GatedRepoError as error:
        raise ModelGated(
            f"{repository} is gated: accept its terms at {page}, make a token there and set "
            "HF_TOKEN, or run `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"{repository} is no repository on the Hugging Face hub, or a private one.",
            param="model",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelLoadFailed(f"{repository} could not be downloaded: {error}") from error

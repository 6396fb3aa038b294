"""Models from the Hugging Face hub: found in its cache, or fetched."""

from __future__ import annotations

import errno
import fnmatch
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ClassVar, Self

from mlx_manager.mlx_server.errors import (
    DiskFull,
    DownloadFailed,
    ModelGated,
    ModelLoadFailed,
    ModelNotFound,
    ModelNotSupported,
)
from mlx_manager.mlx_server.models.checkpoint.weight_files import (
    INDEX,
    WEIGHTS,
    chosen,
    weight_files,
    weight_map,
)
from mlx_manager.mlx_server.utils.text import sized

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

# What mlx-lm reads beside the weights, which the index names: a repository may hold the same ones
# in several other formats.
FILES = (
    "*.json",
    # A sentence-transformers model's layers after the pooling.
    "*_Dense/model.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)


PREFIX = "models--"


def cache_folder() -> Path:
    """Where the hub's clients keep what they fetched (`HF_HUB_CACHE`, `HF_HOME`)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def why_closed(folder: Path) -> str:
    """Why this user can't look into a folder; "" if they can, or if there is none."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def cached_models(cache: Path) -> Iterator[tuple[str, Path]]:
    """(repository, folder) of every model that a cache has all of, at its main revision if that is
    complete, or else at the latest that is.

    Layout: `models--<owner>--<name>/{refs/main, snapshots/<commit>/}`; a snapshot's files are
    links that are made once their content is there.
    """
    for repository in repositories_in(cache):
        snapshot = cached_model(cache, repository)
        if snapshot is not None:
            yield repository, snapshot


def repositories_in(cache: Path) -> list[str]:
    """Those that a cache has something of."""
    try:
        names = sorted(os.listdir(cache))
    except OSError:
        return []
    return [name.removeprefix(PREFIX).replace("--", "/") for name in names if is_repository(name)]


def is_repository(name: str) -> bool:
    """Return whether a folder of that name in a cache holds a model."""
    return name.startswith(PREFIX)


def cached_model(cache: Path, repository: str) -> Path | None:
    """The folder of a model that a cache has all of: see `cached_models`."""
    try:
        return next(filter(is_complete, snapshots(repository_folder(cache, repository))), None)
    except (OSError, ValueError):
        return None  # Not for this user, or not text: the others must be found all the same.


def snapshots(folder: Path) -> list[Path]:
    """Those of a repository: the one that `main` names, if it is there, then the latest first."""
    found = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    main = main_commit(folder)
    return sorted(found, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def main_commit(folder: Path) -> str:
    """Return the commit that `main` refers to; "" where the reference can't be read, as after a
    download that broke off."""
    reference = folder / "refs" / "main"
    try:
        return reference.read_text().strip() if reference.is_file() else ""
    except (OSError, ValueError):
        return ""


def is_complete(snapshot: Path) -> bool:
    """Whether config.json and every weights file are there."""
    return (snapshot / "config.json").is_file() and not weight_files(snapshot).problem


@dataclass(frozen=True, slots=True)
class HubFile:
    """blob: what a cache calls its content, whatever commits have it; "" where the hub says not."""

    nbytes: int
    blob: str


@dataclass(frozen=True, slots=True)
class Repository:
    """A model as the hub describes it.

    files: those that mlx-lm reads. licence, model_type: "" where it says none.
    gated: its owner asks for terms to be accepted first.
    """

    id: str
    commit: str
    files: Mapping[str, HubFile]
    licence: str
    gated: bool
    model_type: str

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files.values())

    def missing(self, cache: Path) -> int:
        """Bytes that a cache does not hold yet."""
        folder = repository_folder(cache, self.id)
        snapshot, blobs = folder / "snapshots" / self.commit, folder / "blobs"
        return sum(
            file.nbytes
            for name, file in self.files.items()
            if not ((snapshot / name).is_file() or (blobs / file.blob).is_file())
        )


def repository_folder(cache: Path, repository: str) -> Path:
    return cache / f"{PREFIX}{repository.replace('/', '--')}"


def look_up(repository: str) -> Repository:
    """Ask the hub what a model is, before anything of it is downloaded.

    Raises:
        ModelNotFound: there is no such repository, or it is private.
        ModelNotSupported: it has no weights in safetensors.
        DownloadFailed: the hub can't be reached.
    """
    from huggingface_hub import HfApi

    with told_apart(repository):
        info = HfApi().model_info(repository, files_metadata=True)
        return described(info, weights_of(info))


def weights_of(info: ModelInfo) -> Sequence[str]:
    """The names of the files that hold a repository's weights: what its index names, which is
    fetched for that, or else what a folder would be taken to have them in.

    Raises:
        ModelNotSupported: there are none in safetensors.
        ModelLoadFailed: the index can't be read, or names what is not there.
        OSError: the hub can't be reached.
    """
    from huggingface_hub.errors import GatedRepoError

    names = [file.rfilename for file in info.siblings or ()]
    own = [name for name in names if fnmatch.fnmatch(name, WEIGHTS) and "/" not in name]
    if INDEX in names:
        try:
            named = sorted({*index_of(info).values()})
        except GatedRepoError:
            # What it takes is told all the same, and the download says what to do.
            return own
        if missing := [name for name in named if name not in names]:
            raise ModelLoadFailed(f"{info.id} has no {missing[0]}, which its {INDEX} names.")
        return named
    files, problem = chosen(names, info.id)
    if not own:
        raise ModelNotSupported(
            f"{info.id} has no weights that MLX can load ({WEIGHTS}). Look for a converted one, "
            "under mlx-community for instance.",
            param="model",
        )
    if problem:
        raise ModelLoadFailed(problem)
    return files


def index_of(info: ModelInfo) -> Mapping[str, str]:
    """The file of each tensor in a repository, by its index: the one that is here, or else the
    hub's, which is not kept."""
    from huggingface_hub import hf_hub_download

    commit = info.sha or "main"
    here = repository_folder(cache_folder(), info.id) / "snapshots" / commit / INDEX
    if here.is_file():
        return weight_map(here)
    with TemporaryDirectory() as place:
        index = hf_hub_download(info.id, INDEX, revision=commit, local_dir=place)  # nosec B615
        return weight_map(Path(index))


def described(info: ModelInfo, weights: Sequence[str]) -> Repository:
    """
    Raises:
        LookupError, TypeError, ValueError: the hub says something else than it used to.
    """
    files = {
        file.rfilename: HubFile(
            file.size or 0, (file.lfs.sha256 if file.lfs else file.blob_id) or ""
        )
        for file in info.siblings or ()
        if file.rfilename in weights
        or any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in FILES)
    }
    named = [tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:")]
    return Repository(
        id=info.id,
        commit=info.sha or "main",
        files=files,
        licence=named[0] if named else "",
        gated=bool(info.gated),
        model_type=str((info.config or {}).get("model_type", "")),
    )


Report = Callable[[int, int], None]
"""Told how many bytes of a download are there, and of how many; raising ends the download."""


def fetch(repository: str, report: Report | None = None) -> Path:
    """Download a model, or what of it is missing, and return its folder. Blocks.

    A connection that breaks is taken up again where it broke. When the download fails all the
    same, the files that are whole stay for the next attempt.

    Raises:
        ModelNotFound: there is no such repository, or it is private.
        ModelNotSupported: it has no weights in safetensors.
        ModelGated: its owner asks for a licence to be accepted, or for a token.
        DiskFull: there is no room for it; nothing was downloaded if that was clear before.
        DownloadFailed: it can't be reached, or broke off.
    """
    return fetch_files(look_up(repository), report)


def fetch_files(wanted: Repository, report: Report | None = None) -> Path:
    """`fetch` of what `look_up` found."""
    from huggingface_hub import snapshot_download

    cache = cache_folder()
    with told_apart(wanted.id):
        drop_leftovers(repository_folder(cache, wanted.id))
        missing = wanted.missing(cache)
    check_room(wanted.id, missing, cache)
    bars = None if report is None else progress_bars(report, wanted.nbytes - missing, wanted.nbytes)
    with told_apart(wanted.id):
        folder = snapshot_download(  # nosec B615
            wanted.id, allow_patterns=[*map(escape, wanted.files)], tqdm_class=bars
        )
    return Path(folder)


LEFTOVER_SECONDS = 3600
"""A download that runs has written to its own part within the hour."""


def drop_leftovers(repository: Path) -> None:
    """Delete the parts of files that downloads which were killed left: the client never goes on
    with one. Those that may not be deleted stay."""
    for part in repository.glob("blobs/*.incomplete"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > LEFTOVER_SECONDS:
                part.unlink()


def check_room(repository: str, needed: int, folder: Path) -> None:
    """
    Raises:
        DiskFull: fewer than `needed` bytes are free where `folder` is, or will be.
    """
    free = free_bytes(folder)
    if needed > free:
        raise DiskFull(
            f"{repository} takes {sized(needed)} more, and {sized(free)} are free in "
            f"{folder}. Make room, or set HF_HOME to another disk."
        )


def free_bytes(folder: Path) -> int:
    """Of the disk that holds `folder`, which need not exist yet, nor be for this user."""
    while not os.path.exists(folder):
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def told_apart(repository: str) -> Iterator[None]:
    """Turn what the hub's client raises into errors that say what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelGated(
            f"{repository} is gated: accept its terms at https://huggingface.co/{repository}, make "
            "a token there and set HF_TOKEN, or run `hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"{repository} is no repository on the Hugging Face hub, or a private one.",
            param="model",
        ) from error
    except (AttributeError, LookupError, TypeError) as error:
        raise DownloadFailed(
            f"{repository} could not be downloaded: {hub_address()} does not answer as the Hugging "
            "Face hub does. Check HF_ENDPOINT."
        ) from error
    except (ImportError, ValueError) as error:
        # What the client makes of its environment: a proxy's kind, a token for a header.
        raise DownloadFailed(
            f"{repository} could not be downloaded: {reason(error)}. Check HF_TOKEN and the "
            "proxy's variables."
        ) from error
    except OfflineModeIsEnabled as error:
        raise DownloadFailed(
            f"{repository} could not be downloaded: HF_HUB_OFFLINE is set, which forbids it."
        ) from error
    except HfHubHTTPError as error:
        raise DownloadFailed(f"{repository} could not be downloaded: {reason(error)}") from error
    except HTTPError as error:
        raise DownloadFailed(
            f"{repository} could not be downloaded: {reason(error)}, at {hub_address()}. Check the "
            "network, and HF_ENDPOINT and the proxy's variables if they are set."
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFull(
                f"The disk filled up while {repository} was downloaded. Make room and try again: "
                "the files that are whole stay."
            ) from error
        raise DownloadFailed(f"{repository} could not be downloaded: {reason(error)}") from error


def hub_address() -> str:
    from huggingface_hub.constants import ENDPOINT

    return str(ENDPOINT)


def reason(error: BaseException) -> str:
    """One line of it. The first cause says what is wrong with the connection, if it is that."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0] or type(error).__name__


def progress_bars(report: Report, there: int, total: int) -> type:
    """A class for the client, which makes one bar for bytes written and others besides.

    `there` bytes need no download.
    """

    class Bar:
        n: float = 0
        total: float = 0
        format_dict: ClassVar[Mapping[str, float]] = {}

        def __init__(self, *items: object, desc: str = "", unit: str = "", **more: object) -> None:
            self._counts = unit == "B" and not desc.startswith("Downloading")

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts:
                report(min(total, there + int(self.n)), total)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None: ...

        def close(self) -> None: ...

        def refresh(self, *options: object) -> None: ...

        def set_description(self, *options: object, **more: object) -> None: ...

        set_description_str = set_postfix_str = set_description

    return Bar

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
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mlx_manager.mlx_server.errors import (
    DiskFull,
    DownloadFailed,
    ModelGated,
    ModelLoadFailed,
    ModelNotFound,
    ModelNotSupported,
)
from mlx_manager.mlx_server.models.checkpoint.files import read_json
from mlx_manager.mlx_server.models.checkpoint.mtp import BESIDE
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

# Files that mlx-lm reads beside the weights. The weights are taken from the index instead: a
# repository may hold the same ones in several other formats.
FILES = (
    "*.json",
    # A sentence-transformers model's layers after the pooling.
    "*_Dense/model.safetensors",
    # An MTP head beside the weights of a converted model.
    BESIDE,
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)


PREFIX = "models--"


def cache_folder() -> Path:
    """Return the folder of the hub's clients' downloads (`HF_HUB_CACHE`, `HF_HOME`)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def why_closed(folder: Path) -> str:
    """Return why this user can't read a folder; "" if they can, or if there is none."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def cached_models(cache: Path) -> Iterator[tuple[str, Path]]:
    """Yield (repository, folder) of every model that is complete in a cache, at its main revision
    if that is complete, or else at the latest complete one.

    Layout: `models--<owner>--<name>/{refs/main, snapshots/<commit>/}`; a snapshot's files are
    links that are made once their content is there.
    """
    for repository in repositories_in(cache):
        snapshot = cached_model(cache, repository)
        if snapshot is not None:
            yield repository, snapshot


def repositories_in(cache: Path) -> list[str]:
    """Return the repositories of which a cache holds anything."""
    try:
        names = sorted(os.listdir(cache))
    except OSError:
        return []
    return [name.removeprefix(PREFIX).replace("--", "/") for name in names if is_repository(name)]


def is_repository(name: str) -> bool:
    """Return whether a folder of that name in a cache holds a model."""
    return name.startswith(PREFIX)


def cached_model(cache: Path, repository: str) -> Path | None:
    """Return the folder of a model that is complete in a cache, as `cached_models`; else None."""
    try:
        return next(filter(is_complete, snapshots(repository_folder(cache, repository))), None)
    except (OSError, ValueError):
        return None  # Unreadable for this user, or not text: the others must still be found.


def snapshots(folder: Path) -> list[Path]:
    """Return the snapshots of a repository: that of `main`, if it is there, then latest first."""
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
    """Return whether config.json and every weights file are there."""
    return (snapshot / "config.json").is_file() and not weight_files(snapshot).problem


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. blob: the name of its content in a cache, the same for all commits;
    "" where the hub does not say."""

    nbytes: int
    blob: str


@dataclass(frozen=True, slots=True)
class Repository:
    """A model as the hub describes it.

    files: the files that mlx-lm reads. licence, model_type: "" where the hub names none.
    gated: the owner asks for terms to be accepted first.
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
        """Return the bytes that a cache does not hold yet."""
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


@dataclass(frozen=True, slots=True)
class Listed:
    """A model as the hub's search lists it. updated: a date in ISO 8601; "" if none is told."""

    id: str
    downloads: int
    likes: int
    licence: str
    gated: bool
    updated: str


def search(words: str, limit: int) -> list[Listed]:
    """Return the models whose names have these words, the most downloaded first: those with weights
    in safetensors.

    Raises:
        DownloadFailed: the hub can't be reached.
    """
    from huggingface_hub import HfApi

    with told_apart(f"The list of {words!r}"):
        found = HfApi().list_models(
            search=words, filter="safetensors", sort="downloads", limit=limit, full=True
        )
        return [_listed(info) for info in found]


def _listed(info: ModelInfo) -> Listed:
    changed = info.last_modified
    return Listed(
        info.id,
        info.downloads or 0,
        info.likes or 0,
        licence_of(info),
        bool(info.gated),
        "" if changed is None else changed.date().isoformat(),
    )


def licence_of(info: ModelInfo) -> str:
    """Return the name of a repository's licence; "" if it names none."""
    named = (tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:"))
    return next(named, "")


def config_of(found: Repository) -> Mapping[str, Any]:
    """Return a repository's config.json, which is not kept; {} if it is gated or has none.

    Raises:
        ModelLoadFailed: it is no JSON object.
        DownloadFailed: the hub can't be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError

    if "config.json" not in found.files:
        return {}
    with told_apart(found.id), TemporaryDirectory() as place:
        try:
            file = hf_hub_download(  # nosec B615
                found.id, "config.json", revision=found.commit, local_dir=place
            )
        except GatedRepoError:
            return {}
        return read_json(Path(file))


def weights_of(info: ModelInfo) -> Sequence[str]:
    """Return the names of the files that hold a repository's weights: those that its index names,
    which is fetched for that, or else those that would be chosen in a folder.

    Raises:
        ModelNotSupported: there are none in safetensors.
        ModelLoadFailed: the index can't be read, or names a file that is not there.
        OSError: the hub can't be reached.
    """
    from huggingface_hub.errors import GatedRepoError

    names = [file.rfilename for file in info.siblings or ()]
    own = [name for name in names if fnmatch.fnmatch(name, WEIGHTS) and "/" not in name]
    if INDEX in names:
        try:
            named = sorted({*index_of(info).values()})
        except GatedRepoError:
            # The size can be told all the same; the download's error says what to do.
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
    """Return the file of each tensor in a repository, from the cached index, or else from the
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
    """Return the repository that the hub's answer describes.

    Raises:
        LookupError, TypeError, ValueError: the answer has another form than expected.
    """
    files = {
        file.rfilename: HubFile(
            file.size or 0, (file.lfs.sha256 if file.lfs else file.blob_id) or ""
        )
        for file in info.siblings or ()
        if file.rfilename in weights
        or any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in FILES)
    }
    return Repository(
        id=info.id,
        commit=info.sha or "main",
        files=files,
        licence=licence_of(info),
        gated=bool(info.gated),
        model_type=str((info.config or {}).get("model_type", "")),
    )


Report = Callable[[int, int], None]
"""Callback with the bytes of a download that are there, and their total; raising ends it."""


def fetch(repository: str, report: Report | None = None) -> Path:
    """Download a model, or its missing files, and return its folder. Blocks.

    A connection that breaks is resumed where it broke. When the download fails all the same, the
    complete files stay for the next attempt.

    Raises:
        ModelNotFound: there is no such repository, or it is private.
        ModelNotSupported: it has no weights in safetensors.
        ModelGated: its owner asks for a licence to be accepted, or for a token.
        DiskFull: there is no room for it; nothing was downloaded if that was clear before.
        DownloadFailed: the hub can't be reached, or the download broke off.
    """
    return fetch_files(look_up(repository), report)


def fetch_files(wanted: Repository, report: Report | None = None) -> Path:
    """Download the repository that `look_up` found; see `fetch`."""
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
"""Seconds without a write after which a partial file is a leftover of a killed download."""


def drop_leftovers(repository: Path) -> None:
    """Delete the partial files that killed downloads left: the client never resumes one. Those
    that this user may not delete stay."""
    for part in repository.glob("blobs/*.incomplete"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > LEFTOVER_SECONDS:
                part.unlink()


def check_room(repository: str, needed: int, folder: Path) -> None:
    """Check that the disk has room for a download.

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
    """Return the free bytes of the disk that holds `folder`, which need not exist yet, nor be
    readable for this user."""
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
        # The client can't use its environment: a proxy's scheme, or a token in a header.
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
    """Return the first line of an error's first cause, which names a connection's problem."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0] or type(error).__name__


def progress_bars(report: Report, there: int, total: int) -> type:
    """Return a class of progress bars for the client, which makes one for the bytes written, and
    others that are not counted.

    there: bytes that need no download.
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

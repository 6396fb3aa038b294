"""A model on disk, read without loading it: config.json, the weights' files and their headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.architectures import with_known_names
from mlx_manager.mlx_server.models.checkpoint.files import oversized, read_json, unreadable
from mlx_manager.mlx_server.models.checkpoint.sizes import check_sizes
from mlx_manager.mlx_server.models.checkpoint.weight_files import (
    StoredTensor,
    WeightFiles,
    headers_of,
    weight_files,
)
from mlx_manager.mlx_server.models.families import CONFIG
from mlx_manager.mlx_server.utils.text import encodable

READ_BY_NAME = ("*.json", "*.jsonl", "*.py", "*.txt", "*.jinja", "*.tiktoken", "tokenizer.model")
"""Patterns of the files that mlx-lm and transformers read of a model's folder, and of folders in
it, beside weights."""

ALWAYS_READ = frozenset(
    {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
)
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)
# With these, max_position_embeddings already counts the extension.
EXTENDED_ROPES = ("llama3", "longrope", "su", "default", "mrope")
UNKNOWN_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Description of a model by its own folder.

    config: its config.json, with the `model_type` as the libraries spell it.
    """

    path: Path
    config: Mapping[str, Any]
    weights: WeightFiles

    @staticmethod
    def read(path: Path) -> ModelFolder:
        """Read config.json and find the weights; `check` tells whether they can be read.

        Raises:
            ModelLoadFailed: a file is missing or unreadable; the message names it.
        """
        if not path.is_dir():
            raise ModelLoadFailed(f"{path} is not a folder.")
        config = with_known_names(read_json(path / "config.json"))
        return ModelFolder(path, config, weight_files(path))

    @property
    def model_type(self) -> str:
        return encodable(str(self.config.get("model_type", "")))

    @property
    def context_length(self) -> int:
        return context_length(self.config, self._tokenizer_length())

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return self.weights.files

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def check(self) -> None:
        """Check every file that a load reads, without reading the weights.

        The check reads some kilobytes of each file of the weights.

        Raises:
            ModelLoadFailed: a file is missing, truncated, no regular file or not what its name
                says, or config.json names larger sizes than the weights have; the message names
                the file.
        """
        check_regular(self.path)
        if self.weights.problem:
            raise ModelLoadFailed(self.weights.problem)
        tensors: dict[str, StoredTensor] = {}
        for found in headers_of(self.weights).values():
            tensors |= found
        check_sizes(self.path / "config.json", self.config, tensors)

    def _tokenizer_length(self) -> int | None:
        settings = self.path / "tokenizer_config.json"
        length = read_json(settings).get("model_max_length") if settings.exists() else None
        # transformers writes 1e30 for "unknown".
        return int(length) if isinstance(length, int | float) and 1 <= length < 1e8 else None


def check_regular(folder: Path) -> None:
    """Check the files that libraries open by their names.

    Raises:
        ModelLoadFailed: such a file is no regular file, or far too large; the message names it.
    """
    for file in read_by_name(folder):
        if odd := unreadable(file) or (file.name in ALWAYS_READ and oversized(file)):
            raise ModelLoadFailed(odd)


def read_by_name(folder: Path) -> Iterator[Path]:
    """Yield the files of a model's folder, and of the folders in it, that libraries may open by
    their names."""
    try:
        entries = [entry for place in (folder, *subfolders(folder)) for entry in place.iterdir()]
    except OSError as error:
        raise ModelLoadFailed(f"{folder} can't be read: {error}.") from error
    for entry in entries:
        named = any(fnmatch(entry.name, pattern) for pattern in READ_BY_NAME)
        if named and entry.exists() and not entry.is_dir():
            yield entry


def subfolders(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."]


def context_length(config: Mapping[str, Any], tokenizer_length: int | None = None) -> int:
    """Return the tokens of prompt and answer together that a model can attend to.

    This is `max_position_embeddings` (or an older name of it), times the factor of a RoPE scaling
    if the setting excludes it. YaRN's factor applies to its original length, that of linear and
    dynamic scaling to the setting itself. The tokenizer's own figure is often wrong and counts only
    if there is no other.
    """
    text = {**config, **(config.get("text_config") or {})}
    lengths = (text.get(key) for key in CONTEXT_KEYS)
    length = next((value for value in lengths if isinstance(value, int) and value > 0), None)
    if length is None:
        return tokenizer_length or UNKNOWN_CONTEXT
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return length
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor = rope.get("factor")
    counts = str(text.get("model_type", "")).startswith(CONFIG.extended)
    counted = kind in EXTENDED_ROPES or counts
    if counted or not isinstance(factor, int | float) or factor <= 0:
        return length
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings")
        length = original if isinstance(original, int) and original > 0 else length
    return int(length * factor)

"""A model on disk, read without loading it: config.json, the weights' files and their headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.utils.text import encodable

WEIGHTS = "model*.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
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
    """What a model's folder says of itself. `nbytes` is the size of the weights' files."""

    path: Path
    config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    nbytes: int

    @staticmethod
    def read(path: Path) -> ModelFolder:
        """Read config.json and find the weights.

        Raises:
            ModelLoadFailed: a file is missing or unreadable; the message names it.
        """
        if not path.is_dir():
            raise ModelLoadFailed(f"{path} is not a folder.")
        files = tuple(sorted(path.glob(WEIGHTS)))
        try:
            nbytes = sum(file.stat().st_size for file in files)
        except OSError as error:
            raise ModelLoadFailed(f"The weights in {path} can't be read: {error}.") from error
        return ModelFolder(path, read_json(path / "config.json"), files, nbytes)

    @property
    def model_type(self) -> str:
        return encodable(str(self.config.get("model_type", "")))

    @property
    def context_length(self) -> int:
        return context_length(self.config, self._tokenizer_length())

    def check_weights(self) -> None:
        """Look at every weights file's header, which costs a read of some kilobytes each.

        Raises:
            ModelLoadFailed: a file is missing, truncated, or not safetensors; the message names it.
        """
        index = self.path / INDEX
        if index.exists():
            named = read_json(index).get("weight_map")
            if not isinstance(named, dict):
                raise ModelLoadFailed(f"{index} has no weight_map.")
            if not all(isinstance(name, str) for name in named.values()):
                raise ModelLoadFailed(f"{index} has a weight_map to other things than file names.")
            missing = sorted({*named.values()} - {file.name for file in self.weight_files})
            if missing:
                raise ModelLoadFailed(f"Weights are missing from {self.path}: {missing[0]}.")
        if not self.weight_files:
            raise ModelLoadFailed(f"There are no weights ({WEIGHTS}) in {self.path}.")
        for file in self.weight_files:
            check_safetensors(file)

    def _tokenizer_length(self) -> int | None:
        settings = self.path / "tokenizer_config.json"
        length = read_json(settings).get("model_max_length") if settings.exists() else None
        # transformers writes 1e30 for "unknown".
        return int(length) if isinstance(length, int | float) and 1 <= length < 1e8 else None


def read_json(file: Path) -> dict[str, Any]:
    """
    Raises:
        ModelLoadFailed: the file is missing, unreadable, or no JSON object.
    """
    content = _read(file)
    if not isinstance(content, dict):
        raise ModelLoadFailed(f"{file} is not a JSON object.")
    return content


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """
    Raises:
        ModelLoadFailed: the file is missing, unreadable, or no list of JSON objects.
    """
    content = _read(file)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ModelLoadFailed(f"{file} is not a list of JSON objects.")
    return content


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise ModelLoadFailed(f"{file} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"{file} is not JSON: {error}.") from error


def check_safetensors(file: Path) -> None:
    """The header must be sound and its tensors must fill the file.

    Raises:
        ModelLoadFailed: they don't; the message names the file.
    """
    tensors_in(file)


def tensors_in(file: Path) -> dict[str, tuple[int, int]]:
    """The first byte of each tensor in a safetensors file, and the one after its last.

    The file is 8 bytes of length, so much JSON, and data. Source: the format's description at
    https://github.com/huggingface/safetensors.

    Raises:
        ModelLoadFailed: the header is broken, or its tensors don't fill the file, which is named.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, LARGEST_HEADER):
                raise ModelLoadFailed(f"{file} is not a safetensors file, or is truncated.")
            header = json.loads(stream.read(length))
        begin = 8 + length
        tensors = {
            name: (begin + tensor["data_offsets"][0], begin + tensor["data_offsets"][1])
            for name, tensor in header.items()
            if name != "__metadata__"
        }
        expected = max((end for _, end in tensors.values()), default=begin)
    except OSError as error:
        raise ModelLoadFailed(f"{file} can't be read: {error.strerror}.") from error
    except (ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:
        raise ModelLoadFailed(f"{file} has a broken safetensors header.") from error
    if size != expected:
        raise ModelLoadFailed(
            f"{file} is truncated or damaged: {size:,} bytes, and its header says {expected:,}."
        )
    return tensors


def context_length(config: Mapping[str, Any], tokenizer_length: int | None = None) -> int:
    """Tokens of prompt and answer that a model can attend to.

    `max_position_embeddings` (or its older names), times the factor of a RoPE scaling that it
    does not count yet: of YaRN's over its original length, of linear and dynamic ones over the
    length itself. The tokenizer's own figure is often wrong and decides only if there is no other.
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
    # Gemma 3 extends by a linear factor that its max_position_embeddings counts.
    counted = kind in EXTENDED_ROPES or str(text.get("model_type", "")).startswith("gemma3")
    if counted or not isinstance(factor, int | float) or factor <= 0:
        return length
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings")
        length = original if isinstance(original, int) and original > 0 else length
    return int(length * factor)

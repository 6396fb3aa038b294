"""A model's head beside embeddings that it is tied to: a copy is left out, another head is used.

transformers 5.24 does the same (`PreTrainedModel.tie_weights`): where a checkpoint holds both and
they differ, they are not tied, whatever `tie_word_embeddings` says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_manager.mlx_server.models.checkpoint.weight_files import (
    StoredTensor,
    WeightFiles,
    headers_of,
)

TIE = "tie_word_embeddings"
PARTS = ("weight", "scales", "biases")
HEAD = re.compile(r"(?:|[^\d]*\.)(?:lm_head|embed_out|output|output_layer|head)")
EMBEDDING = re.compile(
    r"(?:|[^\d]*\.)(?:embed_tokens|wte|tok_embeddings|embed_in|embeddings|embedder|embedding"
    r"|word_embeddings)"
)
"""Names of embeddings. Modules of layers are excluded: their names have numbers."""
AT_ONCE = 8 * 2**20


@dataclass(frozen=True)
class Heads:
    """Heads and embeddings of a checkpoint: by the module's name, its parts by their names, and the
    places of these parts."""

    heads: Mapping[str, Mapping[str, tuple[Path, StoredTensor]]]
    embeddings: Mapping[str, Mapping[str, tuple[Path, StoredTensor]]]

    @staticmethod
    def of(weights: WeightFiles) -> Heads:
        """Find the heads and embeddings by the names in the weights' headers.

        Raises:
            ModelLoadFailed: a header is broken.
        """
        found: dict[re.Pattern[str], dict[str, dict[str, tuple[Path, StoredTensor]]]] = {
            HEAD: {},
            EMBEDDING: {},
        }
        for file, tensors in headers_of(weights).items():
            for name, tensor in tensors.items():
                module, _, part = name.rpartition(".")
                for pattern, modules in found.items():
                    if part in PARTS and pattern.fullmatch(module):
                        modules.setdefault(module, {})[part] = (file, tensor)
        return Heads(found[HEAD], found[EMBEDDING])

    @cached_property
    def are_copies(self) -> bool:
        """Return whether every head is an embedding's copy, to the last bit. Reads both kinds.

        Raises:
            OSError: a file can't be read.
        """
        return all(
            any(_alike(head, embedding) for embedding in self.embeddings.values())
            for head in self.heads.values()
        )

    def untied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return changed settings for a `config` that ties a head that is no copy of the
        embeddings; for others none."""
        if not self.heads or says_untied(config) or self.are_copies:
            return {}
        changed: dict[str, Any] = {TIE: False}
        if isinstance(text := config.get("text_config"), Mapping):
            changed["text_config"] = {**text, TIE: False}
        return changed


def says_untied(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    sections = [config, text] if isinstance(text, Mapping) else [config]
    flags = [section[TIE] for section in sections if isinstance(section.get(TIE), bool)]
    return bool(flags) and not any(flags)


def is_head(name: str) -> bool:
    """Return whether a parameter of that name is a part of a head."""
    module, _, part = name.rpartition(".")
    return part in (*PARTS, "bias") and HEAD.fullmatch(module) is not None


def _alike(
    one: Mapping[str, tuple[Path, StoredTensor]], other: Mapping[str, tuple[Path, StoredTensor]]
) -> bool:
    return one.keys() == other.keys() and all(
        _same_bytes(*one[part], *other[part]) for part in sorted(one)
    )


def _same_bytes(file: Path, tensor: StoredTensor, other_file: Path, other: StoredTensor) -> bool:
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    chunks = zip(_bytes_of(file, tensor), _bytes_of(other_file, other), strict=True)
    return all(mine == theirs for mine, theirs in chunks)


def _bytes_of(file: Path, tensor: StoredTensor) -> Iterator[bytes]:
    with file.open("rb", buffering=0) as stream:
        for start in range(tensor.start, tensor.end, AT_ONCE):
            yield os.pread(stream.fileno(), min(AT_ONCE, tensor.end - start), start)

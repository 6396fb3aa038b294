"""The head of a checkpoint for multi-token prediction (MTP): where it is, and its tensors' names.

A head is one layer of the model's kind. Its input is a token's embedding and the hidden state
before that token, each normed, joined by a product. DeepSeek and GLM store it as the layer behind
the last one, Qwen under names that begin with `mtp.`. mlx-lm leaves it out, and so do most
converted checkpoints: mlx-vlm writes heads to folders of their own. Sources: vLLM's
`deepseek_mtp.py`, `glm4_moe_lite_mtp.py`, `qwen3_next_mtp.py` and `qwen3_5_mtp.py`, and mlx-vlm's
`speculative/drafters`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.checkpoint.files import read_json
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.weight_files import (
    WeightFiles,
    format_of,
    headers_of,
    weight_files,
)
from mlx_manager.mlx_server.models.families import mtp_facts
from mlx_manager.mlx_server.models.family import MTPFacts

INPUT = "model.embed_tokens"
"""The place of a head's input in a model of one layer."""
LAYER = "model.layers.0"
NORM = "model.norm"
BESIDE = "mtp.safetensors"
"""A file with a head beside the weights of a converted checkpoint."""
AROUND = r"(?:(?:model|language_model)\.)*"
QUANTISATIONS = ("quantization", "quantization_config")

PARTS = {
    # DeepSeek's and GLM's, and Qwen's.
    "enorm": f"{INPUT}.enorm",
    "hnorm": f"{INPUT}.hnorm",
    "eh_proj": f"{INPUT}.eh_proj",
    "shared_head.norm": NORM,
    "shared_head_norm": NORM,
    "pre_fc_norm_embedding": f"{INPUT}.enorm",
    "pre_fc_norm_hidden": f"{INPUT}.hnorm",
    "fc": f"{INPUT}.eh_proj",
    "norm": NORM,
}
"""Modules of a head outside its layer, and their names in a model of one layer."""
SHARED = ("embed_tokens", "shared_head.head", "lm_head", "rotary_emb")
"""Modules that are copies of the model's, in whose place the model's are used."""
NEEDED = tuple(f"{name}.weight" for name in (*PARTS.values(), f"{LAYER}.input_layernorm"))


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head on disk.

    facts: of its kind. weights: the files that it is in. names: of its tensors in a model of one
    layer, by those in the files. config: the config.json that goes with the files. nbytes: of its
    tensors. raw: whether norms are stored as transformers stores them.
    """

    facts: MTPFacts
    weights: WeightFiles
    names: Mapping[str, str]
    config: Mapping[str, Any]
    nbytes: int
    raw: bool

    @property
    def quantisation(self) -> dict[str, Any]:
        """Return the settings about quantisation of a model that has the head's layer alone."""
        found: dict[str, Any] = {}
        for key in QUANTISATIONS:
            of = self.config.get(key)
            if isinstance(of, Mapping):
                plain = {name: value for name, value in of.items() if "." not in name}
                own = {self._layer(name): value for name, value in of.items() if "." in name}
                found[key] = plain | {name: value for name, value in own.items() if name}
        return found

    def _layer(self, path: str) -> str:
        name = self.names.get(f"{path}.weight", "")
        return name.removesuffix(".weight")


def head_of(folder: ModelFolder, model_type: str) -> HeadFiles | None:
    """Return the head in a model's own folder; None if there is none. model_type: as mlx-lm spells
    it.

    Raises:
        ModelLoadFailed: a file is broken, or a part of the head is missing.
    """
    facts = mtp_facts(model_type)
    if facts is None:
        return None
    beside = folder.path / BESIDE
    found = _head(facts, folder.weights, folder.config, folder.path, bare=False)
    if found is None and beside.is_file():
        weights = WeightFiles((beside,), nbytes=beside.stat().st_size)
        found = _head(facts, weights, folder.config, beside, bare=True)
    return found


def head_in(path: Path, folder: ModelFolder, model_type: str) -> HeadFiles:
    """Return the head in the folder `path` for the model in `folder`.

    Raises:
        ModelLoadFailed: there is none for a model of this kind, or it is broken.
    """
    facts = mtp_facts(model_type)
    if facts is None:
        raise ModelLoadFailed(f"models of the kind {model_type!r} take no MTP head.")
    config = read_json(path / "config.json")
    weights = weight_files(path)
    if weights.problem:
        raise ModelLoadFailed(weights.problem)
    # The layers of the model count where `path` has the whole model.
    text = folder.config.get("text_config") or folder.config
    merged = {**config, "num_hidden_layers": text.get("num_hidden_layers")}
    found = _head(facts, weights, merged, path, bare=is_head(str(config.get("model_type", ""))))
    if found is None:
        raise ModelLoadFailed(f"there is no MTP head in {path}.")
    return found


def is_head(model_type: str) -> bool:
    """Return whether a repository of this `model_type` is an MTP head in a folder of its own."""
    model, _, head = model_type.rpartition("_")
    return head == "mtp" and mtp_facts(model) is not None


def head_tensors(weights: WeightFiles, config: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors in a model's own files that belong to its heads.

    config: with the `model_type` as mlx-lm spells it.
    """
    facts = mtp_facts(str(config.get("model_type", "")))
    if facts is None:
        return set()
    prefix = _prefix(facts, _layers(config))
    names = (name for tensors in headers_of(weights).values() for name in tensors)
    if not facts.layer:
        return {name for name in names if prefix.match(name)}
    last = _layers(config)
    behind = re.compile(AROUND + r"layers\.(\d+)\.")
    return {name for name in names if (m := behind.match(name)) and int(m[1]) >= last}


def _head(
    facts: MTPFacts,
    weights: WeightFiles,
    config: Mapping[str, Any],
    where: Path,
    *,
    bare: bool,
) -> HeadFiles | None:
    """Return the head in `weights`; None if there is none. bare: the files hold nothing else, and
    names may lack a beginning."""
    prefix = _prefix(facts, _layers(config))
    names: dict[str, str] = {}
    nbytes, raw = 0, False
    for file, tensors in headers_of(weights).items():
        for name, tensor in tensors.items():
            found = prefix.match(name)
            if found is None and not bare:
                continue
            rest = name[found.end() :] if found else re.sub(f"^{AROUND}", "", name)
            place = _place(rest)
            if place:
                names[name] = place
                nbytes += tensor.end - tensor.start
                raw = raw or (found is not None and format_of(file) != "mlx")
    if not names:
        return None
    lacking = [name for name in NEEDED if name not in names.values()]
    if lacking:
        raise ModelLoadFailed(f"the MTP head in {where} has no {lacking[0]}.")
    return HeadFiles(facts, weights, names, config, nbytes, raw)


def _place(rest: str) -> str:
    """Return the name of a head's tensor in a model of one layer; "" for what is not needed."""
    if any(rest == name or rest.startswith(f"{name}.") or f".{name}." in rest for name in SHARED):
        return ""
    module, _, part = rest.rpartition(".")
    if module in PARTS:
        return f"{PARTS[module]}.{part}"
    inner = re.sub(r"^(?:mtp_block|layers\.0)\.", "", rest)
    return "" if re.match(r"layers\.\d+\.", inner) else f"{LAYER}.{inner}"


def _prefix(facts: MTPFacts, layers: int) -> re.Pattern[str]:
    """Return the beginning of the names of a head's tensors."""
    own = rf"layers\.{layers}\." if facts.layer else r"mtp\."
    return re.compile(AROUND + own)


def _layers(config: Mapping[str, Any]) -> int:
    """Return the number of a model's layers."""
    text = config.get("text_config") or config
    return int(text.get("num_hidden_layers", config.get("num_hidden_layers", 0)))

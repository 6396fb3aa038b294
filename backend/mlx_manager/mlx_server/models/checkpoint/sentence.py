"""Settings by which a folder's model turns tokens into a vector: pooling, later layers, prompts.

Source: the files that sentence-transformers writes (modules.json and a folder for each module,
https://sbert.net/docs/sentence_transformer/usage/custom_models.html) and, for `dimensions`, the
keys of config.json that vLLM reads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.architectures import ENCODERS
from mlx_manager.mlx_server.models.checkpoint.files import read_json, read_json_list
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.kinds import SENTENCE_TRANSFORMERS

log = logging.getLogger(__name__)

Pooling = Literal["mean", "cls", "last"]
Activation = Literal["identity", "tanh", "sigmoid"]

PROMPTS = "config_sentence_transformers.json"
BERT_LIMITS = "sentence_bert_config.json"
POOLINGS: dict[str, Pooling] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
    "last": "last",
}
ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer after the pooling: its folder, and the activation of its output."""

    path: Path
    activation: Activation


@dataclass(frozen=True, slots=True)
class Sentence:
    """The model's authors' way to get a vector from a text.

    max_length: most tokens of a text, special ones included. prompts: texts that may be put before
    it, by name. default_prompt: the name of the prompt that is used when none is named. matryoshka:
    True if a vector's first numbers are a vector themselves. dimensions: the numbers of them for
    which that holds; empty: any.
    """

    pooling: Pooling
    normalize: bool
    max_length: int
    lower_case: bool = False
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()

    @staticmethod
    def read(folder: ModelFolder) -> Sentence:
        """Read a folder's settings.

        Raises:
            ModelLoadFailed: a file is broken.
            ModelNotSupported: a module, a pooling or an activation is not known here.
        """
        pooling: Pooling = "last" if ENCODERS[folder.model_type] == "qwen3" else "mean"
        normalize = True
        dense: list[Dense] = []
        # The defaults without these files are mlx-embeddings'.
        if (folder.path / SENTENCE_TRANSFORMERS).is_file():
            normalize = False
            for module in read_json_list(folder.path / SENTENCE_TRANSFORMERS):
                kind = str(module.get("type", "")).rpartition(".")[2]
                path = folder.path / str(module.get("path", ""))
                match kind:
                    case "Transformer":
                        pass
                    case "Pooling" if (path / "config.json").is_file():
                        pooling = pooling_of(path / "config.json")
                    case "Pooling":
                        log.warning(
                            "%s names a Pooling, and %s is missing: the pooling is %s",
                            folder.path / SENTENCE_TRANSFORMERS,
                            path / "config.json",
                            pooling,
                        )
                    case "Dense":
                        dense.append(Dense(path, dense_activation(path / "config.json")))
                    case "Normalize":
                        normalize = True
                    case _:
                        raise ModelNotSupported(
                            f"{folder.path / SENTENCE_TRANSFORMERS} has a module {kind!r}, which "
                            "is not known here."
                        )
        limits = optional(folder.path / BERT_LIMITS)
        dimensions = folder.config.get("matryoshka_dimensions") or ()
        return Sentence(
            pooling,
            normalize,
            longest_text(folder),
            bool(limits.get("do_lower_case")),
            tuple(dense),
            *prompts_of(folder.path / PROMPTS),
            bool(dimensions or folder.config.get("is_matryoshka")),
            tuple(dimensions),
        )


def prompts_of(file: Path) -> tuple[Mapping[str, str], str | None]:
    """Return the prompts by name, and the name of the default prompt.

    Raises:
        ModelLoadFailed: a prompt or the name is no text.
    """
    own = optional(file)
    prompts, default = own.get("prompts") or {}, own.get("default_prompt_name")
    if not isinstance(prompts, dict):
        raise ModelLoadFailed(f"{file}: `prompts` should be texts by name, not {prompts!r}.")
    for name, text in prompts.items():
        if not isinstance(text, str | None):
            raise ModelLoadFailed(f"{file}: `prompts.{name}` should be a text, not {text!r}.")
    if not isinstance(default, str | None):
        raise ModelLoadFailed(f"{file}: `default_prompt_name` should be a text, not {default!r}.")
    return {name: text or "" for name, text in prompts.items()}, default


def longest_text(folder: ModelFolder) -> int:
    """Return the most tokens of a text, special ones included.

    The limit is the number of the model's positions (RoBERTa's begin after the padding's), or less
    if sentence-transformers' settings say so.

    Raises:
        ModelLoadFailed: a file is broken or has an invalid value; the message names file and key.
    """
    positions = folder.context_length
    if ENCODERS.get(folder.model_type) == "xlm_roberta":
        positions -= int(folder.config.get("pad_token_id", 1)) + 1
    if positions < 1:
        raise ModelLoadFailed(
            f"{folder.path / 'config.json'}: max_position_embeddings must exceed pad_token_id + 1."
        )
    file = folder.path / BERT_LIMITS
    match optional(file).get("max_seq_length"):
        case None:
            return positions
        case bool():
            pass
        case int() as length if length >= 1:
            return min(length, positions)
    raise ModelLoadFailed(f"{file}: max_seq_length must be a whole number from 1 on, or null.")


def pooling_of(file: Path) -> Pooling:
    config = read_json(file)
    if not config.get("include_prompt", True):
        raise ModelNotSupported(f"{file} leaves the prompt out of the pooling: not done here.")
    modes = [
        name.removeprefix("pooling_mode_")
        for name, wanted in config.items()
        if name.startswith("pooling_mode_") and wanted
    ]
    modes = modes or [str(config.get("pooling_mode", "mean"))]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelNotSupported(
            f"{file} asks for the pooling {' + '.join(modes)}; possible are mean, cls, lasttoken."
        )
    return POOLINGS[modes[0]]


def dense_activation(file: Path) -> Activation:
    return activation_of(str(read_json(file).get("activation_function", "Identity")), file)


def rank_activation(folder: ModelFolder) -> Activation:
    """Return the activation of a reranker's logit: a sigmoid unless its config names another."""
    own = folder.config.get("sentence_transformers") or {}
    name = own.get("activation_fn") or folder.config.get("sbert_ce_default_activation_function")
    return activation_of(name or "Sigmoid", folder.path / "config.json")


def activation_of(name: str, file: Path) -> Activation:
    last = name.rpartition(".")[2]
    if last not in ACTIVATIONS:
        raise ModelNotSupported(f"{file} asks for the activation {name}, not known here.")
    return ACTIVATIONS[last]


def labels_of(config: Mapping[str, Any]) -> int:
    """Return the number of outputs of a classifier's head."""
    labels = config.get("id2label")
    # transformers' default, where nothing is said, is two.
    return len(labels) if labels else int(config.get("num_labels", 2))


def optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def check_supported(folder: ModelFolder, model_id: str) -> None:
    """Check that an encoder can be served.

    Raises:
        ModelNotSupported: the architecture, or a variation of it, can't be served.
    """
    config = folder.config
    if folder.model_type not in ENCODERS:
        known = ", ".join(ENCODERS)
        raise ModelNotSupported(
            f"{model_id} is a {folder.model_type!r} model. Embedding models and rerankers of the "
            f"architectures {known} can be served."
        )
    variations = {"hidden_act": "silu" if folder.model_type == "qwen3" else "gelu"}
    variations |= {"position_embedding_type": "absolute", "hidden_activation": "gelu"}
    for name, only in variations.items():
        if config.get(name, only) != only:
            raise ModelNotSupported(
                f"{model_id} has {name} {config[name]!r}; only {only!r} is known."
            )
    rope = config.get("rope_scaling") or {}
    if config.get("use_sliding_window") or rope.get("rope_type", "default") != "default":
        raise ModelNotSupported(
            f"{model_id} has a sliding window or a RoPE scaling: not done here."
        )
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ModelLoadFailed(f"{model_id} is a decoder by its config.json, not an encoder.")

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
from typing import Any, Literal, TypeVar

from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.architectures import ENCODERS
from mlx_manager.mlx_server.models.checkpoint.files import read_json, read_json_list
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.weight_files import StoredTensor, headers_of

log = logging.getLogger(__name__)

Pooling = Literal["mean", "mean_sqrt_len", "weightedmean", "max", "cls", "last"]
Activation = Literal["identity", "tanh", "sigmoid"]
"""Activations of scores."""
DenseActivation = Literal["identity", "tanh", "sigmoid", "relu", "gelu", "silu"]
Named = TypeVar("Named")

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
BERT_LIMITS = "sentence_bert_config.json"
POOLINGS: dict[str, Pooling] = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "last",
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "weightedmean": "weightedmean",
    "last": "last",
}
"""Poolings by their names: those of `pooling_mode_...` first, in the order in which
sentence-transformers puts several of them together."""
ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
}
DENSE_ACTIVATIONS: dict[str, DenseActivation] = {
    **ACTIVATIONS,
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
AFTER_PADDING = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
"""Architectures whose positions begin after the padding's."""
POOLED = "sentence_embedding"
"""Name of a text's vector among sentence-transformers' features."""


@dataclass(frozen=True, slots=True)
class DenseFacts:
    """A layer after the pooling.

    file: its weights; None if they are `dense.<index>` among the model's own.
    """

    inputs: int
    outputs: int
    bias: bool
    activation: DenseActivation
    file: Path | None


@dataclass(frozen=True, slots=True)
class Sentence:
    """The model's authors' way to get a vector from a text.

    poolings: one or several, whose vectors are put together. max_length: most tokens of a text,
    special ones included. prompts: texts that may be put before it, by name. default_prompt: the
    name of the prompt that is used when none is named. matryoshka: True if a vector's first numbers
    are a vector themselves. dimensions: the numbers of them for which that holds; empty: any.
    """

    poolings: tuple[Pooling, ...]
    normalize: bool
    max_length: int
    lower_case: bool = False
    dense: tuple[DenseFacts, ...] = ()
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
        poolings: tuple[Pooling, ...] = ("last" if folder.model_type == "qwen3" else "mean",)
        normalize = True
        dense: list[DenseFacts] = []
        if (folder.path / MODULES).is_file():
            normalize = False
            for module in read_json_list(folder.path / MODULES):
                path = folder.path / str(module.get("path", ""))
                match module_kind(module):
                    case "Transformer" | "Dropout" | "LogitScore":
                        pass
                    case "Pooling" if (path / "config.json").is_file():
                        poolings = poolings_of(path / "config.json")
                    case "Pooling":
                        missing(folder, "Pooling", path, f"the pooling is {poolings[0]}")
                    case "Dense":
                        dense.append(dense_of(folder, path, len(dense)))
                    case "Normalize":
                        normalize = True
                    case kind:
                        raise ModelNotSupported(
                            f"{folder.path / MODULES} has a module {kind!r}, which is not known "
                            "here."
                        )
        limits = optional(folder.path / BERT_LIMITS)
        dimensions = folder.config.get("matryoshka_dimensions") or ()
        return Sentence(
            poolings,
            normalize,
            longest_text(folder),
            bool(limits.get("do_lower_case")),
            tuple(dense),
            *prompts_of(folder.path / PROMPTS),
            bool(dimensions or folder.config.get("is_matryoshka")),
            tuple(dimensions),
        )


def module_kind(module: Mapping[str, Any]) -> str:
    """Return the class that an entry of modules.json names, without its package."""
    return str(module.get("type", "")).rpartition(".")[2]


def missing(folder: ModelFolder, kind: str, path: Path, instead: str) -> None:
    log.warning(
        "%s names a %s, and %s is missing: %s",
        folder.path / MODULES,
        kind,
        path / "config.json",
        instead,
    )


def dense_of(folder: ModelFolder, path: Path, index: int) -> DenseFacts:
    """Return the layer of that folder. Converters to MLX put its weights among the model's own, and
    may leave its folder out.

    Raises:
        ModelLoadFailed: a file is missing or broken.
        ModelNotSupported: a setting has a value that is not known here.
    """
    own: dict[str, StoredTensor] = {}
    for tensors in headers_of(folder.weights).values():
        own |= tensors
    weight = own.get(f"dense.{index}.weight")
    file = None if weight is not None else path / "model.safetensors"
    if weight is not None and not (path / "config.json").is_file():
        missing(folder, "Dense", path, "its layer has no activation")
        scales = own.get(f"dense.{index}.scales")
        group = (folder.config.get("quantization") or {}).get("group_size", 1)
        inputs = weight.shape[1] if scales is None else scales.shape[1] * group
        return DenseFacts(inputs, weight.shape[0], f"dense.{index}.bias" in own, "identity", file)
    config = read_json(path / "config.json")
    for name, only in (
        ("use_residual", False),
        ("module_input_name", POOLED),
        ("module_output_name", POOLED),
    ):
        if (config.get(name) or only) != only:
            raise ModelNotSupported(
                f"{path / 'config.json'} has {name} {config[name]!r}; only {only!r} is known."
            )
    sizes = [config.get(name) for name in ("in_features", "out_features")]
    inputs, outputs = sizes
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise ModelLoadFailed(f"{path / 'config.json'} has no in_features or out_features.")
    name = str(config.get("activation_function", "Identity"))
    activation = activation_of(name, DENSE_ACTIVATIONS, path / "config.json")
    return DenseFacts(inputs, outputs, config.get("bias", True) is not False, activation, file)


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
    if folder.model_type in AFTER_PADDING:
        # MPNet's padding has the same id, whatever its config says.
        padding = 1 if folder.model_type == "mpnet" else folder.config.get("pad_token_id", 1)
        positions -= int(padding) + 1
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


def poolings_of(file: Path) -> tuple[Pooling, ...]:
    """
    Raises:
        ModelLoadFailed: the file is broken.
        ModelNotSupported: a pooling is not known here.
    """
    config = read_json(file)
    if not config.get("include_prompt", True):
        raise ModelNotSupported(f"{file} leaves the prompt out of the pooling: not done here.")
    named = config.get("pooling_mode")
    if named is not None:
        modes = [named] if isinstance(named, str) else list(named)
    else:
        prefix = "pooling_mode_"
        wanted = {name.removeprefix(prefix) for name in config if config[name]}
        told = [name for name in config if name.startswith(prefix)]
        odd = [name for name in told if name.removeprefix(prefix) not in POOLINGS and config[name]]
        modes = odd or [name for name in POOLINGS if name in wanted] or ["mean"]
    if unknown := [mode for mode in modes if mode not in POOLINGS]:
        raise ModelNotSupported(
            f"{file} asks for the pooling {unknown[0]}; possible are cls, max, mean, "
            "mean_sqrt_len_tokens, weightedmean and lasttoken."
        )
    return tuple(POOLINGS[mode] for mode in modes)


def rank_activation(folder: ModelFolder) -> Activation:
    """Return the activation of a reranker's logit: a sigmoid unless its config names another."""
    file, own = folder.path / PROMPTS, optional(folder.path / PROMPTS).get("activation_fn")
    if not own:
        file = folder.path / "config.json"
        named = folder.config.get("sentence_transformers") or {}
        own = named.get("activation_fn")
    name = own or folder.config.get("sbert_ce_default_activation_function") or "Sigmoid"
    return activation_of(str(name), ACTIVATIONS, file)


def activation_of(name: str, known: Mapping[str, Named], file: Path) -> Named:
    """
    Raises:
        ModelNotSupported: the activation of that name is none of `known`.
    """
    last = name.rpartition(".")[2]
    if last not in known:
        raise ModelNotSupported(f"{file} asks for the activation {name}, not known here.")
    return known[last]


def labels_of(config: Mapping[str, Any]) -> int:
    """Return the number of outputs of a classifier's head."""
    labels = config.get("id2label")
    # transformers' default, where nothing is said, is two.
    return len(labels) if labels else int(config.get("num_labels", 2))


def optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def check_supported(folder: ModelFolder, model_id: str) -> None:
    """Check that there is a module for an encoder.

    Raises:
        ModelNotSupported: its architecture can't be served.
    """
    if folder.model_type not in ENCODERS:
        known = ", ".join(sorted(ENCODERS))
        raise ModelNotSupported(
            f"{model_id} is a {folder.model_type!r} model. Embedding models and rerankers of the "
            f"architectures {known} can be served."
        )

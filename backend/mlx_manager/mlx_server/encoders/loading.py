"""From a model's files to an encoder in memory. Everything here runs on the MLX thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from transformers import PreTrainedTokenizerBase

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.core import Kind
from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas
from mlx_manager.mlx_server.encoders.encoder import DenseLayer, Encoder, head_of
from mlx_manager.mlx_server.encoders.wrapping import Wrapping
from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.checkpoint.building import arrays_in
from mlx_manager.mlx_server.models.checkpoint.files import read_json
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.renamed import with_old_names
from mlx_manager.mlx_server.models.checkpoint.rope import in_all_forms
from mlx_manager.mlx_server.models.checkpoint.rotations import check_rotations
from mlx_manager.mlx_server.models.checkpoint.sentence import (
    Activation,
    Dense,
    Sentence,
    check_supported,
    labels_of,
    rank_activation,
)
from mlx_manager.mlx_server.models.checkpoint.weight_files import (
    SINGLE,
    WeightFiles,
    check_safetensors,
)
from mlx_manager.mlx_server.models.facts import WeightsForm
from mlx_manager.mlx_server.models.kinds import kind_of
from mlx_manager.mlx_server.models.loading.load import (
    NONE,
    Checked,
    Foresight,
    allowed_context,
    check_room,
    check_size,
    check_steps,
    granted,
    settle,
)
from mlx_manager.mlx_server.models.loading.tokenizers import read_encoder_tokenizer
from mlx_manager.mlx_server.models.loading.weights import (
    activation_dtype,
    widened,
)
from mlx_manager.mlx_server.models.settings import AS_IT_IS, Recipe
from mlx_manager.mlx_server.utils.broken import explained
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.progress import Doing, unheard

PREFIXES = ("bert.", "roberta.", "model.")
"""Prefixes of the bare model's names in a checkpoint of a model with a head."""
OTHER_HEADS = ("cls.", "lm_head.", "decoder.", "score.")
OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An embedding model or reranker in memory. `activation` is a reranker's.

    single, pair: how a text and, for a reranker, two are put to the model. nbytes: its weights',
    measured. context_length: tokens of an input, special ones included.
    """

    id: str
    path: Path
    kind: Kind
    model: Encoder
    tokenizer: PreTrainedTokenizerBase
    config: Mapping[str, Any]
    sentence: Sentence
    single: Wrapping
    pair: Wrapping
    activation: Activation
    family: str
    context_length: int
    nbytes: int
    weights: WeightsForm


def load_encoder(
    source: ModelSource,
    limits: PoolLimits,
    ledger: Ledger,
    recipe: Recipe = AS_IT_IS,
    *,
    foresight: Foresight = NONE,
    prepared: PreparedEncoder | None = None,
    doing: Doing = unheard,
) -> LoadedEncoder:
    """Load an encoder; see `loading.load`.

    Raises:
        ModelNotSupported: an architecture or a variation that is not known here.
        ModelLoadFailed: the folder's files are missing, broken or contradict each other.
        ModelTooLarge: the weights exceed the memory limit, whatever else is unloaded.
        OutOfMemory: they would fit if models in use were not.
    """
    load_fast_blas()
    limits = replace(limits, weights=recipe.weights or limits.weights)
    with explained(source.id):
        ready = prepared or prepared_encoder(source, limits, recipe, ledger.total, doing=doing)
        checked, tokenizer = ready.checked, ready.tokenizer
        folder, kind, sentence = checked.folder, checked.kind, checked.sentence
        check_room(source.id, checked.nbytes, ledger)
        doing("its modules are made")
        model = build(folder, kind, sentence, source.id)
    check_steps(source.id, model, foresight.least_working(model, checked.context_length), ledger)
    with granted(source.id, checked.nbytes, ledger), explained(source.id):
        single = Wrapping.single(tokenizer)
        pair = Wrapping.pair(tokenizer) if kind == "reranker" else single
        check_wrapping(pair, model, source.id)
        doing("its weights are read")
        # A mask of -1e9 is minus infinity in float16, and rows without a token in sight NaN.
        if activation_dtype(model) == mx.float16 and folder.model_type == "modernbert":
            model.update(tree_map(widened, model.parameters()))
        weights, nbytes = settle(model, source.id, limits, ledger, doing=doing)
        return LoadedEncoder(
            source.id,
            folder.path,
            kind,
            model,
            tokenizer,
            folder.config,
            sentence,
            single,
            pair,
            checked.activation,
            folder.model_type,
            checked.context_length,
            nbytes,
            weights,
        )


@dataclass(frozen=True, slots=True)
class CheckedEncoder(Checked):
    """`activation` is a reranker's."""

    kind: Kind
    sentence: Sentence
    activation: Activation


@dataclass(frozen=True, slots=True)
class PreparedEncoder:
    """Parts of a load that come of the small files alone."""

    checked: CheckedEncoder
    tokenizer: PreTrainedTokenizerBase


def prepared_encoder(
    source: ModelSource,
    limits: PoolLimits,
    recipe: Recipe,
    most: int,
    *,
    doing: Doing = unheard,
) -> PreparedEncoder:
    """Read all but the weights; see `loading.prepared_text`.

    Raises:
        ModelNotSupported, ModelLoadFailed: as `checked_encoder` does.
        ModelTooLarge: the weights exceed `most`.
        ValueError, OSError, ...: what the libraries raise over a tokenizer.
    """
    doing("its files are looked at")
    checked = checked_encoder(source, recipe)
    check_size(source.id, checked.nbytes, most)
    doing("its tokenizer is read")
    tokenizer = read_encoder_tokenizer(checked.folder.path, limits.trust_remote_code)
    return PreparedEncoder(checked, tokenizer)


def checked_encoder(source: ModelSource, recipe: Recipe) -> CheckedEncoder:
    """
    Raises:
        ModelNotSupported: an architecture or a variation that is not known here, or an adapter.
        ModelLoadFailed: a file is missing or broken, or the recipe asks for what can't be.
    """
    assert source.path is not None, "it is downloaded before it is loaded"
    folder = ModelFolder.read(source.path)
    check_supported(folder, source.id)
    folder.check()
    if recipe.adapter is not None:
        raise ModelNotSupported(f"{source.id} is an encoder; adapters are for text models.")
    kind = kind_of(folder)
    activation: Activation = "identity"
    if kind == "reranker":
        if (labels := labels_of(folder.config)) != 1:
            raise ModelNotSupported(
                f"{source.id} is a classifier of {labels} labels; a reranker has one."
            )
        activation = rank_activation(folder)
    sentence = Sentence.read(folder)
    for layer in sentence.dense:
        check_safetensors(layer.path / SINGLE)
    context = allowed_context(source.id, sentence.max_length, recipe)
    return CheckedEncoder(folder, context, folder.nbytes, kind, sentence, activation)


def build(folder: ModelFolder, kind: Kind, sentence: Sentence, model_id: str) -> Encoder:
    """Return the encoder with its weights, not evaluated."""
    head = None
    if kind == "reranker":
        head = head_of(folder.config, labels_of(folder.config), model_id)
    config = with_old_names(in_all_forms(folder.config))
    model = Encoder(config, sentence.pooling, head)
    check_rotations(model, config, folder.path / "config.json")
    check_padding(model, model_id)
    model.dense = [dense_layer(layer) for layer in sentence.dense]
    found = arrays_in(folder.weights)
    weights = dict(body_weights(found, model))
    if head is not None:
        weights |= head_weights(found)
    for index, layer in enumerate(sentence.dense):
        own = arrays_in(WeightFiles((layer.path / SINGLE,)))
        weights |= {f"dense.{index}.{name}": array for name, array in own.items()}
    quantize(model, folder.config, weights)
    fill(model, weights, model_id)
    model.eval()
    return model


def check_padding(model: Encoder, model_id: str) -> None:
    """Check the padding's id: MLX reads out of bounds at an id beyond the embedding's rows.

    Raises:
        ModelLoadFailed: short rows would be filled up with such an id.
    """
    if not 0 <= model.padding < model.vocabulary:
        raise ModelLoadFailed(
            f"{model_id} can't be loaded: its config.json has the pad_token_id {model.padding}, "
            f"and with its vocab_size it may be between 0 and {model.vocabulary - 1}."
        )


def check_wrapping(wrapping: Wrapping, model: Encoder, model_id: str) -> None:
    """Check the tokens that the tokenizer puts around texts, as `check_padding` does.

    Raises:
        ModelLoadFailed: the model lacks such a token or segment.
    """
    highest = max(wrapping.special, default=0)
    if highest >= model.vocabulary:
        raise ModelLoadFailed(
            f"{model_id} can't be loaded: its tokenizer puts the special token {highest} to texts, "
            f"and by the vocab_size of its config.json ids are below {model.vocabulary}."
        )
    if model.segments < (needed := 2 if wrapping.segments else 1):
        raise ModelLoadFailed(
            f"{model_id} can't be loaded: its tokenizer gives texts the segments below {needed}, "
            f"and the type_vocab_size of its config.json is {model.segments}."
        )


def body_weights(found: Mapping[str, mx.array], model: Encoder) -> Iterator[tuple[str, mx.array]]:
    """Yield the architecture's own weights, by the names that mlx-embeddings gives them."""
    plain: dict[str, mx.array] = {}
    for name, array in found.items():
        if name.startswith((*OTHER_HEADS, "classifier.", "head.")):
            continue
        plain[plain_name(name)] = array
    for name, array in model.body.sanitize(plain).items():
        yield f"body.{name}", array


def plain_name(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def head_weights(found: Mapping[str, mx.array]) -> dict[str, mx.array]:
    return {
        f"head.{name}": array
        for name, array in found.items()
        if name.startswith(("classifier.", "head."))
    }


def dense_layer(layer: Dense) -> DenseLayer:
    config = read_json(layer.path / "config.json")
    return DenseLayer(
        config["in_features"], config["out_features"], config.get("bias", True), layer.activation
    )


def quantize(model: Encoder, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Make the layers quantised that are stored so."""
    found = config.get("quantization")
    if found is None:
        return

    def stored_so(path: str, module: nn.Module) -> Any:
        own = found.get(path.removeprefix("body."))
        is_stored = f"{path}.scales" in weights and hasattr(module, "to_quantized")
        return own if is_stored and isinstance(own, dict) else is_stored

    nn.quantize(
        model,
        group_size=found["group_size"],
        bits=found["bits"],
        mode=found.get("mode", "affine"),
        class_predicate=stored_so,
    )


def fill(model: Encoder, weights: Mapping[str, mx.array], model_id: str) -> None:
    """Give every parameter its weight. A pooler that nothing reads may be missing.

    Raises:
        ModelLoadFailed: a weight is missing, or has another shape than config.json says.
    """
    for name, parameter in tree_flatten(model.parameters()):
        if name not in weights:
            if name.startswith("body.pooler.") and not model.needs_pooler:
                continue
            raise ModelLoadFailed(f"{model_id} can't be loaded: {name} is missing.")
        if weights[name].shape != parameter.shape:
            raise ModelLoadFailed(
                f"{model_id} can't be loaded: {name} has the shape {weights[name].shape}, and by "
                f"config.json it is {parameter.shape}."
            )
    model.load_weights(list(weights.items()), strict=False)

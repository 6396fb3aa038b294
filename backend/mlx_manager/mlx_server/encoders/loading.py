"""From a model's files to an encoder in memory. Everything here runs on the MLX thread."""

from __future__ import annotations

from collections.abc import Mapping
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
from mlx_manager.mlx_server.encoders.architectures import ARCHITECTURES
from mlx_manager.mlx_server.encoders.architectures.architecture import (
    Architecture,
    Config,
    ScoreHead,
)
from mlx_manager.mlx_server.encoders.encoder import EncoderModel
from mlx_manager.mlx_server.encoders.pairs import Answers, PairPrompt, answers_of, prompt_of
from mlx_manager.mlx_server.encoders.pooling import DenseLayer
from mlx_manager.mlx_server.encoders.words import WordsHead, rows_of
from mlx_manager.mlx_server.encoders.wrapping import Wrapping
from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.checkpoint.building import arrays_in
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.ranking import is_generative
from mlx_manager.mlx_server.models.checkpoint.sentence import (
    Activation,
    Sentence,
    check_supported,
    labels_of,
    rank_activation,
)
from mlx_manager.mlx_server.models.checkpoint.weight_files import (
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
    bytes_of,
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

MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An embedding model or reranker in memory. `activation` is a reranker's.

    single, pair: how a text and, for a reranker, two are put to the model. prompt: the text around
    a reranker's pair, if it takes them as one; `pair` has the tokens after it then. nbytes: its
    weights', measured. context_length: tokens of an input, special ones included.
    """

    id: str
    path: Path
    kind: Kind
    model: EncoderModel
    tokenizer: PreTrainedTokenizerBase
    config: Mapping[str, Any]
    sentence: Sentence
    single: Wrapping
    pair: Wrapping
    prompt: PairPrompt | None
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
        model = build(checked, ready.answers, source.id)
    least = foresight.least_working(model, checked.context_length)
    check_steps(source.id, bytes_of(model) + least, ledger)
    with granted(source.id, checked.nbytes, ledger), explained(source.id):
        single = Wrapping.single(tokenizer)
        pair = pair_wrapping(ready, single)
        check_wrapping(pair, model, source.id)
        doing("its weights are read")
        if ARCHITECTURES[folder.model_type].wide and activation_dtype(model) == mx.float16:
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
            ready.prompt,
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
    """Parts of a load that come of the small files alone.

    answers: the words of a generative reranker. prompt: see `LoadedEncoder`.
    """

    checked: CheckedEncoder
    tokenizer: PreTrainedTokenizerBase
    answers: Answers | None = None
    prompt: PairPrompt | None = None


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
    folder, sentence = checked.folder, checked.sentence
    tokenizer = read_encoder_tokenizer(folder.path, limits.trust_remote_code)
    if checked.kind != "reranker":
        return PreparedEncoder(checked, tokenizer)
    instruction = sentence.prompts.get(sentence.default_prompt or "")
    return PreparedEncoder(
        checked,
        tokenizer,
        answers_of(folder, tokenizer, source.id),
        prompt_of(folder, tokenizer, instruction, source.id),
    )


def checked_encoder(source: ModelSource, recipe: Recipe) -> CheckedEncoder:
    """
    Raises:
        ModelNotSupported: an architecture or a variation that is not known here, or an adapter.
        ModelLoadFailed: a file is missing or broken, or the recipe asks for what can't be.
    """
    assert source.path is not None, "it is downloaded before it is loaded"
    folder = ModelFolder.read(source.path)
    check_supported(folder, source.id)
    architecture = ARCHITECTURES[folder.model_type]
    architecture.sizes(Config(folder.config, source.id))
    folder.check()
    if recipe.adapter is not None:
        raise ModelNotSupported(f"{source.id} is an encoder; adapters are for text models.")
    if recipe.kv_bits is not None:
        raise ModelNotSupported(
            f"{source.id} is an encoder and keeps no keys and values; kv_bits is for text models."
        )
    kind = kind_of(folder)
    activation: Activation = "identity"
    if kind == "reranker" and not is_generative(folder):
        if architecture.head is None:
            raise ModelNotSupported(
                f"{source.id} is a {folder.model_type} reranker; of that architecture only "
                "embedding models can be served."
            )
        if (labels := labels_of(folder.config)) != 1:
            raise ModelNotSupported(
                f"{source.id} is a classifier of {labels} labels; a reranker has one."
            )
    if kind == "reranker":
        activation = rank_activation(folder)
    sentence = Sentence.read(folder)
    if kind == "reranker" and sentence.dense:
        raise ModelNotSupported(
            f"{source.id} is a reranker with a Dense module after its head: not done here."
        )
    for layer in sentence.dense:
        if layer.file is not None:
            check_safetensors(layer.file)
    context = allowed_context(source.id, sentence.max_length, recipe)
    return CheckedEncoder(folder, context, folder.nbytes, kind, sentence, activation)


def build(checked: CheckedEncoder, answers: Answers | None, model_id: str) -> EncoderModel:
    """Return the encoder with its weights, not evaluated.

    answers: the words of a generative reranker.
    """
    folder, sentence = checked.folder, checked.sentence
    architecture, config = ARCHITECTURES[folder.model_type], Config(folder.config, model_id)
    head: ScoreHead | None = None
    if answers is not None:
        head = WordsHead(architecture.sizes(config).hidden, answers)
    elif checked.kind == "reranker" and architecture.head is not None:
        head = architecture.head(config, labels_of(folder.config))
    dense = [
        DenseLayer(layer.inputs, layer.outputs, layer.bias, layer.activation)
        for layer in sentence.dense
    ]
    padding = folder.config.get("pad_token_id") or 0
    model = EncoderModel(architecture.body(config), head, sentence.poolings, dense, padding)
    check_padding(model, model_id)
    weights = weights_of(folder, sentence, architecture)
    if answers is not None:
        weights |= rows_of(weights, answers, folder.config)
    quantize(model, folder.config, weights)
    fill(model, weights, architecture, model_id)
    model.eval()
    return model


def check_padding(model: EncoderModel, model_id: str) -> None:
    """Check the padding's id: MLX reads out of bounds at an id beyond the embedding's rows.

    Raises:
        ModelLoadFailed: short rows would be filled up with such an id.
    """
    if not 0 <= model.padding < model.vocabulary:
        raise ModelLoadFailed(
            f"{model_id} can't be loaded: its config.json has the pad_token_id {model.padding}, "
            f"and with its vocab_size it may be between 0 and {model.vocabulary - 1}."
        )


def check_wrapping(wrapping: Wrapping, model: EncoderModel, model_id: str) -> None:
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


def pair_wrapping(ready: PreparedEncoder, single: Wrapping) -> Wrapping:
    """Return how a reranker's pair is put to it; `single` for an embedding model.

    Raises:
        ValueError: the tokenizer can't tell.
    """
    if ready.checked.kind != "reranker":
        return single
    if ready.prompt is None:
        return Wrapping.pair(ready.tokenizer)
    after = ready.tokenizer(ready.prompt.after, add_special_tokens=False)["input_ids"]
    return Wrapping((), (), tuple(after), segments=False)


def weights_of(
    folder: ModelFolder, sentence: Sentence, architecture: Architecture
) -> dict[str, mx.array]:
    """Return a model's tensors by their names in the modules, less `body.` and `head.`.

    Raises:
        ModelLoadFailed: two tensors have the same place.
    """
    weights: dict[str, mx.array] = {}
    for name, array in arrays_in(folder.weights).items():
        if (plain := architecture.plain(name)) in weights:
            raise ModelLoadFailed(f"{folder.path} has the weights {plain} twice, once as {name}.")
        weights[plain] = array
    for index, layer in enumerate(sentence.dense):
        own = f"dense.{index}."
        if layer.file is not None:
            found = arrays_in(WeightFiles((layer.file,)))
            weights |= {f"{own}{name}": array for name, array in found.items()}
        else:
            for name in [name for name in weights if name.startswith(own)]:
                weights[f"{own}linear.{name.removeprefix(own)}"] = weights.pop(name)
    return weights


def place_of(path: str) -> str:
    """Return the name of a tensor or module in a checkpoint, by its path in an `EncoderModel`."""
    return path.removeprefix("body.").removeprefix("head.")


def quantize(
    model: EncoderModel, config: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> None:
    """Make the layers quantised that are stored so."""
    found = config.get("quantization")
    if found is None:
        return

    def stored_so(path: str, module: nn.Module) -> Any:
        place = place_of(path)
        is_stored = f"{place}.scales" in weights and hasattr(module, "to_quantized")
        # Converters to MLX name modules as they had them.
        names = (place, f"model.{place}", place.removesuffix(".linear"))
        own = next((own for name in names if isinstance(own := found.get(name), dict)), None)
        return own if is_stored and own is not None else is_stored

    nn.quantize(
        model,
        group_size=found["group_size"],
        bits=found["bits"],
        mode=found.get("mode", "affine"),
        class_predicate=stored_so,
    )


def fill(
    model: EncoderModel, weights: Mapping[str, mx.array], architecture: Architecture, model_id: str
) -> None:
    """Give every parameter its weight.

    Raises:
        ModelLoadFailed: a weight is missing, or has another shape or type than config.json says,
            or the modules have no place for it.
    """
    filled: dict[str, mx.array] = {}
    for path, parameter in tree_flatten(model.parameters()):
        name = place_of(path)
        if name not in weights:
            raise ModelLoadFailed(f"{model_id} can't be loaded: {name} is missing.")
        if weights[name].shape != parameter.shape:
            raise ModelLoadFailed(
                f"{model_id} can't be loaded: {name} has the shape {weights[name].shape}, and by "
                f"config.json it is {parameter.shape}."
            )
        kinds = [array.dtype for array in (weights[name], parameter)]
        if len({mx.issubdtype(dtype, mx.floating) for dtype in kinds}) > 1:
            raise ModelLoadFailed(
                f"{model_id} can't be loaded: {name} has the type {kinds[0]}, which its "
                "config.json does not explain."
            )
        filled[path] = weights[name]
    read = {place_of(path) for path in filled}
    heads = {place_of(path).partition(".")[0] for path in filled if path.startswith("head.")}
    spare = sorted(
        name
        for name in weights.keys() - read
        if name.partition(".")[0] in heads
        or not (name.startswith(architecture.unread) or is_computed(name))
    )
    if spare:
        more = f" and {len(spare) - MOST_NAMED} more" if len(spare) > MOST_NAMED else ""
        raise ModelLoadFailed(
            f"{model_id} can't be loaded: by its config.json it has no place for the weights "
            f"{', '.join(spare[:MOST_NAMED])}{more}."
        )
    model.load_weights(list(filled.items()))


def is_computed(name: str) -> bool:
    """Return whether a tensor is RoPE's frequencies, which old checkpoints hold."""
    return name.endswith("rotary_emb.inv_freq")

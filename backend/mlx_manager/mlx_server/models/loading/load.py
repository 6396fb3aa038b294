"""The load of a text model, from its folder to a model that can be run.

Everything that the files can tell is checked before a byte of the weights is read. An unknown
architecture, a truncated file, or a model that does not fit is refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_adapters

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas
from mlx_manager.mlx_server.devices.dtypes import dtype_name
from mlx_manager.mlx_server.errors import (
    ModelLoadFailed,
    ModelNotSupported,
    ModelTooLarge,
    OutOfMemory,
)
from mlx_manager.mlx_server.models.adapters import Adapter, get_adapter
from mlx_manager.mlx_server.models.architectures import has_architecture
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.checkpoint.building import BuildPlan, build, planned
from mlx_manager.mlx_server.models.checkpoint.files import read_json
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.weight_files import check_safetensors
from mlx_manager.mlx_server.models.facts import WeightsForm
from mlx_manager.mlx_server.models.loading.layout import lay_out
from mlx_manager.mlx_server.models.loading.shards import (
    ReadShare,
    Spread,
    check_shared,
    copies_of,
    held,
    shard,
)
from mlx_manager.mlx_server.models.loading.timing import fastest
from mlx_manager.mlx_server.models.loading.tokenizers import read_tokenizer
from mlx_manager.mlx_server.models.loading.vision import load_vision, tower_bytes
from mlx_manager.mlx_server.models.loading.weights import (
    activation_dtype,
    convert,
    default_device,
    evaluate,
    forms_of,
    shortlist,
)
from mlx_manager.mlx_server.models.settings import AS_IT_IS, Recipe, makers_sampling
from mlx_manager.mlx_server.utils.broken import explained
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.progress import Doing, unheard
from mlx_manager.mlx_server.utils.revisions import Stamp, stamps_of
from mlx_manager.mlx_server.utils.text import sized
from mlx_manager.mlx_server.vision.prompts import Vision

log = logging.getLogger(__name__)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapters.safetensors"
ADAPTER_KEYS = ("num_layers", "lora_parameters")
KV_SHARE = 0.2
"""Share of the memory limit that a conversion of the weights leaves for KV pages."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with all that is needed to talk to it. nbytes: measured, of its weights.

    vocabulary: rows of its embedding; the tokenizer may have fewer tokens, or more. sampling: the
    makers' sampling values, for requests that give none. vision: what it sees by; None for a model
    that takes no pictures. files: those that it was made of, as they were before the load.
    """

    id: str
    path: Path
    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    adapter: Adapter
    family: str
    context_length: int
    vocabulary: int
    nbytes: int
    weights: WeightsForm
    sampling: Mapping[str, float]
    kind: Literal["text"] = "text"
    vision: Vision | None = None
    files: tuple[Stamp, ...] = ()


def weights_line(model_id: str) -> str:
    """Return the name of the ledger's line for a model's weights."""
    return f"weights:{model_id}"


@dataclass(frozen=True, slots=True)
class Foresight:
    """The engine's knowledge of a model before its weights are there.

    least_working: returns the least working memory of its steps in bytes, by its context length.
    multiplies_packed: returns True if there are kernels for few rows and its packed weights.
    """

    least_working: Callable[[nn.Module, int], int] = lambda model, context_length: 0
    multiplies_packed: Callable[[nn.Module], bool] = lambda model: False


NONE = Foresight()


def load(
    source: ModelSource,
    limits: PoolLimits,
    ledger: Ledger,
    recipe: Recipe = AS_IT_IS,
    *,
    foresight: Foresight = NONE,
    prepared: PreparedText | None = None,
    beside: int = 0,
    spread: Spread | None = None,
    doing: Doing = unheard,
) -> LoadedModel:
    """Load a model, on the MLX thread. Its weights are then in the ledger as `weights:<id>`.

    prepared: the result of `prepared_text` for the same source and recipe. beside: bytes still to
    be loaded, of a draft model. spread: the devices that share the weights; None: this one has them
    all. doing: called with each stage that begins.

    Raises:
        ModelNotSupported: mlx-lm lacks the architecture, or it needs code of the repository.
        ModelLoadFailed: the folder's files are missing, broken or contradict each other.
        ModelTooLarge: the weights exceed the memory limit, whatever else is unloaded.
        OutOfMemory: they would fit if models in use were not.
    """
    load_fast_blas()
    limits = replace(limits, weights=recipe.weights or limits.weights)
    with explained(source.id):
        ready = prepared or prepared_text(source, limits, recipe, ledger.total, doing=doing)
        checked, nbytes = ready.checked, held(ready.checked.nbytes, spread)
        check_room(source.id, nbytes, ledger)
        doing("its modules are made")
        model, config = made(source.id, checked, spread)
    beside += tower_bytes(checked.plan)
    working = foresight.least_working(model, checked.context_length) * copies_of(spread)
    check_steps(source.id, held(bytes_of(model), spread) + working + beside, ledger)
    with granted(source.id, nbytes, ledger), explained(source.id):
        doing("its weights are read")
        if recipe.adapter is not None:
            model = adapted(model, recipe.adapter)
        settled = partial(settle, foresight=foresight, beside=beside, spread=spread, doing=doing)
        weights, nbytes = settled(model, source.id, limits, ledger)
        vision = load_vision(source.id, checked.plan, ready.tokenizer, model, ledger, doing=doing)
        nbytes += 0 if vision is None else bytes_of(vision.tower.module)
        ledger.record(weights_line(source.id), nbytes)
        return LoadedModel(
            source.id,
            checked.folder.path,
            model,
            ready.tokenizer,
            config,
            ready.adapter,
            ready.adapter.family,
            checked.context_length,
            embedded(config) or len(ready.tokenizer),
            nbytes,
            weights,
            makers_sampling(checked.folder.path),
            vision=vision,
            files=checked.files,
        )


def made(
    model_id: str, checked: CheckedText, spread: Spread | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model's modules, their weights not yet read, and its config.

    Raises:
        ModelNotSupported: it is to be spread over devices, and can't be.
    """
    model, config = build(checked.plan)
    if spread is not None:
        check_shared(model_id, model, checked.folder.model_type)
    return model, config


def settle(
    model: nn.Module,
    model_id: str,
    limits: PoolLimits,
    ledger: Ledger,
    foresight: Foresight = NONE,
    *,
    beside: int = 0,
    line: str | None = None,
    spread: Spread | None = None,
    doing: Doing = unheard,
) -> tuple[WeightsForm, int]:
    """Bring the weights into memory in the fastest form. Return the form, and the bytes, which the
    ledger has from now on. beside: bytes that are still to be loaded. line: the ledger's; None:
    `weights:<id>`. spread: as in `load`."""
    doing("the fastest form of its weights is chosen")
    line = line or weights_line(model_id)
    weights = settle_weights(model, line, limits, ledger, foresight, beside, spread)
    if spread is not None:
        shard(model_id, model, spread.group)
        check_share(model_id, model, spread, ledger)
        spread.begin(ReadShare(weights.name))
    elif default_device() == "cpu":
        log.info("%s: %s", model_id, lay_out(model, doing=doing))
    evaluate(model, doing)
    nbytes = bytes_of(model)
    if spread is not None:
        doing("the other devices read their shares")
        spread.wait()
        nbytes *= spread.copies
    ledger.record(line, nbytes)
    mx.clear_cache()
    return weights, nbytes


@dataclass(frozen=True, slots=True)
class Checked:
    """A model whose files are sound, as far as can be told without reading the weights.

    context_length: the recipe's, or the model's own. nbytes: of the weights' files, an adapter's
    included.
    """

    folder: ModelFolder
    context_length: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CheckedText(Checked):
    """A text model whose files are sound. plan: the plan by which it is built. files: those that it
    is made of, an adapter's included."""

    plan: BuildPlan
    files: tuple[Stamp, ...]


@dataclass(frozen=True, slots=True)
class PreparedText:
    """Parts of a load that need only the small files."""

    checked: CheckedText
    tokenizer: TokenizerWrapper
    adapter: Adapter


def prepared_text(
    source: ModelSource,
    limits: PoolLimits,
    recipe: Recipe,
    most: int,
    *,
    doing: Doing = unheard,
) -> PreparedText:
    """Read all but the weights. Any thread may call this; templates and disks may take long.

    most: bytes that the weights may take. doing: called with each stage that begins.

    Raises:
        ModelNotSupported, ModelLoadFailed: as `checked_text` does.
        ModelTooLarge: the weights exceed `most`.
        ValueError, OSError, ...: the libraries' errors over a tokenizer or template.
    """
    doing("its files are looked at")
    checked = checked_text(source, limits, recipe)
    check_size(source.id, checked.nbytes, most)
    doing("its tokenizer is read")
    tokenizer = read_tokenizer(checked.folder.path, limits.trust_remote_code)
    doing("its chat template is tried out")
    adapter = get_adapter(checked.plan.config, source.id, tokenizer)
    return PreparedText(checked, tokenizer, adapter)


def checked_text(source: ModelSource, limits: PoolLimits, recipe: Recipe) -> CheckedText:
    """Check a text model's files and recipe, and plan how it is built.

    Raises:
        ModelNotSupported: mlx-lm lacks the architecture, or it needs code of the repository.
        ModelLoadFailed: a file is missing or broken, or the recipe can't be followed.
    """
    folder = checked_folder(source, limits)
    context = allowed_context(source.id, folder.context_length, recipe)
    nbytes = folder.nbytes + adapter_bytes(recipe.adapter)
    files = stamps_of(filter(None, (folder.path, recipe.adapter)))
    return CheckedText(folder, context, nbytes, planned(folder), files)


def checked_folder(source: ModelSource, limits: PoolLimits) -> ModelFolder:
    assert source.path is not None, "it is downloaded before it is loaded"
    folder = ModelFolder.read(source.path)
    if not folder.model_type:
        raise ModelLoadFailed(f"{folder.path / 'config.json'} names no model_type.")
    if "model_file" in folder.config and not limits.trust_remote_code:
        raise ModelNotSupported(
            f"{source.id} needs Python code from its repository, "
            "which runs only with MLX_SERVER_TRUST_REMOTE_CODE=true."
        )
    if "model_file" not in folder.config and not has_architecture(folder.model_type):
        raise ModelNotSupported(
            f"{source.id} is a {folder.model_type!r} model, an architecture that "
            f"mlx-lm {version('mlx-lm')} does not have."
        )
    folder.check()
    return folder


def embedded(config: Mapping[str, Any]) -> int | None:
    """Return the rows of the embedding by the config, which was checked against the weights."""
    size: int | None = (config.get("text_config") or config).get(
        "vocab_size", config.get("vocab_size")
    )
    return size


def allowed_context(model_id: str, own: int, recipe: Recipe) -> int:
    """Return the recipe's context length, or the model's own.

    Raises:
        ModelLoadFailed: the owner asks for more than the model can take.
    """
    asked = recipe.context_length or own
    if asked > own:
        raise ModelLoadFailed(
            f"The settings give {model_id} a context_length of {asked}, and it can take {own}."
        )
    return asked


def adapter_bytes(adapter: Path | None) -> int:
    """Return the bytes of an adapter's weights, 0 without an adapter.

    Raises:
        ModelLoadFailed: there is no sound adapter in mlx-lm's format in that folder.
    """
    if adapter is None:
        return 0
    config = read_json(adapter / ADAPTER_CONFIG)
    if "peft_type" in config:
        raise ModelLoadFailed(
            f"{adapter} holds an adapter in PEFT's format. MLX loads those that mlx-lm trains or "
            f"that were converted for it: {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}."
        )
    missing = [key for key in ADAPTER_KEYS if key not in config]
    if missing and config.get("fine_tune_type") != "full":
        raise ModelLoadFailed(f"{adapter / ADAPTER_CONFIG} has no {missing[0]}.")
    check_safetensors(adapter / ADAPTER_WEIGHTS)
    return (adapter / ADAPTER_WEIGHTS).stat().st_size


def adapted(model: nn.Module, adapter: Path) -> nn.Module:
    """Return the model with its adapter's layers, which are fused into the weights that are dense.

    Quantised weights keep the adapter beside them: quantising the sum again would lose precision.
    """
    model = load_adapters(model, str(adapter))
    model.eval()
    dense = [
        (name, module.fuse())
        for name, module in model.named_modules()
        if isinstance(module, LoRALinear | DoRALinear) and isinstance(module.linear, nn.Linear)
    ]
    model.update_modules(tree_unflatten(dense))
    return model


def check_share(model_id: str, model: nn.Module, spread: Spread, ledger: Ledger) -> None:
    """Reserve what the shares in this memory take beyond what has been granted: what every rank has
    whole, such as embeddings.

    Raises:
        OutOfMemory: it is not left.
    """
    line, nbytes = weights_line(model_id), spread.copies * bytes_of(model)
    more = nbytes - ledger.figures()[line]
    if more > 0 and not ledger.reserve(line, more):
        raise crowded(model_id, nbytes, ledger.available(), ledger.total)


def settle_weights(  # noqa: PLR0917
    model: nn.Module,
    line: str,
    limits: PoolLimits,
    ledger: Ledger,
    foresight: Foresight,
    beside: int = 0,
    spread: Spread | None = None,
) -> WeightsForm:
    """Choose the weights' form and convert them to it, lazily. line, beside, spread: as in
    `settle`.

    Raises:
        ModelTooLarge: the form asked for does not fit.
    """
    device = default_device()
    granted_bytes = ledger.figures()[line]
    room = granted_bytes + ledger.available() - int(KV_SHARE * ledger.limit) - beside
    packed = spread is None and foresight.multiplies_packed(model)
    offered = [
        replace(form, nbytes=held(form.nbytes, spread))
        for form in forms_of(model, device, multiplies_packed=packed)
    ]
    forms, reason = shortlist(offered, limits.weights, room)
    form = next((form for form in forms if form.keeps), forms[0])
    if spread is not None:
        # Whole layers are timed, and no rank has any.
        form = forms[-1] if device == "cpu" else forms[0]
        reason = f"each of {spread.size} devices has its share"
    elif form.keeps:
        reason = "few rows are multiplied as they are stored, many by dense weights"
    elif len(forms) > 1:
        form, reason = fastest(model, forms, device)
    ledger.record(line, max(form.nbytes, granted_bytes))
    convert(model, form)
    return WeightsForm(form.name, dtype_name(activation_dtype(model)), reason)


@contextmanager
def granted(model_id: str, nbytes: int, ledger: Ledger, line: str | None = None) -> Iterator[None]:
    """Reserve memory for the weights, and give it back if the load fails. line: as in `settle`.

    Raises:
        OutOfMemory: less than `nbytes` is left, even after relief.
    """
    line = line or weights_line(model_id)
    if not ledger.reserve(line, nbytes):
        raise crowded(model_id, nbytes, ledger.available(), ledger.total)
    loaded = False
    try:
        yield None
        loaded = True
    finally:
        if not loaded:
            ledger.record(line, 0)
            mx.clear_cache()


def check_room(model_id: str, nbytes: int, ledger: Ledger) -> None:
    """Check that the weights can fit before anything is evicted for them: evictions in vain would
    repeat with the next request.

    Raises:
        ModelTooLarge: the memory limit is below `nbytes`.
        OutOfMemory: less than `nbytes` can be left, even after relief.
    """
    check_size(model_id, nbytes, ledger.total)
    if nbytes > (attainable := ledger.attainable()):
        raise crowded(model_id, nbytes, attainable, ledger.total)


def check_size(model_id: str, nbytes: int, most: int) -> None:
    """Check the weights' bytes against the memory limit.

    Raises:
        ModelTooLarge: the weights' bytes are more than models may take.
    """
    if nbytes > most:
        raise ModelTooLarge(
            f"The weights of {model_id} take {sized(nbytes)}, and the memory limit is "
            f"{sized(most)} (MLX_SERVER_MEMORY_LIMIT_GB)."
        )


def check_steps(model_id: str, needed: int, ledger: Ledger) -> None:
    """Check as `check_room` that the weights and the steps' working memory can fit together.

    needed: bytes of both.

    Raises: the errors of `check_room`.
    """
    said = f"The weights of {model_id} and what its steps work on take {sized(needed)}, and "
    if needed > ledger.total:
        raise ModelTooLarge(
            f"{said}the memory limit is {sized(ledger.total)} (MLX_SERVER_MEMORY_LIMIT_GB)."
        )
    if needed > (attainable := ledger.attainable()):
        raise OutOfMemory(
            f"{said}{sized(attainable)} of {sized(ledger.total)} are left beside the models in use "
            "or pinned.",
            retry_after=10,
        )


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's weights, in memory or not."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def crowded(model_id: str, nbytes: int, left: int, limit: int) -> OutOfMemory:
    return OutOfMemory(
        f"The weights of {model_id} take {sized(nbytes)}, and {sized(left)} of {sized(limit)} are "
        "left beside the models in use or pinned.",
        retry_after=10,
    )


def read_share(source: ModelSource, limits: PoolLimits, recipe: Recipe) -> nn.Module:
    """Make the modules of a model that several devices share, on a rank that rank 0 leads.

    Raises:
        ModelNotSupported, ModelLoadFailed: as `load`, which rank 0 does with the same files.
    """
    load_fast_blas()
    with explained(source.id):
        model, _ = build(checked_text(source, limits, recipe).plan)
        return model if recipe.adapter is None else adapted(model, recipe.adapter)


def take_share(
    model: nn.Module, model_id: str, share: ReadShare, group: mx.distributed.Group
) -> None:
    """Bring a rank's share of the weights into memory, in rank 0's form.

    Raises:
        ModelNotSupported: it can't be divided among so many ranks.
    """
    forms = {form.name: form for form in forms_of(model, default_device())}
    convert(model, forms[share.form])
    shard(model_id, model, group)
    evaluate(model)
    mx.clear_cache()

"""The load of a model's head for multi-token prediction (MTP), as a draft of the model.

A head becomes a model of one layer, of the model's own class. In the place of embeddings it has
`HeadInput`; its output goes to the model's own vocabulary. So all ways of running models run it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.checkpoint.building import (
    BuildPlan,
    Sanitize,
    arrays_in,
    built,
)
from mlx_manager.mlx_server.models.checkpoint.mtp import (
    QUANTISATIONS,
    HeadFiles,
    head_in,
    head_of,
)
from mlx_manager.mlx_server.models.family import MTPFacts
from mlx_manager.mlx_server.models.loading.draft import draft_line
from mlx_manager.mlx_server.models.loading.load import (
    NONE,
    CheckedText,
    Foresight,
    LoadedModel,
    bytes_of,
    check_room,
    granted,
    settle,
)
from mlx_manager.mlx_server.models.loading.weights import activation_dtype
from mlx_manager.mlx_server.models.settings import Recipe
from mlx_manager.mlx_server.utils.broken import explained
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.progress import Doing, unheard

log = logging.getLogger(__name__)

Call = Callable[[mx.array], mx.array]
Give = Callable[[mx.array, Sequence[int]], None]
"""Function that gives a head what its next run needs; see `HeadInput.give`."""

EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|scales|biases)")
UNFINISHED = ("weight_scale_inv", "weight_packed")
"""Parts of tensors that the model's class unpacks before it joins experts."""


@dataclass(frozen=True, slots=True)
class PreparedHead:
    """A head whose files are sound. id: of the model or folder that has it. of: the id of the
    model."""

    id: str
    files: HeadFiles
    plan: BuildPlan
    context_length: int
    of: str

    @property
    def nbytes(self) -> int:
        return self.files.nbytes


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """A model's own embeddings, and the product with its vocabulary."""

    embed: Call
    logits: Call
    nbytes: int

    @staticmethod
    def of(model: nn.Module) -> SharedVocabulary:
        """Return those of a model, before anything is put around its parts."""
        text = model
        while "language_model" in text.children():
            text = text["language_model"]
        embed = text["model"]["embed_tokens"]
        head = text.get("lm_head")
        return SharedVocabulary(
            embed.__call__,
            embed.as_linear if head is None else head.__call__,
            bytes_of(embed if head is None else head),
        )


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head in memory. nbytes: of its own weights. shared_bytes: of those of the model's that it
    is multiplied with. state_bytes: of a token's hidden state."""

    id: str
    model: nn.Module
    give: Give
    embedded: int
    context_length: int
    nbytes: int
    shared_bytes: int
    state_bytes: int


class HeadInput(nn.Module):  # type: ignore[misc] # mlx is not typed
    """Input of a head's layer, in the place of embeddings: of each token, its embedding and the
    hidden state before it, each normed, joined by a product.

    shared: the model's own parts. blank_first: see `MTPFacts`. A run that is given no hidden states
    has the embeddings in their place, as ways of running are compared.
    """

    def __init__(
        self, width: int, eps: float, shared: SharedVocabulary, *, blank_first: bool
    ) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(width, eps)
        self.hnorm = nn.RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self._shared = shared
        self._blank_first = blank_first
        self._states: list[mx.array] = []
        self._firsts: mx.array | None = None
        self._taken = 0

    def give(self, states: mx.array, first: Sequence[int]) -> None:
        """Take what the next run needs: the hidden states before its tokens, (tokens, width), in
        its order, and the numbers of the tokens at place 0."""
        self._states, self._taken = [states], 0
        self._firsts = mx.array(list(first)) if first and self._blank_first else None

    def __call__(self, tokens: mx.array) -> mx.array:
        embedded = self._shared.embed(tokens)
        states = embedded
        if self._states:
            # Passes of one run come in its order.
            first = self._taken
            self._taken = end = first + tokens.size
            given = self._states[0]
            if (padding := end - given.shape[0]) > 0:
                given = mx.pad(given, [(0, padding), (0, 0)])
            states = given[first:end].reshape(embedded.shape).astype(embedded.dtype)
            if self._firsts is not None:
                seen = mx.all(mx.arange(first, end)[:, None] != self._firsts, axis=1)
                embedded = embedded * seen.reshape(*tokens.shape, 1)
            if end >= given.shape[0]:
                self._states = []
        joined = mx.concatenate([self.enorm(embedded), self.hnorm(states)], axis=-1)
        out: mx.array = self.eh_proj(joined)
        return out

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Return the logits of hidden states, as tied embeddings do."""
        return self._shared.logits(hidden)


class SharedHead(nn.Module):  # type: ignore[misc]
    """The model's product with its vocabulary, in the place of a head's own."""

    def __init__(self, shared: SharedVocabulary) -> None:
        super().__init__()
        self._shared = shared

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._shared.logits(hidden)


def prepared_head(
    model_id: str, checked: CheckedText, beside: ModelSource | None
) -> PreparedHead | None:
    """Read all of a head but its weights; None if the model's own folder is asked for and has none.

    beside: the folder that has the head; None: the model's own.

    Raises:
        ModelLoadFailed: a file is missing or broken, or there is no head for the model in it.
    """
    plan = checked.plan
    kind = str(plan.config["model_type"])
    if beside is None:
        files = head_of(plan.folder, kind)
        if files is None:
            return None
        return PreparedHead(model_id, files, plan, checked.context_length, model_id)
    assert beside.path is not None, "it is downloaded before it is loaded"
    files = head_in(beside.path, plan.folder, kind)
    return PreparedHead(beside.id, files, plan, checked.context_length, model_id)


def load_head(
    prepared: PreparedHead,
    shared: SharedVocabulary,
    loaded: LoadedModel,
    recipe: Recipe,
    limits: PoolLimits,
    *,
    ledger: Ledger,
    foresight: Foresight = NONE,
    doing: Doing = unheard,
) -> LoadedHead:
    """Load a head, on the MLX thread. Its weights are in the ledger as `draft:<id>`, unless the
    load raises.

    shared, loaded, recipe: of the model.

    Raises:
        ModelLoadFailed: a file is broken, or the weights are not those of such a head.
        ModelTooLarge, OutOfMemory: there is no room for it beside the model.
    """
    line, name = draft_line(prepared.of), f"the MTP head of {prepared.id}"
    limits = replace(limits, weights=recipe.weights or limits.weights)
    check_room(name, prepared.nbytes, ledger)
    with granted(name, prepared.nbytes, ledger, line), explained(prepared.id):
        doing("its MTP head is read")
        model, given = build_head(prepared.files, prepared.plan, shared)
        weights, nbytes = settle(model, name, limits, ledger, foresight, line=line, doing=doing)
    log.info("%s drafts for %s: %s (%s)", name, prepared.of, weights.name, weights.reason)
    return LoadedHead(
        prepared.id,
        model,
        given.give,
        loaded.vocabulary,
        prepared.context_length,
        nbytes,
        shared.nbytes,
        given.enorm.weight.size * activation_dtype(loaded.model).size,
    )


def build_head(
    files: HeadFiles, plan: BuildPlan, shared: SharedVocabulary
) -> tuple[nn.Module, HeadInput]:
    """Build a head as a model of one layer, its parameters not evaluated. plan, shared: of the
    model it belongs to.

    Raises:
        ModelLoadFailed: its quantisation is unknown.
        ValueError, TypeError, ...: mlx-lm's errors over weights that do not fit.
    """
    inputs: list[HeadInput] = []

    def weights(model: nn.Module, sanitize: Sanitize) -> dict[str, mx.array]:
        inputs.append(put_in(model, shared, files.facts))
        stored = arrays_in(files.weights)
        found = {place: stored[name] for name, place in files.names.items()}
        if not any(name.endswith(UNFINISHED) for name in found):
            found = joined_experts(found)
        if files.raw and files.facts.centred:
            found = {name: _uncentred(name, array) for name, array in found.items()}
        return sanitize(found)

    model, _ = built(plan, one_layer(plan.config, files), weights)
    return model, inputs[0]


def put_in(model: nn.Module, shared: SharedVocabulary, facts: MTPFacts) -> HeadInput:
    """Put a head's input, and the model's vocabulary, in the place of a model's own."""
    text = model
    while "language_model" in text.children():
        text = text["language_model"]
    norm = text["model"]["norm"]
    given = HeadInput(norm.weight.size, norm.eps, shared, blank_first=facts.blank_first)
    text["model"]["embed_tokens"] = given
    for name in facts.absent:
        setattr(text["model"], name, None)
    if "lm_head" in text.children():
        text["lm_head"] = SharedHead(shared)
    return given


def one_layer(config: Mapping[str, Any], files: HeadFiles) -> dict[str, Any]:
    """Return a model's config.json changed to that of a model of the head's layer alone."""
    plain = {name: value for name, value in config.items() if name not in QUANTISATIONS}
    changed = {name: value for name, value in files.facts.config.items() if value is not None}
    text = plain.get("text_config")
    if isinstance(text, Mapping):
        own = {name: value for name, value in text.items() if name not in QUANTISATIONS}
        own = {name: value for name, value in own.items() if name not in files.facts.config}
        return {**plain, "text_config": own | changed, **files.quantisation}
    plain = {name: value for name, value in plain.items() if name not in files.facts.config}
    return {**plain, **changed, **files.quantisation}


def joined_experts(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return tensors with those of experts, each stored alone, joined as mlx-lm has them."""
    found: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        if match := EXPERT.fullmatch(name):
            mlp, number, kind, part = match.groups()
            place = f"{mlp}.switch_mlp.{kind}_proj.{part}"
            experts.setdefault(place, {})[int(number)] = array
        else:
            found[name] = array
    for place, each in experts.items():
        found[place] = mx.stack([each[number] for number in sorted(each)])
    return found


def _uncentred(name: str, array: mx.array) -> mx.array:
    """Return the weight of a norm plus one; other tensors as they are."""
    is_norm = array.ndim == 1 and name.endswith("norm.weight")
    return array + 1.0 if is_norm else array

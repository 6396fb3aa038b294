"""The load of a draft model beside the model that it drafts for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlx import nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.checkpoint.building import build
from mlx_manager.mlx_server.models.loading.load import (
    NONE,
    CheckedText,
    Foresight,
    adapted,
    check_room,
    checked_text,
    embedded,
    granted,
    settle,
)
from mlx_manager.mlx_server.models.loading.tokenizers import read_tokenizer
from mlx_manager.mlx_server.models.settings import Recipe
from mlx_manager.mlx_server.utils.broken import explained
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.progress import Doing, unheard

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedDraft:
    """A draft model whose files are sound and whose tokenizer is that of the model. tokens: the
    number of tokens of the tokenizer. of: the id of the model."""

    source: ModelSource
    recipe: Recipe
    checked: CheckedText
    tokens: int
    of: str


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model in memory. embedded: rows of its embedding. nbytes: of its weights."""

    id: str
    model: nn.Module
    embedded: int
    context_length: int
    nbytes: int


def draft_line(model_id: str) -> str:
    """Return the name of the ledger's line for the weights of a model's draft model."""
    return f"draft:{model_id}"


def prepared_draft(
    model_id: str,
    tokenizer: TokenizerWrapper,
    source: ModelSource,
    recipe: Recipe,
    limits: PoolLimits,
    *,
    doing: Doing = unheard,
) -> PreparedDraft:
    """Read all of a draft model but its weights.

    model_id, tokenizer: of the model that it drafts for.

    Raises:
        ModelNotSupported: mlx-lm lacks the architecture, or it needs code of the repository.
        ModelLoadFailed: a file is missing or broken, it is no model that generates, or its
            tokenizer is another.
    """
    doing(f"the files of its draft model {source.id} are looked at")
    with explained(source.id):
        if source.kind not in (None, "text"):
            raise ModelLoadFailed(f"{source.id} generates nothing: it can't draft for {model_id}.")
        checked = checked_text(source, limits, recipe)
        own = read_tokenizer(checked.folder.path, limits.trust_remote_code)
        difference = _difference(tokenizer.get_vocab(), own.get_vocab())
    if difference:
        raise ModelLoadFailed(
            f"{source.id} can't draft for {model_id}: their tokenizers differ. {difference} A "
            "draft model must have the same tokenizer (draft_model, MLX_SERVER_DRAFT_MODEL)."
        )
    return PreparedDraft(source, recipe, checked, len(own), model_id)


def load_draft(
    prepared: PreparedDraft,
    limits: PoolLimits,
    ledger: Ledger,
    foresight: Foresight = NONE,
    *,
    doing: Doing = unheard,
) -> LoadedDraft:
    """Load a draft model, on the MLX thread. Its weights are in the ledger as `draft:<id>`, with
    the id of the model that it drafts for, unless the load raises.

    Raises:
        ModelLoadFailed: a file is broken.
        ModelTooLarge, OutOfMemory: there is no room for it beside the model.
    """
    source, recipe, checked = prepared.source, prepared.recipe, prepared.checked
    line = draft_line(prepared.of)
    limits = replace(limits, weights=recipe.weights or limits.weights)
    check_room(source.id, checked.nbytes, ledger)
    with granted(source.id, checked.nbytes, ledger, line), explained(source.id):
        doing(f"its draft model {source.id} is read")
        model, config = build(checked.plan)
        if recipe.adapter is not None:
            model = adapted(model, recipe.adapter)
        weights, nbytes = settle(
            model, source.id, limits, ledger, foresight, line=line, doing=doing
        )
    log.info("%s drafts for %s: %s (%s)", source.id, prepared.of, weights.name, weights.reason)
    rows = embedded(config) or prepared.tokens
    return LoadedDraft(source.id, model, rows, checked.context_length, nbytes)


def _difference(model: Mapping[str, int], draft: Mapping[str, int]) -> str:
    """Return a sentence about the first token that two vocabularies do not share; "" if there is
    none. Each maps texts to numbers."""
    if model == draft:
        return ""
    texts = [{number: text for text, number in each.items()} for each in (model, draft)]
    for number in sorted(texts[0].keys() | texts[1].keys()):
        one, other = (each.get(number) for each in texts)
        if one != other:
            said = [f"is {each!r}" if each is not None else "is none" for each in (one, other)]
            return f"Token {number} {said[0]} in the model's and {said[1]} in the draft model's."
    return f"The model's has {len(model)} tokens and the draft model's {len(draft)}."

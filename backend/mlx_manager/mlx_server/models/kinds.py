"""The kind of a model (text, embedding, reranker), told from its folder."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from mlx_manager.mlx_server.core import Kind
from mlx_manager.mlx_server.errors import ModelLoadFailed, WrongModelKind
from mlx_manager.mlx_server.models.architectures import ALSO_GENERATE, ENCODERS, OTHER_ENCODERS
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.ranking import is_classifier, is_generative
from mlx_manager.mlx_server.models.checkpoint.sentence import MODULES

NEVER_GENERATES = (ENCODERS | OTHER_ENCODERS) - ALSO_GENERATE
HEADLESS = frozenset({"Qwen3Model", "Gemma3TextModel"})
"""Classes of architectures that also generate, without the head for tokens."""

MOST_NAMED = 5
PURPOSES: dict[Kind, tuple[str, str]] = {
    "text": ("a text model", "/v1/chat/completions"),
    "embedding": ("an embedding model", "/v1/embeddings"),
    "reranker": ("a reranker", "/v1/rerank"),
}


def kind_of(folder: ModelFolder) -> Kind:
    """Return the kind of a model. A head for classes, or words that stand for a score, make a
    reranker; sentence-transformers' files, or an architecture without a head for tokens, make an
    embedding model."""
    if is_classifier(folder) or answers(folder):
        return "reranker"
    architectures = folder.config.get("architectures") or ()
    headless = not HEADLESS.isdisjoint(architectures) or folder.model_type in NEVER_GENERATES
    if headless or (folder.path / MODULES).is_file():
        return "embedding"
    return "text"


def answers(folder: ModelFolder) -> bool:
    """Return whether a model is a reranker that answers with a word."""
    try:
        return is_generative(folder)
    except ModelLoadFailed:
        # The load of the embedding model that it may be tells what is broken.
        return False


def wrong_kind(model_id: str, kind: Kind, wanted: Kind, offered: Iterable[str]) -> WrongModelKind:
    """Return the error for a model of another kind than wanted. offered: models that would do."""
    own, path = PURPOSES[kind]
    needed, _ = PURPOSES[wanted]
    names = ", ".join(islice(offered, MOST_NAMED)) or "none"
    return WrongModelKind(
        f"{model_id} is {own}, which answers at {path}; this takes {needed}. "
        f"Offered here: {names}.",
        param="model",
    )

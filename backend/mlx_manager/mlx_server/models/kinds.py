"""The kind of a model (text, embedding, reranker), told from its folder."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from mlx_manager.mlx_server.core import Kind
from mlx_manager.mlx_server.errors import WrongModelKind
from mlx_manager.mlx_server.models.architectures import ENCODERS, OTHER_ENCODERS
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder

NEVER_GENERATES = frozenset({*ENCODERS, *OTHER_ENCODERS}) - {"qwen3"}
SENTENCE_TRANSFORMERS = "modules.json"

MOST_NAMED = 5
PURPOSES: dict[Kind, tuple[str, str]] = {
    "text": ("a text model", "/v1/chat/completions"),
    "embedding": ("an embedding model", "/v1/embeddings"),
    "reranker": ("a reranker", "/v1/rerank"),
}


def kind_of(folder: ModelFolder) -> Kind:
    """Return the kind of a model. A head for classes makes a reranker; sentence-transformers'
    files, or an architecture without a head for tokens, make an embedding model."""
    architectures = folder.config.get("architectures") or ()
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        return "reranker"
    headless = "Qwen3Model" in architectures or folder.model_type in NEVER_GENERATES
    if headless or (folder.path / SENTENCE_TRANSFORMERS).is_file():
        return "embedding"
    return "text"


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

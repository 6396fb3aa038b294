"""Rerankers that answer with a word, and how they are told from models that generate text.

Source: sentence-transformers 6.2, `cross_encoder/modules/logit_score.py`; vLLM's
`classifier_from_token`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mlx_manager.mlx_server.models.checkpoint.files import read_json_list
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.sentence import MODULES, module_kind

LOGIT_SCORE = "LogitScore"
WORDS = "classifier_from_token"
"""The setting of config.json that names the words for no and yes."""
ANSWERING = frozenset({"qwen3"})
"""Architectures whose next token can be a reranker's answer."""

NAMED = re.compile(r"qwen3[-_. ]?reranker", re.IGNORECASE)
"""Name of the makers' models, whose files say no more than that they generate text."""


def is_generative(folder: ModelFolder) -> bool:
    """Return whether a reranker's score is the logits of words. Its files say so, or its name.

    Raises:
        ModelLoadFailed: modules.json is broken.
    """
    if is_classifier(folder):
        return False
    if folder.config.get(WORDS):
        return True
    if (folder.path / MODULES).is_file():
        return logit_score(folder) is not None
    return folder.model_type in ANSWERING and is_makers(folder)


def is_classifier(folder: ModelFolder) -> bool:
    """Return whether a model has a head for classes."""
    architectures = folder.config.get("architectures") or ()
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def is_makers(folder: ModelFolder) -> bool:
    """Return whether a model is Qwen3-Reranker, or made from it, by its name."""
    names = [folder.path.name, folder.config.get("_name_or_path")]
    if folder.path.parent.name == "snapshots":
        # A hub's cache has the repository's name two folders above.
        names.append(folder.path.parent.parent.name)
    return any(isinstance(name, str) and NAMED.search(name) for name in names)


def logit_score(folder: ModelFolder) -> Path | None:
    """Return the folder of sentence-transformers' LogitScore; None if there is none.

    Raises:
        ModelLoadFailed: modules.json is broken.
    """
    if not (folder.path / MODULES).is_file():
        return None
    for module in read_json_list(folder.path / MODULES):
        if module_kind(module) == LOGIT_SCORE:
            return folder.path / str(module.get("path", ""))
    return None

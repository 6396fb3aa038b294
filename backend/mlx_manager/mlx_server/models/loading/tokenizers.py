"""Models' tokenizers, read from their folders by mlx-lm and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mlx_manager.mlx_server.models.architectures import with_known_names
from mlx_manager.mlx_server.models.checkpoint.files import read_json
from mlx_manager.mlx_server.models.checkpoint.folder import check_regular
from mlx_manager.mlx_server.models.families import vision_facts
from mlx_manager.mlx_server.utils.bare import BareErrors

UNREADABLE = BareErrors(f"tokenizers {version('tokenizers')} can't read its tokenizer.json")


@UNREADABLE
def read_tokenizer(folder: Path, trust_remote_code: bool) -> TokenizerWrapper:
    """Return a text model's tokenizer, with the end tokens that its config.json names.

    Args:
        trust_remote_code: code that comes with the model may make it.

    Raises:
        ModelLoadFailed: a file of the folder is not a regular file, or is far too large.
        ValueError, OSError, ...: the libraries' errors over files that they can't read.
    """
    check_regular(folder)
    config = load_config(folder)
    sees = vision_facts(with_known_names(config)) is not None
    options = {"trust_remote_code": trust_remote_code, **processors_template(folder, sees)}
    ends = config.get("eos_token_id")
    return load_tokenizer(folder, options, eos_token_ids=ends)


@UNREADABLE
def read_encoder_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return an embedding model's or reranker's tokenizer; raises what `read_tokenizer` does."""
    check_regular(folder)
    options = {"trust_remote_code": trust_remote_code}
    return AutoTokenizer.from_pretrained(folder, **options)  # nosec B615  # a folder on disk


def processors_template(folder: Path, sees: bool) -> Mapping[str, Any]:
    """Return the chat template of chat_template.json as an option of `from_pretrained`.

    Vision models used to have their template there, and transformers reads that file for such
    models only. sees: that one counts even if the tokenizer has a template of its own, which may
    know of no pictures.
    """
    file, settings = folder / "chat_template.json", folder / "tokenizer_config.json"
    if not file.is_file() or (folder / "chat_template.jinja").is_file():
        return {}
    if not sees and settings.is_file() and "chat_template" in read_json(settings):
        return {}
    return {"chat_template": read_json(file).get("chat_template")}

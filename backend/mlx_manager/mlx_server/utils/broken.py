"""Errors of libraries that read what others have written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError

from mlx_manager.mlx_server.errors import MLXManagerError, ModelLoadFailed

log = logging.getLogger(__name__)

BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Raised by mlx-lm, transformers, MLX and a repository's own code over files that are not as they
expect."""
LONGEST_PROBLEM = 500
"""Characters of a library's error that are passed on; the log has all of it."""


@contextmanager
def explained(model_id: str) -> Iterator[None]:
    """Turn what the libraries raise into an error that says which model, and what is wrong."""
    try:
        yield None
    except MLXManagerError:
        raise
    except BROKEN as error:
        log.info("loading %s failed", model_id, exc_info=error)
        raise ModelLoadFailed(f"{model_id} can't be loaded: {problem(error)}") from error


def problem(error: Exception) -> str:
    """What a library says is wrong, which may be a line for each of a thousand weights."""
    said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    said = said.strip() or type(error).__name__
    return said if len(said) <= LONGEST_PROBLEM else f"{said[:LONGEST_PROBLEM]} ..."

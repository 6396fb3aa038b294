"""Errors of libraries over the files of a model."""

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
"""Errors of mlx-lm, transformers, MLX and a repository's own code over files in an unexpected
form."""
LONGEST_PROBLEM = 500
"""Most characters of a library's error that are passed on; the log has all of it."""


@contextmanager
def explained(model_id: str) -> Iterator[None]:
    """Turn the libraries' errors into a `ModelLoadFailed` with the model and the problem."""
    try:
        yield None
    except MLXManagerError:
        raise
    except BROKEN as error:
        log.info("loading %s failed", model_id, exc_info=error)
        raise ModelLoadFailed(f"{model_id} can't be loaded: {problem(error)}") from error


def problem(error: Exception) -> str:
    """Return the text of a library's error, cut to `LONGEST_PROBLEM` characters: an error may have
    a line for each of a thousand weights."""
    said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    said = said.strip() or type(error).__name__
    return said if len(said) <= LONGEST_PROBLEM else f"{said[:LONGEST_PROBLEM]} ..."

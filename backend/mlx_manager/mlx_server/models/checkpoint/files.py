"""A model's small files, read as JSON: regular files of a sensible size alone."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from mlx_manager.mlx_server.errors import ModelLoadFailed

LARGEST_JSON = 256 * 2**20
"""Most bytes of a JSON file; a vocabulary of 250,000 tokens with its merges takes 40 MB."""
KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def unreadable(file: Path) -> str:
    """Return why an existing file must not be opened; "" for a regular one. Reading a FIFO or a
    device may block for ever.

    Raises:
        OSError: the file is not there.
    """
    mode = file.stat().st_mode
    if stat.S_ISREG(mode):
        return ""
    kind = next((name for is_kind, name in KINDS if is_kind(mode)), "no file")
    return f"{file} is {kind}; a regular file is expected."


def oversized(file: Path) -> str:
    """Return why a file is too large to be read as JSON; "" if it is not.

    Raises:
        OSError: the file is not there.
    """
    if (size := file.stat().st_size) <= LARGEST_JSON:
        return ""
    return f"{file} is too large: {size:,} bytes of at most {LARGEST_JSON:,}."


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ModelLoadFailed: the file is missing, unreadable, or no JSON object.
    """
    content = _read(file)
    if not isinstance(content, dict):
        raise ModelLoadFailed(f"{file} is not a JSON object.")
    return content


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """Return the list of JSON objects in a file.

    Raises:
        ModelLoadFailed: the file is missing, unreadable, or no list of JSON objects.
    """
    content = _read(file)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ModelLoadFailed(f"{file} is not a list of JSON objects.")
    return content


def _read(file: Path) -> Any:
    try:
        if odd := unreadable(file) or oversized(file):
            raise ModelLoadFailed(odd)
        return json.loads(file.read_bytes())
    except OSError as error:
        raise ModelLoadFailed(f"{file} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"{file} is not JSON: {error}.") from error

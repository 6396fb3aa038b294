"""Picture files that a person names on the command line, as requests carry them."""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_manager.mlx_server.images.decode import ALLOWED, MEDIA_TYPES, format_of, media_type_of


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture: its file's path as the person wrote it, and its bytes."""

    path: Path
    data: bytes = field(repr=False)

    def part(self, mark: bytes = b"") -> dict[str, Any]:
        """Return the content part of a chat request.

        mark: bytes behind the file's end, by which equal pictures are told apart.
        """
        text = base64.b64encode(self.data + mark).decode()
        url = f"data:{media_type_of(self.data)};base64,{text}"
        return {"type": "image_url", "image_url": {"url": url}}


def read_picture(path: Path) -> PictureFile:
    """Return the picture in a file.

    Raises:
        ValueError: it can't be read, or is none; the message is for people.
    """
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    except RuntimeError:
        raise ValueError(
            f"{path} can't be read: the home folder {path.parts[0]} is unknown."
        ) from None
    if (found := format_of(data)) not in MEDIA_TYPES.values():
        what = "no picture" if found is None else f"a {found}"
        raise ValueError(f"{path} is {what}; {ALLOWED} can be sent.")
    return PictureFile(path, data)


def paths_in(text: str) -> list[Path]:
    """Return the paths that a person wrote on one line, with quotes or backslashes as in a shell.

    A line that is the path of a file as it stands is that path.

    Raises:
        ValueError: a quote is not closed.
    """
    whole = Path(text)
    try:
        if whole.expanduser().is_file():
            return [whole]
    except (OSError, RuntimeError):
        pass
    try:
        return [Path(word) for word in shlex.split(text)]
    except ValueError as error:
        raise ValueError(f"{text}: {str(error).lower()}.") from None

"""Content of prompts, as their pages are known by it."""

from __future__ import annotations

from mlx_manager.mlx_server.engine.kv.contents import ContentNumbers, salted
from mlx_manager.mlx_server.engine.sequence import Sequence


class Contents:
    """Owner of the numbers that stand for pictures and salts in the content of an engine's rows."""

    def __init__(self) -> None:
        self._numbers = ContentNumbers()

    def name(self, sequence: Sequence) -> None:
        """Put numbers for pictures into their places of the sequence's `content`, and one for its
        salt into the first place, on which all of its pages depend."""
        pictures = () if sequence.images is None else sequence.images.pictures
        if not pictures and not sequence.salt:
            return
        content, names = list(sequence.tokens), {}
        for picture in pictures:
            number = self._numbers.of(picture.digest)
            names[number] = picture.digest
            for place in picture.places.tolist():
                content[place] = number
        if sequence.salt:
            # A picture's name has the salt already, and its rows need not fill the first page.
            name = salted(sequence.salt, names.get(content[0], content[0]))
            content[0] = self._numbers.of(name)
            names[content[0]] = name
        sequence.content, sequence.names = content, names

"""Names of blocks on disk: which model's they are, and which prefix they end or which picture's.

A block is a run of pages of one prefix. A prefix is cut at every `block_pages` pages, counted from
its beginning, so that prompts that begin alike share blocks. A block's name is the digest of all
content up to its end, as a page in memory is known by all content before it. The features of one
picture are a block, too, named by the picture.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

FORMAT = 1
"""Version of names and files. Files of another version are not read."""
DIGEST = 20
"""Bytes of a digest."""
BLOCK_TOKENS = 256
"""Tokens of a block, or a little less: whole pages."""
PLAIN, STATE, PICTURE = "kv", "state", "picture"
"""Kinds of blocks: pages alone, pages with the state of recurrent layers after them, and features
of a picture."""
KINDS = (PLAIN, STATE, PICTURE)
FILE = re.compile(rf"([0-9a-f]{{{2 * DIGEST}}})\.({'|'.join(KINDS)})\.safetensors")
TEMPORARY = ".new-"


@dataclass(frozen=True)
class Space:
    """A model in one form: only blocks of one space can stand for one another.

    model: its id, for people. facts: all that keys and values depend on: revision, adapter, dtype,
    page size, versions of programs.
    """

    model: str
    facts: Mapping[str, Any]

    @cached_property
    def digest(self) -> bytes:
        content = json.dumps([FORMAT, self.facts], sort_keys=True).encode()
        return hashlib.blake2b(content, digest_size=DIGEST).digest()

    @property
    def folder(self) -> str:
        """Return the name of the folder of its blocks."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.model).strip(".-")[-60:] or "model"
        return f"{plain}-{self.digest.hex()[:16]}"


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block of one space.

    digest: of the prefix that ends with it, or of a picture's name. kind: one of `KINDS`. first,
    end: its pages within the prefix, the end excluded; 0 and 1 for a picture.
    """

    digest: bytes
    kind: str
    first: int
    end: int

    @property
    def file(self) -> str:
        return f"{self.digest.hex()}.{self.kind}.safetensors"

    @property
    def pages(self) -> int:
        return self.end - self.first


def picture_name(digest: str) -> BlockName:
    """Return the name of a picture's features. digest: as `prompt_images.Picture` has it."""
    hashed = hashlib.blake2b(f"picture {digest}".encode(), digest_size=DIGEST)
    return BlockName(hashed.digest(), PICTURE, 0, 1)


class PrefixChain:
    """Digests of a sequence's prefixes, one for each of its full pages.

    page_size: tokens of a page. names: what the negative numbers in the content stand for, which
    other processes have other numbers for: pictures and salts; see `Sequence.names`.
    """

    def __init__(self, page_size: int, names: Mapping[int, str]) -> None:
        self._size = page_size
        self._names = names
        self._last = b""
        self._digests: list[bytes] = []

    def at(self, content: Sequence[int], number: int) -> bytes:
        """Return the digest of the prefix that ends with page `number` of `content`, which may have
        grown at its end only."""
        for page in range(len(self._digests), number + 1):
            part = content[page * self._size : (page + 1) * self._size]
            hashed = hashlib.blake2b(self._last, digest_size=DIGEST)
            hashed.update(self._key(part))
            self._last = hashed.digest()
            self._digests.append(self._last)
        return self._digests[number]

    def _key(self, part: Sequence[int]) -> bytes:
        """Return a page's content, without numbers that mean nothing in another process: each is
        replaced by its order in the page, and its name follows."""
        if not self._names or min(part) >= 0:
            return array("i", part).tobytes()
        order: dict[int, int] = {}
        for number in part:
            if number < 0:
                order.setdefault(number, -1 - len(order))
        plain = array("i", [order.get(number, number) for number in part]).tobytes()
        return plain + "".join(f"|{self._names[number]}" for number in order).encode()

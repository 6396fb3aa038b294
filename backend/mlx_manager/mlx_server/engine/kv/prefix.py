"""Prefix index: KV pages by (parent, contents).

The contents of a page are its tokens, and negative numbers (`contents.py`) for what these do not
tell: one for each picture that differs, where its rows stand, and one for the salt of a prompt in
its first place.

A page's keys and values depend on every token before it, so a page is identified by the node of
the page before it and its own contents, as in vLLM's automatic prefix caching. Keys are compared
whole, so two prefixes are never taken for one another, whatever their hashes. Node numbers are
never reused: the children of a forgotten page can no longer be reached, and age out.

Tokens are kept as bytes: as numbers they take four times the memory and twice the time to forget,
and the garbage collector visits each page of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count
from typing import NewType

Node = NewType("Node", int)
ROOT = Node(0)


Key = tuple[Node, bytes]


class PrefixIndex:
    """Full KV pages by the tokens that they hold."""

    def __init__(self) -> None:
        self._pages: dict[Key, tuple[int, Node]] = {}
        self._keys: dict[int, Key] = {}
        self._nodes = count(1)

    def __len__(self) -> int:
        return len(self._keys)

    def knows(self, page: int) -> bool:
        return page in self._keys

    def node(self, page: int) -> Node:
        return self._pages[self._keys[page]][1]

    def match(self, tokens: Sequence[int], page_size: int, limit: int) -> list[int]:
        """Return the pages of the longest known prefix of `tokens`, at most `limit` of them."""
        pages: list[int] = []
        parent = ROOT
        for i in range(limit):
            found = self._pages.get(key_of(parent, tokens[i * page_size : (i + 1) * page_size]))
            if found is None:
                break
            page, parent = found
            pages.append(page)
        return pages

    def insert(self, parent: Node, tokens: Sequence[int], page: int) -> Node:
        """Index `page`, unless an equal one is known; return the node to continue from."""
        key = key_of(parent, tokens)
        known = self._pages.get(key)
        if known is not None:
            return known[1]
        node = Node(next(self._nodes))
        self._pages[key] = (page, node)
        self._keys[page] = key
        return node

    def forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]


def key_of(parent: Node, tokens: Sequence[int]) -> Key:
    return parent, array("i", tokens).tobytes()

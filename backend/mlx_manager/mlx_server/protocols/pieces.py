"""JSON in pieces: a body of thousands of items takes long to write, and others are served between
any two pieces of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from mlx_manager.mlx_server.protocols import sse
from mlx_manager.mlx_server.schemas.wire import Wire

T = TypeVar("T")


def whole(body: Wire) -> str:
    """What was set of it, in one piece."""
    return body.model_dump_json(exclude_unset=True)


def filled(around: str, name: str, value: Iterable[str], empty: str = "[]") -> Iterator[str]:
    """An object with a value for its field `name`, which is empty. No client's JSON stands before.

    No text in it looks like this: there, quotes are escaped.
    """
    before, _, after = around.partition(f'"{name}":{empty}')
    yield f'{before}"{name}":'
    yield from value
    yield after


def joined(items: Iterable[Iterable[str]]) -> Iterator[str]:
    """A list of what is in pieces itself."""
    yield "["
    for number, item in enumerate(items):
        if number:
            yield ","
        yield from item
    yield "]"


def sliced(
    items: Sequence[T], most: int, written: Callable[[Sequence[T]], Sequence[object]] = list
) -> Iterator[str]:
    """A list, of which a piece has `most` items. written: some of them, as they are to be."""
    yield "["
    for start in range(0, len(items), most):
        some = written(items[start : start + most])
        yield ("," if start else "") + sse.dump(some)[1:-1]
    yield "]"

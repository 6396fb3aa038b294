"""JSON in pieces: a body of thousands of items takes long to write, and others are served between
any two pieces of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from mlx_manager.mlx_server.protocols import sse
from mlx_manager.mlx_server.schemas.wire import Wire

T = TypeVar("T")


def whole(body: Wire) -> str:
    """Return the JSON of the fields of `body` that were set, in one piece."""
    return body.model_dump_json(exclude_unset=True)


def filled(around: str, name: str, value: Iterable[str], empty: str = "[]") -> Iterator[str]:
    """Yield the object `around` with `value` in its field `name`, which is empty in `around`.

    No JSON of a client may precede the field. Text can't be mistaken for the field, since quotes in
    text are escaped.
    """
    before, _, after = around.partition(f'"{name}":{empty}')
    yield f'{before}"{name}":'
    yield from value
    yield after


def joined(items: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield a JSON list of items that are in pieces themselves."""
    yield "["
    for number, item in enumerate(items):
        if number:
            yield ","
        yield from item
    yield "]"


def sliced(
    items: Sequence[T], most: int, written: Callable[[Sequence[T]], Sequence[object]] = list
) -> Iterator[str]:
    """Yield a JSON list in pieces of `most` items. written: returns the JSON values of some."""
    yield "["
    for start in range(0, len(items), most):
        some = written(items[start : start + most])
        yield ("," if start else "") + sse.dump(some)[1:-1]
    yield "]"

"""Parts that differ in their arrays alone, so that one graph serves for all of them.

A part is an array, a dataclass, an MLX module, a list or a tuple of parts, or a constant. A
constant is anything else: constants are compared by value or, where they have none, by identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx
from mlx import nn

P = TypeVar("P")


def arrays_of(part: Any) -> list[mx.array]:
    """Return the arrays in `part`, in an order that is the same for all parts of its kind."""
    if isinstance(part, mx.array):
        return [part]
    return [array for _, inner in _inner(part) for array in arrays_of(inner)]


def kind_of(part: Any) -> tuple[Any, ...]:
    """Return a hashable key that is equal for parts that differ in the content of their arrays
    alone."""
    if isinstance(part, mx.array):
        return (part.shape, part.dtype)
    inner = tuple((name, kind_of(value)) for name, value in _inner(part))
    return (type(part), inner, _constants(part))


def made_of(part: P, arrays: Iterable[mx.array]) -> P:
    """Return a copy of `part` with `arrays` in place of its own, in the order of `arrays_of`."""
    made: P = _made(part, iter(arrays))
    return made


def _made(part: Any, arrays: Iterator[mx.array]) -> Any:
    if isinstance(part, mx.array):
        return next(arrays)
    inner = {name: _made(value, arrays) for name, value in _inner(part)}
    if not inner:
        return part
    if isinstance(part, nn.Module):
        module = copy(part)
        for name, value in inner.items():
            module[name] = value
        return module
    if isinstance(part, list | tuple):
        return type(part)(inner.values())
    return replace(part, **inner)


def _inner(part: Any) -> Iterable[tuple[Any, Any]]:
    """Return the inner parts of `part` by name or place; none for a constant."""
    if isinstance(part, nn.Module):
        return sorted(part.items())
    if isinstance(part, list | tuple):
        return enumerate(part)
    if is_dataclass(part):
        return [(field.name, getattr(part, field.name)) for field in fields(part)]
    return ()


def _constants(part: Any) -> Any:
    if isinstance(part, nn.Module):
        return tuple(
            (name, value)
            for name, value in sorted(vars(part).items())
            if name not in {"_no_grad", "_training"}
        )
    return None if isinstance(part, list | tuple) or is_dataclass(part) else part

"""Parts that are alike but for their arrays, so that what is put together for one serves for all.

A part is an array, a dataclass, an MLX module, a list or a tuple of parts, or a constant: anything
else, which is what it is by its value or, where it has none, by being the same.
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
    """The arrays in `part`, in an order that is the same for all of its kind."""
    if isinstance(part, mx.array):
        return [part]
    return [array for _, inner in _inner(part) for array in arrays_of(inner)]


def kind_of(part: Any) -> tuple[Any, ...]:
    """Equal, and hashable, for parts that are alike but for what is in their arrays."""
    if isinstance(part, mx.array):
        return (part.shape, part.dtype)
    inner = tuple((name, kind_of(value)) for name, value in _inner(part))
    return (type(part), inner, _constants(part))


def made_of(part: P, arrays: Iterable[mx.array]) -> P:
    """`part` with `arrays` in place of its own, in the order of `arrays_of`."""
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
    """What `part` is made of, by name or place; nothing of a constant."""
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

"""mlx-lm's caches of a model: what they hold, and the same caches with pages in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess, PagedLayer, Pass
from mlx_manager.mlx_server.execution.forward import NotApplicable


def shapes_of(model: nn.Module) -> list[LayerShape | None]:
    """Return the shape of each key-value cache of `model`, in order, found by two tokens.

    The shape is None for caches of any other kind. A `CacheList` counts as its members.

    Raises:
        NotApplicable: a cache is of a kind that cannot be batched.
    """
    return list(map(shape_of, filled(model, 2)))


def filled(model: nn.Module, tokens: int) -> list[Any]:
    """Return the caches after a pass over so many tokens, not evaluated: shapes and sizes are known
    before anything is computed."""
    caches = make_prompt_cache(model)
    model(mx.ones((1, tokens), mx.int32), cache=caches)
    return [leaf for entry in caches for leaf in leaves_of(entry)]


def bytes_of(leaf: Any) -> int:
    return sum(array.nbytes for array in kept_in([leaf]))


def shape_of(cache: Any) -> LayerShape | None:
    match cache:
        case KVCache():
            window = None
        case RotatingKVCache(keep=0):
            window = cache.max_size
        case ArraysCache():
            return None
        case _:
            raise NotApplicable(f"a cache of type {type(cache).__name__} cannot be batched")
    if cache.keys is None:
        raise NotApplicable("a layer does not use its cache")
    _, heads, _, key_dim = cache.keys.shape
    return LayerShape(heads, key_dim, cache.values.shape[-1], cache.keys.dtype, window)


def paged(
    caches: Sequence[Any],
    shapes: Sequence[LayerShape | None],
    make_store: Callable[[LayerShape], LayerStore],
    current: Pass,
    reading: KeyAccess,
) -> list[Any]:
    """Return `caches` with pages in place of keys and values."""
    remaining = iter(shapes)

    def replace(entry: Any) -> Any:
        if isinstance(entry, CacheList):
            return CacheList(*(replace(member) for member in entry.caches))
        shape = next(remaining)
        if shape is None:
            return entry
        return PagedLayer(make_store(shape), reading, current)

    return [replace(entry) for entry in caches]


def leaves_of(entry: Any) -> Iterable[Any]:
    if isinstance(entry, CacheList):
        for member in entry.caches:
            yield from leaves_of(member)
    else:
        yield entry


def layers_of(caches: Sequence[Any]) -> list[PagedLayer]:
    return [leaf for e in caches for leaf in leaves_of(e) if isinstance(leaf, PagedLayer)]


def unpaged(caches: Sequence[Any]) -> list[Any]:
    return [leaf for e in caches for leaf in leaves_of(e) if not isinstance(leaf, PagedLayer)]


def is_paged(entry: Any) -> bool:
    return all(isinstance(leaf, PagedLayer) for leaf in leaves_of(entry))


def combine(shared: Any, fresh: Any) -> Any:
    """Return `fresh` with the pages of `shared` in place of keys and values."""
    if isinstance(shared, CacheList):
        return CacheList(*map(combine, shared.caches, fresh.caches))
    return shared if isinstance(shared, PagedLayer) else fresh


def merge(entries: list[Any]) -> Any:
    first = entries[0]
    if isinstance(first, CacheList):
        return CacheList(*(merge(list(m)) for m in zip(*(e.caches for e in entries), strict=True)))
    return first if isinstance(first, PagedLayer) else type(first).merge(entries)


def extend(batch: Any, more: Any) -> Any:
    if isinstance(batch, CacheList):
        return CacheList(*map(extend, batch.caches, more.caches))
    if not isinstance(batch, PagedLayer):
        batch.extend(more)
    return batch


def extract(batch: Any, row: int) -> Any:
    """Return the caches of one row of a batch."""
    if isinstance(batch, CacheList):
        return CacheList(*(extract(member, row) for member in batch.caches))
    return batch if isinstance(batch, PagedLayer) else batch.extract(row)


def filter_rows(batch: Any, keep: list[int]) -> Any:
    for leaf in leaves_of(batch):
        if not isinstance(leaf, PagedLayer):
            leaf.filter(keep)
    return batch


def kept_in(caches: Sequence[Any]) -> list[mx.array]:
    """Return the arrays of the caches that are not pages, layer by layer."""
    found: list[mx.array] = []
    for leaf in (leaf for entry in caches for leaf in leaves_of(entry)):
        if isinstance(leaf, ArraysCache):
            found += [array for array in leaf.cache if array is not None]
        elif isinstance(leaf, PagedLayer) or leaf.empty():
            continue
        elif hasattr(leaf, "keys"):
            found += [leaf.keys, leaf.values]
        else:
            # A cache that the architecture brings itself (DeepSeek V4.1).
            found += [array for _, array in tree_flatten(leaf.state) if array is not None]
    return found

"""Parts of mlx-lm's modules, by the names and facts that families declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_manager.mlx_server.models.families import MODULES

T = TypeVar("T")
DENSE = (nn.Linear, nn.AllToShardedLinear, nn.ShardedToAllLinear)
"""Layers of a dense weight, whole or a rank's share."""
PACKED = (nn.QuantizedLinear, nn.QuantizedAllToShardedLinear, nn.QuantizedShardedToAllLinear)
"""Layers of a packed weight, whole or a rank's share."""
_SUMMED = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)


class NotFusable(Exception):
    """Error: the module is no common decoder; the message says what is different."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise NotFusable(what)


def names_of(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's class and of its bases, as families name them."""
    for kind in type(module).__mro__:
        yield f"{kind.__module__.removeprefix('mlx_lm.models.')}.{kind.__name__}"


def is_one_of(module: nn.Module, classes: Sequence[str]) -> bool:
    return any(name in classes for name in names_of(module))


def declared(module: nn.Module, table: Mapping[str, T]) -> T | None:
    """Return what `table` has for the module's class; None if the class is not in it."""
    return next((table[name] for name in names_of(module) if name in table), None)


def parts_of(module: nn.Module) -> set[str]:
    """Return the names of the modules, and of the lists of modules, that `module` consists of."""
    return {
        name
        for name, part in module.items()
        if isinstance(part[0] if isinstance(part, list) and part else part, nn.Module)
    }


def first_of(module: nn.Module, names: Sequence[str]) -> float:
    """Return the number that the module has under the first of `names` that it has.

    Raises:
        NotFusable: the module has none of these names.
    """
    found = [getattr(module, name) for name in names if hasattr(module, name)]
    expect(bool(found), f"attention without {' or '.join(names)}")
    number: float = found[0]
    return number


def is_norm(module: nn.Module) -> bool:
    return type(module) is nn.RMSNorm or next(names_of(module)) in MODULES.offset_norms


def norm_in(module: nn.Module) -> nn.RMSNorm:
    """Return `module` as one of MLX's own, with the effective weight; not evaluated.

    Raises:
        NotFusable: the norm is of another kind.
    """
    expect(is_norm(module), "norms of another kind")
    if type(module) is nn.RMSNorm:
        return module
    norm = nn.RMSNorm(module.weight.size, module.eps)
    norm.weight = 1.0 + module.weight
    return norm


def linears_in(parent: nn.Module, names: Sequence[str]) -> tuple[nn.Module, ...]:
    """Return the linear layers of these names.

    Raises:
        NotFusable: they are of another kind, or differ.
    """
    linears = tuple(parent[name] for name in names)
    kinds = set(map(stored, linears))
    known = all(isinstance(x, nn.Linear) or type(x) in (*DENSE, *PACKED) for x in linears)
    expect(known and len(kinds) == 1, "projections of other kinds, or of several")
    expect(len({frozenset(dict(x)) for x in linears}) == 1, "a bias on some projections only")
    return linears


def stored(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for layers of one kind whose weights are stored alike; a rank's
    share is stored as a whole weight is."""
    if type(layer) in DENSE:
        return (nn.Linear,)
    if type(layer) in (*PACKED, QuantizedSwitchLinear):
        kind = QuantizedSwitchLinear if type(layer) is QuantizedSwitchLinear else PACKED[0]
        return (kind, layer.group_size, layer.bits, layer.mode)
    return (type(layer),)


def group_of(layer: nn.Module) -> mx.distributed.Group | None:
    """Return the ranks over which the products with a layer's shares are summed up; None for a
    layer that is whole, or that makes a share of the outputs."""
    return layer.group if type(layer) in _SUMMED else None

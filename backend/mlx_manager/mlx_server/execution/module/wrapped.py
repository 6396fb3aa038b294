"""Parts of a module that do something before or after what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx import nn

Around = Callable[..., Any]
"""Function that is called in a part's place: with the part's own call, and then the arguments."""


def wrapped(part: nn.Module, around: Around) -> nn.Module:
    """Return a module of a subclass, with the parts of `part`, whose call is `around`'s. Wrapping
    it again replaces `around`."""
    base = type(part)
    origin = getattr(base, "wraps", base)

    class Wrapped(origin):  # type: ignore[misc, valid-type]
        wraps = origin
        __module__ = origin.__module__

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.__dict__.update(vars(part))
            for name, inner in part.items():
                self[name] = inner

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return around(super().__call__, *args, **kwargs)

    return Wrapped()

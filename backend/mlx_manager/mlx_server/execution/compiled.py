"""Steps that are compiled where their kind keeps coming.

To put a step together takes the host as long as all its operations take in Python; a step that has
been compiled by MLX is repeated from what was put together once, with other arrays.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

log = logging.getLogger(__name__)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
STEPS_BEFORE_COMPILING = 64
# Kinds of step that stay compiled; each keeps its launches' sources, some megabytes where they are
# not abbreviated.
MOST_COMPILED = 64
# What a module makes of caches, or of arrays, that it was not written for shows in many ways.
WRONG = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)


class Kinds:
    """The kinds of step of one model.

    A kind that keeps coming is compiled, which holds everybody up once. Of more kinds than are kept
    that which did not come for longest goes, and counts anew: where rows are of every length there
    are hundreds.

    Args:
        compile: as `mx.compile`.

    Attributes:
        early: a kind is compiled when it comes for the second time: while a model is compared.
        compiles: False from the first on that could not be.
    """

    def __init__(self, compile: Compile) -> None:
        self.early = False
        self.compiles = True
        self._compile = compile
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._seen: Counter[Hashable] = Counter()

    @property
    def compiled(self) -> int:
        """How many are."""
        return len(self._compiled)

    def forget(self) -> None:
        """What comes from now on is as if nothing had come before."""
        self._compiled.clear()
        self._seen.clear()

    def give_up(self) -> None:
        """Compile no more."""
        self.compiles = False
        self.forget()

    def run(self, kind: Hashable, plain: Callable[..., Any], *arrays: Any) -> Any:
        """`plain(*arrays)`, by what has been compiled of it for other arrays of that kind.

        `plain` does nothing but give arrays made of those that it is given, and of some that never
        change; what else it goes by is in `kind`. One that cannot be put together without what its
        arrays hold is not compiled, nor are others from then on.
        """
        run = self._compiled.pop(kind, None)
        if run is not None:
            self._compiled[kind] = run
            return run(*arrays)
        if not self.compiles or not self._comes_again(kind):
            return plain(*arrays)
        run = self._compile(plain)
        try:
            found = run(*arrays)
        except WRONG as error:
            log.info("steps are not compiled: %s", error)
            self.give_up()
            return plain(*arrays)
        if len(self._compiled) == MOST_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        self._compiled[kind] = run
        return found

    def _comes_again(self, kind: Hashable) -> bool:
        """Whether it has come often enough."""
        self._seen[kind] += 1
        if self._seen[kind] <= (1 if self.early else STEPS_BEFORE_COMPILING):
            return False
        del self._seen[kind]
        return True

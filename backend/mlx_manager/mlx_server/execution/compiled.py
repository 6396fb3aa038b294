"""Compilation of the kinds of step that keep coming.

Putting a step together takes the host the Python time of all its operations. MLX repeats a compiled
step from the graph that was put together once, with other arrays.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

log = logging.getLogger(__name__)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
# To compile a step of a 1B takes 1.3 ms more than to put it together, and each later one takes 0.6
# ms less (H200, benchmarks/gpu/launches.py). Many kinds do not come so often.
STEPS_BEFORE_COMPILING = 16
# The same of steps that come now and then, all of them late if they are put together anew.
STEPS_BEFORE_COMPILING_SOON = 2
# Kinds of step that stay compiled. Each keeps the machine code of its launches, some 10 kB each.
MOST_COMPILED = 64
# Errors of a module that is given caches or arrays that it was not written for.
WRONG = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)


class Kinds:
    """The kinds of step of one model.

    A kind that keeps coming is compiled, which delays all rows once. Where there are more kinds
    than are kept, the least recently used is removed and counts anew: rows of every length make
    hundreds of kinds.

    Args:
        compile: as `mx.compile`.

    Attributes:
        early: whether a kind is compiled when it comes for the second time: while a model is
            compared.
        compiles: False once a step could not be compiled.
        repeated: whether the last step was repeated from a compiled one.
    """

    def __init__(self, compile: Compile) -> None:
        self.early = False
        self.compiles = True
        self.repeated = False
        self._compile = compile
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._seen: Counter[Hashable] = Counter()

    @property
    def compiled(self) -> int:
        """Number of kinds that are compiled now."""
        return len(self._compiled)

    def forget(self) -> None:
        """Drop all compiled steps and all counts."""
        self._compiled.clear()
        self._seen.clear()

    def give_up(self) -> None:
        """Drop all compiled steps, and compile none from now on."""
        self.compiles = False
        self.forget()

    def run(
        self, kind: Hashable, plain: Callable[..., Any], *arrays: Any, soon: bool = False
    ) -> Any:
        """Return `plain(*arrays)`, by the step compiled for other arrays of `kind` if there is one.

        `plain` only makes arrays, from `arrays` and from others that never change. All else that
        its result depends on is in `kind`. A step that cannot be put together without the content
        of its arrays is not compiled, and from then on no other step is. soon: compile the kind
        after a few steps of it.
        """
        run = self._compiled.pop(kind, None)
        self.repeated = run is not None
        if run is not None:
            self._compiled[kind] = run
            return run(*arrays)
        if not self.compiles or not self._comes_again(kind, soon):
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

    def _comes_again(self, kind: Hashable, soon: bool) -> bool:
        """Count the kind, and return whether it has come often enough to be compiled."""
        self._seen[kind] += 1
        usual = STEPS_BEFORE_COMPILING_SOON if soon else STEPS_BEFORE_COMPILING
        if self._seen[kind] <= (1 if self.early else usual):
            return False
        del self._seen[kind]
        return True

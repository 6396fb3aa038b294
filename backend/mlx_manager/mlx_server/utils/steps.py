"""Long jobs as generators: they pause, so that others' work fits in between or goes on beside."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from time import perf_counter
from typing import Any, Generic, TypeVar

from huggingface_hub.errors import StrictDataclassError

from mlx_manager.mlx_server.utils.slices import sliced

T = TypeVar("T")
Y = TypeVar("Y")
After = Callable[[Callable[[], None]], None]

TURN = 0.005
"""Seconds of work on the MLX thread after which other models get their turn."""
PATIENCE = 0.5
"""Seconds that work done aside waits for a step, which may itself wait for a lock that the work
holds: that of a log's handler, or of a module that is being imported."""

LAST_WAIT = 5.0
"""Seconds that work which nobody needs any more gets to end: what holds it up then, such as a disk
that does not answer, is left to itself."""

# What mlx-lm, transformers, MLX and a repository's own code raise over files that are not as they
# expect.
BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """What the job has come to."""

    value: T


class Aside(Generic[T]):
    """Work for any thread but the MLX thread, which steps other models meanwhile.

    Yielded by steps; they go on when it has been done, and do it if nobody has.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._outcome: Done[T] | Exception | None = None
        self._working = Lock()
        self._go_on = Event()
        self._abandoned = False

    def run(self, after_step: After | None = None) -> None:
        """Do it, once. A failure is kept for who asks for the result.

        after_step: calls what it is given once the step under way is done. With it the work is cut
        into slices, so that a step meets one at most, unless it takes longer than `PATIENCE`.
        """
        with self._working:
            if self._outcome is None:
                with sliced(partial(self._wait, after_step)) if after_step else nullcontext():
                    self._do()

    def _do(self) -> None:
        try:
            self._outcome = Done(self._work())
        except BROKEN as error:
            self._outcome = error

    def _wait(self, after_step: After) -> None:
        self._go_on.clear()
        # Who abandons the work may be the thread that steps.
        if not self._abandoned:
            after_step(self._go_on.set)
            self._go_on.wait(PATIENCE)

    @property
    def running(self) -> bool:
        return self._working.locked()

    def result(self) -> T:
        self.run()
        match self._outcome:
            case Done(value):
                return value
            case error:
                assert error is not None
                raise error

    def abandon(self) -> None:
        """Wait for it if it is under way, though not for ever, and otherwise see to it that it
        never is."""
        self._abandoned = True
        self._go_on.set()
        if self._working.acquire(timeout=LAST_WAIT):
            self._outcome = self._outcome or RuntimeError("nobody waits for it any more")
            self._working.release()


Steps = Generator[Aside[Any] | None, None, T]
"""A long job on the MLX thread; it pauses often, so that models can step."""


def beside(work: Callable[[], T]) -> Steps[T]:
    """What `work` returns, done on another thread."""
    aside = Aside(work)
    try:
        yield aside
    except GeneratorExit:
        aside.abandon()
        raise
    return aside.result()


def in_turns(work: Iterable[object], clock: Callable[[], float] = perf_counter) -> Steps[None]:
    """Go through `work`, with a pause whenever `TURN` seconds have gone into it."""
    begun = clock()
    for _ in work:
        if clock() - begun >= TURN:
            yield None
            begun = clock()


def advance(steps: Generator[Y, None, T]) -> Done[T] | Y:
    """The next piece."""
    try:
        return next(steps)
    except StopIteration as end:
        return Done(end.value)


def whereabouts(steps: Generator[object, None, object]) -> str:
    """The functions that a job has paused in, from the outermost on."""
    names = []
    inner: Any = steps
    while inner is not None:
        names.append(inner.gi_code.co_name)
        inner = inner.gi_yieldfrom
    return " > ".join(names)


def finish(steps: Generator[object, None, T]) -> T:
    """All pieces in one go."""
    while True:
        match advance(steps):
            case Done(value):
                result: T = value
                return result

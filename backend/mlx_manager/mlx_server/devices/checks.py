"""The registry of kernels: every kind that has a check of its own, for reports about a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention import kinds as attention
from mlx_manager.mlx_server.devices.draws import SAMPLING
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.kinds import KernelKind, Outcome

KINDS: tuple[KernelKind[Any, Any], ...] = (
    # The writer before attention, whose check writes, too.
    attention.WRITER,
    attention.ATTENTION,
    attention.FEATURED,
    attention.CODED,
    attention.CHUNKS,
    attention.LATENTS,
    attention.EXPANSION,
    SAMPLING,
)
"""Matrix products and recurrent layers have no checks here: a load compares the whole decoder with
the model's modules."""


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """Check of one kernel for one head size and dtype. head_size None: the kernel has no heads."""

    kernel: str
    head_size: int | None
    dtype: mx.Dtype
    run: Callable[[], Outcome]


def kernel_checks() -> Iterator[KernelCheck]:
    """Yield the checks of all kinds, which are run whatever was passed before."""
    for kind in KINDS:
        for case in kind.cases():
            yield KernelCheck(kind.name, case.head_size, case.dtype, partial(kind.outcome, case.of))


def reported(check: KernelCheck) -> dict[str, Any]:
    """Return the figures of `check` for a report, by running the check once or twice.

    A kernel is compiled on its first launch, so the first run's seconds less the second's are the
    compiler's.
    """
    first, again = _timed(check), None
    if first.outcome is None:
        again = _timed(check)
    entry: dict[str, Any] = {
        "kernel": check.kernel,
        "head_size": check.head_size,
        "dtype": str(check.dtype).rpartition(".")[2],
    }
    match first.outcome if again is None else again.outcome:
        case Unsupported(reason):
            return entry | {"result": "no kernel", "reason": reason}
        case str(wrong):
            return entry | {"result": "wrong", "reason": wrong}
    assert again is not None
    return entry | {
        "result": "right",
        "seconds": round(again.seconds, 4),
        "seconds_to_compile": round(max(0.0, first.seconds - again.seconds), 4),
    }


@dataclass(frozen=True, slots=True)
class _Run:
    outcome: Outcome
    seconds: float


def _timed(check: KernelCheck) -> _Run:
    begun = perf_counter()
    outcome = check.run()
    return _Run(outcome, perf_counter() - begun)

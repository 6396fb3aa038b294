"""Every GPU kernel with its check, by head size and dtype: what a report about a machine holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_manager.mlx_server.devices import attention as paged
from mlx_manager.mlx_server.devices import draws
from mlx_manager.mlx_server.devices.attention.check import check_chunks, check_writer, self_check
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, Rotary
from mlx_manager.mlx_server.devices.attention.writer import Pools
from mlx_manager.mlx_server.devices.cuda.attention.chunks import chunk_kernels
from mlx_manager.mlx_server.devices.cuda.mla import latent
from mlx_manager.mlx_server.devices.cuda.mla.check import check_latent
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.draws.check import self_check as check_draws
from mlx_manager.mlx_server.devices.kernel import Unsupported

Outcome = str | Unsupported | None
"""Outcome of a check: the text of an error, the reason for having no kernel, or None if right."""

DTYPES = (mx.bfloat16, mx.float16, mx.float32)
PAGE_SIZE = 16
Q_HEADS, KV_HEADS = 8, 2
ALL_FEATURES = paged.Features(window=100, softcap=30.0, sinks=True)
HEAD_SIZES = sorted({*paged.HEAD_DIMS, 72, 112, 160, 192})
"""Head sizes of known models: what every device's kernels serve, and what some device's do, or only
its writer."""
ROTATED = 16
"""The rotated elements of a head are a multiple of this."""
LATENT = LatentShape(
    q_heads=4,
    rank=512,
    dims=64,
    plain=128,
    queried=768,
    page_size=PAGE_SIZE,
    dtype=mx.bfloat16,
    values=128,
)
"""DeepSeek's sizes, with few heads: the reference takes a while."""


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """Check of one kernel for one head size and dtype. head_size None: the kernel has no heads."""

    kernel: str
    head_size: int | None
    dtype: mx.Dtype
    run: Callable[[], Outcome]


def kernel_checks() -> Iterator[KernelCheck]:
    """Yield the check of every kernel that has one.

    Matrix products and recurrent layers have no checks here: a load compares the whole decoder with
    the model's modules.
    """
    for dtype in DTYPES:
        # Check the writer before attention, whose check writes, too.
        for size in HEAD_SIZES:
            pools = Pools(KV_HEADS, size, size, dtype)
            yield KernelCheck("page writer", size, dtype, partial(_writer, pools))
        for size in HEAD_SIZES:
            shape = AttentionShape(Q_HEADS, KV_HEADS, size, PAGE_SIZE, dtype)
            rotary = Rotary(size - size % ROTATED, traditional=False, epsilon=1e-6)
            plain = partial(_attention, shape, paged.Features(), rotary)
            yield KernelCheck("attention", size, dtype, plain)
            bare = partial(_attention, shape, ALL_FEATURES, None)
            yield KernelCheck("attention with window, soft cap and sinks", size, dtype, bare)
            if size % ROTATED == 0:
                yield KernelCheck("prompts", size, dtype, partial(_prompts, shape))
        yield KernelCheck("latent attention", LATENT.rank, dtype, partial(_latent, dtype))
        yield KernelCheck("sampling", None, dtype, partial(_draws, dtype))


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


def _attention(shape: AttentionShape, features: paged.Features, rotary: Rotary | None) -> Outcome:
    found = paged.build(shape)
    return found if isinstance(found, Unsupported) else self_check(found, features, rotary)


def _prompts(shape: AttentionShape) -> Outcome:
    found = chunk_kernels(shape)
    if isinstance(found, Unsupported):
        return found
    wrong = []
    for kernels in found:
        outcome = check_chunks(kernels.of_heads(KV_HEADS))
        if outcome is not None:
            wrong.append(f"{kernels.tiles.name}: {outcome}")
    return "; ".join(wrong) or None


def _writer(pools: Pools) -> Outcome:
    found = paged.build_writer(pools)
    return found if isinstance(found, Unsupported) else check_writer(found.write, pools, PAGE_SIZE)


def _latent(dtype: mx.Dtype) -> Outcome:
    found = latent.build(replace(LATENT, dtype=dtype))
    if isinstance(found, Unsupported):
        return found
    return check_latent(found, traditional=False)


def _draws(dtype: mx.Dtype) -> Outcome:
    found = draws.build(dtype)
    if isinstance(found, Unsupported):
        return found
    try:
        return check_draws(found, dtype)
    except RuntimeError as error:
        # The compiler or the driver failed.
        return f"the kernel can't be run: {error}"

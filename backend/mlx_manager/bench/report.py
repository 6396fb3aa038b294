"""Figures of a load test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mlx_manager.bench.exchange import Outcome
from mlx_manager.bench.load import Measured

PERCENTILES = (50, 90, 95, 99)
BUSY = 0.8
"""Share of a core above which this program may be what is measured."""


def report(measured: Measured) -> dict[str, Any]:
    """Return the figures: times in ms, rates per second. Failed requests are only counted.

    time_to_first_token: to the first chunk with output. inter_token: between two chunks with
    output, as `vllm bench serve` has it. per_output_token: an answer's time after its first token,
    by the tokens after it. end_to_end: to the end of the stream.
    """
    plan = measured.plan
    good = [outcome for outcome in measured.outcomes if not outcome.error]
    seconds = measured.seconds or float("nan")
    prompt = sum(o.usage.prompt for o in good if o.usage)
    output = sum(o.output_tokens for o in good)
    return {
        "url": plan.url,
        "model": plan.model,
        "load": {
            "concurrency": plan.concurrency,
            "rate": plan.rate,
            "prompt_tokens": plan.prompt_tokens,
            "output_tokens": plan.output_tokens,
            "warmup": plan.warmup,
            "seed": plan.seed,
            "extra": {name: value for name, value in plan.extra.items() if value is not None},
        },
        "seconds": measured.seconds,
        "stopped_early": measured.stopped,
        "requests": {"completed": len(good), "failed": len(measured.outcomes) - len(good)},
        "errors": dict(Counter(o.error for o in measured.outcomes if o.error).most_common()),
        "finish_reasons": dict(Counter(str(o.finish_reason) for o in good).most_common()),
        "tokens": {
            "prompt": prompt,
            "cached": sum(o.usage.cached for o in good if o.usage),
            "output": output,
            "counted_by": "usage" if all(o.usage for o in good) else "chunks",
        },
        "throughput": {
            "requests": len(good) / seconds,
            "output_tokens": output / seconds,
            "total_tokens": (prompt + output) / seconds,
        },
        "time_to_first_token_ms": spread([o.arrivals[0] - o.started for o in good if o.arrivals]),
        "inter_token_ms": spread([b - a for o in good for a, b in pairwise(o.arrivals)]),
        "per_output_token_ms": spread([pace for o in good if (pace := per_token(o)) is not None]),
        "end_to_end_ms": spread([o.ended - o.started for o in good]),
        "client_cpu": measured.cpu_seconds / seconds,
    }


def per_token(outcome: Outcome) -> float | None:
    if not outcome.arrivals or outcome.output_tokens < 2:
        return None
    return (outcome.ended - outcome.arrivals[0]) / (outcome.output_tokens - 1)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """In milliseconds; None where there is nothing to measure."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1000
    found = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}

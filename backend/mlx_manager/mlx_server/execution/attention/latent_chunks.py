"""How the queries of a step with prompts in it meet latents: as these are, or expanded."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.attention import (
    ChunkPlan,
    Expanded,
    Expansion,
    LatentKernels,
    Text,
)
from mlx_manager.mlx_server.execution.attention.paged import Chunked, StepPlan


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Spans whose queries meet latents as these are: their pages, and the plan of their queries."""

    table: mx.array
    plan: ChunkPlan


@dataclass(frozen=True, slots=True)
class Meeting:
    """The step's first spans are `absorbed`, with so many `tokens`, and the others, with the
    padding, `expanded`; None for none of them."""

    tokens: int
    absorbed: Absorbed | None
    expanded: Expanded | None


def meeting_of(plan: StepPlan, kernels: LatentKernels) -> Meeting:
    """Once a step for all layers."""
    return plan.once(kernels.shape, lambda: _meeting(plan, kernels))


def _meeting(plan: StepPlan, kernels: LatentKernels) -> Meeting:
    spans, expansion = plan.spans, kernels.expansion
    first = len(spans) if expansion is None else _first_of(plan, expansion)
    before, behind = spans[:first], spans[first:]
    absorbed = expanded = None
    if before:
        chunked = Chunked(before, plan.page_size, 0 if behind else plan.padding)
        absorbed = Absorbed(chunked.table, kernels.chunk_plan(chunked.runs))
    if expansion is not None and behind:
        texts = [Text(span.queries, span.length, span.table.pages) for span in behind]
        expanded = expansion.plan(texts, plan.padding)
    return Meeting(sum(span.queries for span in before), absorbed, expanded)


def _first_of(plan: StepPlan, expansion: Expansion) -> int:
    queries = np.array([span.queries for span in plan.spans], np.int64)
    lengths = np.array([span.length for span in plan.spans], np.int64)
    return expansion.first_of(queries, lengths)

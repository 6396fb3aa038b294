"""Latent attention of steps with prompts: over latents as they are, or expanded to keys and
values."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import ChunkPlan
from mlx_manager.mlx_server.devices.cuda.mla.expansion import Expanded, Expansion, QueryTokens
from mlx_manager.mlx_server.devices.cuda.mla.latent import LatentKernels
from mlx_manager.mlx_server.execution.attention.paged import Chunked, StepPlan


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Spans whose queries attend to latents as they are: their page table, and their queries'
    plan."""

    table: mx.array
    plan: ChunkPlan


@dataclass(frozen=True, slots=True)
class Meeting:
    """Two parts of a step's spans: the first spans, and the others with the padding.

    tokens: the number of the first spans' tokens. absorbed: the first spans, which attend to
    latents as they are. expanded: the others, whose latents are expanded. A part without spans is
    None.
    """

    tokens: int
    absorbed: Absorbed | None
    expanded: Expanded | None


def meeting_of(plan: StepPlan, kernels: LatentKernels) -> Meeting:
    """Return the step's two parts, found once a step for all layers."""
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
        texts = [QueryTokens(span.queries, span.length, span.table.pages) for span in behind]
        expanded = expansion.plan(texts, plan.padding)
    return Meeting(sum(span.queries for span in before), absorbed, expanded)


def _first_of(plan: StepPlan, expansion: Expansion) -> int:
    queries = np.array([span.queries for span in plan.spans], np.int64)
    lengths = np.array([span.length for span in plan.spans], np.int64)
    return expansion.first_of(queries, lengths)

"""Prompt tokens of a step, and the memory that it works on."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from math import inf, isqrt

from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.table import Device
from mlx_manager.mlx_server.engine.scheduler.pace import StepLimits
from mlx_manager.mlx_server.execution.forward import Forward
from mlx_manager.mlx_server.execution.working import query_heads, vocabulary_of, working_bytes
from mlx_manager.mlx_server.utils.memory import Ledger, clear_cache

# Fewest prompt tokens of a step for want of memory; with less memory there is too little.
LEAST_FOR_MEMORY = 256
# Fewest launches of a layer, in whatever way a model is run: those of the fused decoder.
LAUNCHES_OF_A_LAYER = 8
MOST_LAUNCHES = "MLX_MAX_OPS_PER_BUFFER"
"""Name of the environment variable in which the owner says how many launches MLX puts into a
command buffer."""
# Numbers in the logits of a step's scored prompt tokens: of 128 with a vocabulary of 128 000. Each
# takes up to 16 bytes while its token is scored.
MOST_SCORED = 1 << 24


@dataclass(frozen=True, slots=True)
class StepSize:
    """Limits of a step's prompt tokens, and the memory that it works on.

    tokens: most prompt tokens. ample: most prompt tokens where such a step is short and there is
    memory for it. scored: most prompt tokens that are scored. working_bytes, ample_bytes: bytes
    that steps of `tokens` work on, and that steps of `ample` take besides. limits: limits of the
    device.
    """

    tokens: int
    ample: int = 0
    scored: int = sys.maxsize
    working_bytes: int = 0
    ample_bytes: int = 0
    limits: StepLimits = field(default_factory=lambda: limits_of(devices.current()))

    @classmethod
    def of(
        cls, limits: EngineLimits, model: nn.Module, forward: Forward, ledger: Ledger
    ) -> StepSize:
        """Return the size for a model. If the owner named none, halve the device's until it leaves
        most of what the ledger has to pages, but not below `LEAST_FOR_MEMORY`."""
        # Free the buffers that choosing the forward has left behind.
        clear_cache()
        most = ledger.available() // 3
        tokens = chunk_of(limits)
        working = _working_on(limits, model, forward, tokens)
        while limits.prefill_chunk is None and tokens > LEAST_FOR_MEMORY and working > most:
            tokens //= 2
            working = _working_on(limits, model, forward, tokens)
        if working > most and forward.unpacked_bytes(tokens):
            # Weights unpacked for prompts would take memory that pages need.
            forward.keep_packed()
            return cls.of(limits, model, forward, ledger)
        ample, device = tokens, devices.current()
        if limits.prefill_chunk is None and forward.looks_ahead and tokens == device.chunk:
            ample = device.ample
        more = _working_on(limits, model, forward, ample) - working
        heads = query_heads(model) if forward.attends_whole else None
        bears = limits_of(device, len(make_prompt_cache(model)), heads)
        return cls(tokens, ample, _most_scored(limits, model), working, more, bears)

    def with_draft(
        self, limits: EngineLimits, model: nn.Module, forward: Forward, state_bytes: int = 0
    ) -> StepSize:
        """Return the size where a draft model works, too: before a step, in the same memory.
        state_bytes: of a token's hidden state, where a step's are kept for a head."""
        working = _working_on(limits, model, forward, self.tokens)
        kept, more = state_bytes * self.tokens, state_bytes * max(self.ample - self.tokens, 0)
        return replace(
            self,
            working_bytes=max(self.working_bytes, working) + kept,
            ample_bytes=self.ample_bytes + more,
        )

    def wanted(self, tokens: int, shortest: int) -> int:
        """Return how many of `tokens` prompt tokens a step best processes, if it is short all the
        same.

        Prompts of one step get their first tokens together. With c of R tokens a step, and steps
        that cost as much as F tokens besides, first tokens come soonest on average if c is the
        square root of 2 F R, and 2 F is about the tokens of a usual step. The shortest
        prompt, of `shortest` tokens, is not cut for that.
        """
        return max(isqrt(self.tokens * tokens), shortest)


def chunk_of(limits: EngineLimits) -> int:
    """Return the most prompt tokens of a step: the owner's limit, or as many as keep the device
    busy."""
    return limits.prefill_chunk or devices.current().chunk


def limits_of(device: Device, layers: int = 1, heads: int | None = None) -> StepLimits:
    """Return the limits of a step of a model with so many layers.

    MLX on Metal cuts a step's launches into command buffers of so many; all of them may take as
    long as one may, times their number. heads: of queries, where modules attend by themselves, all
    queries of a chunk at once.
    """
    launches = int(os.environ.get(MOST_LAUNCHES, device.buffer_ops))
    buffers = max(1, layers * LAUNCHES_OF_A_LAYER // launches)
    seen = inf
    if heads is not None and device.scores is not None and device.scores_by_chunk:
        seen = device.scores / heads
    return StepLimits(
        device.first_chunk or inf, device.buffer_seconds * buffers, seen, device.least_by_host
    )


def least_working(limits: EngineLimits, model: nn.Module) -> int:
    """Return a lower bound of the `working_bytes` of `StepSize.of`, before there is memory for the
    weights."""
    return _working_on(limits, model, None, limits.prefill_chunk or LEAST_FOR_MEMORY)


def _working_on(
    limits: EngineLimits, model: nn.Module, forward: Forward | None, tokens: int
) -> int:
    rows = limits.max_rows + min(tokens, _most_scored(limits, model))
    return working_bytes(model, forward, tokens, rows)


def _most_scored(limits: EngineLimits, model: nn.Module) -> int:
    return max(limits.page_size, MOST_SCORED // vocabulary_of(model))

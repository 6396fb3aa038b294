"""How much of prompts a step takes on, and what memory it works on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import isqrt

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.engine.forward import Forward, vocabulary_of, working_bytes
from mlx_manager.mlx_server.utils.memory import Ledger, clear_cache

# An H200 is busy to 0.9 with 2 048 tokens of an 8B, and to 0.6 with 512.
CHUNK_ON_CPU = 512
CHUNK_ON_GPU = 2048
# What an H100 is busy with where a token takes little: 64 experts, 4 a token, have a matrix product
# of 128 rows each with 2 048 tokens.
AMPLE_ON_GPU = 8192
# A step with prompts costs a GPU's host some 10 ms whatever they are (an 8B's 32 layers).
LEAST_CHUNK_AHEAD = 256
# After 4 000 tokens, eight of them take a CPU twice as long as eight rows.
LEAST_CHUNK = 4
# Numbers in the logits of a step's scored prompt tokens: of 128 with a vocabulary of 128 000. Each
# takes up to 16 bytes while its token is scored.
MOST_SCORED = 1 << 24


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step may take on.

    tokens: of prompts, at most. ample: at most where such a step is short, and there are bytes for
    it. scored: most prompt tokens that are scored. working_bytes, ample_bytes: what steps of
    `tokens` work on, and those of `ample` besides.
    """

    tokens: int
    ample: int = 0
    scored: int = sys.maxsize
    working_bytes: int = 0
    ample_bytes: int = 0

    @classmethod
    def of(
        cls, limits: EngineLimits, model: nn.Module, forward: Forward, ledger: Ledger
    ) -> StepSize:
        """Where the owner named no size, none larger than leaves most of what the ledger has to
        pages."""
        # What choosing the forward has left behind.
        clear_cache()
        most = ledger.available() // 3
        tokens = chunk_of(limits)
        working = _working_on(limits, model, forward, tokens)
        while limits.prefill_chunk is None and tokens > LEAST_CHUNK_AHEAD and working > most:
            tokens //= 2
            working = _working_on(limits, model, forward, tokens)
        if working > most and forward.unpacked_bytes(tokens):
            # What is unpacked for prompts would take what pages need.
            forward.keep_packed()
            return cls.of(limits, model, forward, ledger)
        ample = tokens
        if limits.prefill_chunk is None and forward.looks_ahead and tokens == CHUNK_ON_GPU:
            ample = AMPLE_ON_GPU
        more = _working_on(limits, model, forward, ample) - working
        return cls(tokens, ample, _most_scored(limits, model), working, more)

    def wanted(self, tokens: int, shortest: int) -> int:
        """How many of so many tokens of prompts a step best processes, if it is short all the same.

        Those of a step get their first tokens together. With c of R tokens a step, and steps that
        cost as much as F tokens besides, these come soonest on average if c is the root of 2 F R,
        and 2 F are about those of a usual step (NOTES 138). A prompt is not cut for that.
        """
        return max(isqrt(self.tokens * tokens), shortest)


def chunk_of(limits: EngineLimits) -> int:
    """Most prompt tokens of a step: what the owner says, or what keeps the device busy."""
    return limits.prefill_chunk or (CHUNK_ON_CPU if mx.default_device() == mx.cpu else CHUNK_ON_GPU)


def least_working(limits: EngineLimits, model: nn.Module) -> int:
    """No more than `StepSize.of` will give for the bytes, before there is memory for the
    weights."""
    return _working_on(limits, model, None, limits.prefill_chunk or LEAST_CHUNK_AHEAD)


def _working_on(
    limits: EngineLimits, model: nn.Module, forward: Forward | None, tokens: int
) -> int:
    rows = limits.max_rows + min(tokens, _most_scored(limits, model))
    return working_bytes(model, forward, tokens, rows)


def _most_scored(limits: EngineLimits, model: nn.Module) -> int:
    return max(limits.page_size, MOST_SCORED // vocabulary_of(model))

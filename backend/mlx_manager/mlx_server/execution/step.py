"""All tokens of a step as one array, for passes that take rows and chunks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.devices.metal.order import IN_ORDER, LaunchOrder
from mlx_manager.mlx_server.execution.attention.paged import StepPlan
from mlx_manager.mlx_server.execution.forward import Chunk, Decode
from mlx_manager.mlx_server.execution.images import Insertion, angles_in, shown_in


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """All tokens of a step one after another, those of running rows first.

    tokens: (tokens,) uint32, in the order of the plan's spans, then padding. wanted: (n,) int32,
    the tokens whose logits are wanted; None for all of them. silent: whether no logits are wanted;
    `wanted` then is one token that stands for none. insertion: rows of pictures, if there are any;
    their tokens are 0.
    """

    tokens: mx.array
    plan: StepPlan
    wanted: mx.array | None
    silent: bool
    insertion: Insertion | None = None

    @classmethod
    def of(
        cls,
        decode: Decode | None,
        chunks: Sequence[Chunk],
        page_size: int,
        whole: Callable[[int], int] = int,
        order: LaunchOrder = IN_ORDER,
    ) -> RaggedStep:
        """Return the step of these rows and chunks.

        whole: returns the number that so many tokens are padded to. order: the order of launches
        that the step follows.
        """
        spans = [*(decode.spans if decode else ()), *(chunk.span for chunk in chunks)]
        parts = [decode.tokens[: len(decode.keys)]] if decode else []
        rows = list(range(len(decode.keys) if decode else 0))
        first = end = len(rows)
        shown = shown_in(chunks, first)
        for chunk in chunks:
            start, end = end, end + len(chunk.tokens)
            if chunk.every:
                rows += range(start, end)
            elif chunk.final:
                rows.append(end - 1)
        padding = whole(end) - end
        known = chain(chain.from_iterable(chunk.tokens for chunk in chunks), repeat(0, padding))
        if chunks or padding:
            numbers = np.fromiter(known, np.int32)
            if shown is not None:
                numbers[shown.places - first] = 0
            parts.append(send(numbers).view(mx.uint32))
        tokens = order.after(parts[0] if len(parts) == 1 else mx.concatenate(parts))
        all_wanted = len(rows) == end + padding
        wanted = None if all_wanted else send(np.array(rows or [0], np.int32))
        plan = StepPlan(spans, page_size, padding, angles_in(decode, chunks))
        insertion = None if shown is None else Insertion(shown)
        return cls(tokens, plan, wanted, silent=not rows, insertion=insertion)

"""The model's own logits for two sequences, and the same sequences through a way of running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_manager.mlx_server.devices.likeness import (
    MARGIN,
    carries_on,
    difference,
    distance,
    may_stray,
)
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.caches import kept_in
from mlx_manager.mlx_server.execution.compiled import WRONG
from mlx_manager.mlx_server.execution.decoder.forward import FEW
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward

# Steps of running rows that are compared. Where steps are compiled, the first of two rows is not,
# the second is, the third repeats the second, and the last, of one row, is not.
STEPS = 4


@dataclass(slots=True)
class Reference:
    """Two sequences, each with the length of its prompt, and the model's own logits for them.

    noise: the distance of the model's logits from its own when it reads a token at a time; None
    until measured. before_more: called before the model is run for that.
    """

    model: nn.Module
    page_size: int
    texts: list[tuple[list[int], int]]
    logits: list[list[mx.array]]
    noise: float | None = None
    before_more: Callable[[], None] = int  # type: ignore[assignment]

    @classmethod
    def of(cls, model: nn.Module, page_size: int) -> Reference:
        texts = _texts(page_size)
        logits: list[list[mx.array]] = []
        try:
            for text, n in texts:
                logits.append(_alone(model, text, n))
        except WRONG as error:
            raise ModelNotSupported(f"This model does not run on this machine: {error}") from error
        if all(_has_no_number(each) for text in logits for each in text):
            raise ModelNotSupported(
                "What this model computes is no number (NaN), whatever it reads: its weights are "
                "damaged, or too large for the precision that they are in."
            )
        return cls(model, page_size, texts, logits)

    def disagreement(self, forward: Forward) -> str | None:
        """Return a message that says how `forward` differs from the model, or None if it does
        not."""
        distances = self.distances(forward)
        first = self.logits[0][0]
        # Half precision rounds differently in products of different shapes.
        allowed = 2e-3 if first.dtype == mx.float32 else 5e-2
        strays = may_stray(self.model, first)
        rough = strays or carries_on(self.model, first)
        if rough and max(distances) > allowed:
            if self.noise is None:
                self.before_more()
                self.noise = self.from_itself()
            allowed = max(allowed, MARGIN * self.noise)
        wrong = difference(distances, allowed, strays=strays)
        return wrong and f"its logits differ from the model's own {wrong}"

    def distances(self, forward: Forward) -> list[float]:
        """Return how far each of the logits of `forward` is from the model's own; see
        `likeness.distance`."""
        return self._distances(run_both(forward, self.texts, self.page_size))

    def from_itself(self) -> float:
        """Return the distance of the model's logits from its own when it reads a token at a
        time."""
        again = []
        for text, n in self.texts:
            again.append(_alone(self.model, text, 1)[n - 1 :])
        return max(self._distances(again))

    def _distances(self, got: list[list[mx.array]]) -> list[float]:
        both = zip(got, self.logits, strict=True)
        return [distance(*pair) for mine, own in both for pair in zip(mine, own, strict=False)]


def _texts(page_size: int) -> list[tuple[list[int], int]]:
    """Return two sequences to compare by, each with the length of its prompt: one is long enough
    for kernels of chunks and of many rows, and one is not."""
    prompts = (page_size + FEW[-1] + 5, page_size // 2 + 3)
    return [
        ([3 + (7 * i + 13 * j) % 50 for j in range(n + STEPS)], n) for i, n in enumerate(prompts)
    ]


def run_both(
    forward: Forward, both: list[tuple[list[int], int]], page_size: int
) -> list[list[mx.array]]:
    """Return the logits of two sequences through `forward`, with joins, mixed chunks and a
    leave."""
    texts = [text for text, _ in both]
    lengths = [prompt for _, prompt in both]
    pages = [-(-len(text) // page_size) for text in texts]
    for store in forward.stores:
        store.resize(sum(pages))
    # The pages are handed out backwards, so that no table is a plain slice.
    order = list(range(sum(pages)))[::-1]
    tables = [PageTable(order[: pages[0]]), PageTable(order[pages[0] :])]
    a, b = lengths
    got: list[list[mx.array]] = [[], []]
    half = max(1, page_size // 2)
    first = Chunk(0, Span(tables[0], half, half), texts[0][:half], False)
    logits = forward.run(None, [first])
    mx.eval([*forward.state(), logits])
    last = [
        Chunk(0, Span(tables[0], a, a - half), texts[0][half:a], True),
        Chunk(1, Span(tables[1], b, b), texts[1][:b], True),
    ]
    # A forward that makes a pass of each chunk anyway gets one chunk a run, evaluated before the
    # next; the others get both chunks at once.
    runs = [[chunk] for chunk in last] if forward.kind == "separate" else [last]
    for chunks in runs:
        logits = forward.run(None, chunks)
        mx.eval([*forward.state(), logits])
        for i, chunk in enumerate(chunks):
            got[chunk.key].append(logits[i])
    for step in range(STEPS):
        # The second row leaves before the last step.
        rows = [0, 1] if step < STEPS - 1 else [0]
        keys = [rows[i] for i in forward.order(rows, [lengths[r] + step + 1 for r in rows])]
        tokens = mx.array([texts[k][lengths[k] + step] for k in keys], mx.uint32)
        ends = [lengths[k] + step + 1 for k in keys]
        decode = Decode(keys, [tables[k] for k in keys], ends, tokens)
        logits = forward.run(decode, [])
        mx.eval([*forward.state(), logits])
        for i, k in enumerate(keys):
            got[k].append(logits[i])
        if step == STEPS - 2:
            forward.forget(1)
    forward.forget(0)
    return got


def _alone(model: nn.Module, text: list[int], prompt: int) -> list[mx.array]:
    caches = make_prompt_cache(model)
    logits: list[mx.array] = []
    for tokens in (text[:prompt], *([token] for token in text[prompt:])):
        logits.append(model(mx.array([tokens], mx.int32), cache=caches)[0, -1])
        mx.eval([*kept_in(caches), logits[-1]])
    return logits


def _has_no_number(logits: mx.array) -> bool:
    """Return whether some logit is NaN. The host looks: on a GPU, MLX would compile a kernel for
    it."""
    return bool(np.isnan(np.array(logits.astype(mx.float32))).any())

"""Check of a fused decoder against its module's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import (
    ArraysCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from mlx_manager.mlx_server.devices.likeness import MARGIN, difference, distance, may_stray
from mlx_manager.mlx_server.execution.caches import kept_in
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.layers import Step
from mlx_manager.mlx_server.utils.progress import Doing, counted, unheard

Pool = Sequence[mx.array]
# Numbers of rows that are computed in different ways: as they are, and padded.
CHECKED_ROWS = (3, 12, 20, 40, 68)


def check(
    decoder: FusedDecoder, model: nn.Module, page_size: int, *, doing: Doing = unheard
) -> str | None:
    """Compare steps of two rows and padding with `model`'s own logits; return a message, or None if
    right.

    Half precision rounds differently in products of different shapes, and depth multiplies the
    error. So the yardstick is the module's distance from itself, between a step and a prompt.
    """
    lengths = (2 * page_size + 5, 3)
    longest = max(lengths) + 2
    texts = [[3 + (7 * i + 13 * j) % 50 for j in range(longest)] for i in range(len(lengths))]
    caches, prompts = [], []
    for text, n in zip(texts, lengths, strict=True):
        cache = make_prompt_cache(model)
        # The prompt holds both steps' tokens, and all prompts are of one length: cuDNN prepares
        # itself for each new length, 40 ms.
        prompts.append(_passed(model, text, cache))
        if can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, longest - n)
        else:
            cache = make_prompt_cache(model)
            _passed(model, text[:n], cache)
        caches.append(cache)
    counts = [-(-(n + 2) // page_size) for n in lengths]
    pages = np.split(np.arange(sum(counts), dtype=np.int32)[::-1], [counts[0]])
    pools: Sequence[Pool] = _filled(caches, pages, page_size, lengths)
    states = _states(caches)
    mx.eval([array for pool in pools for array in pool])
    distances, noise = [], 0.0
    strays = may_stray(model, prompts[0])
    for i in range(2):
        tokens = [text[n + i] for text, n in zip(texts, lengths, strict=True)]
        seen = [n + i + 1 for n in lengths]
        own = []
        for token, cache, prompt, n in zip(tokens, caches, prompts, seen, strict=True):
            logits = _passed(model, [token], cache)
            own.append(logits[-1])
            noise = max(noise, distance(prompt[n - 1], logits[-1]))
        for rows in counted(doing, f"kernels of step {i + 1} are checked", CHECKED_ROWS):
            sample = _Sample(tokens, seen, pages, pools, states)
            step = sample.padded(decoder, rows)
            out, _ = decoder.run(step)
            mx.eval([out])
            distances += [distance(mine, logits) for logits, mine in zip(own, out, strict=False)]
        # Pools as the token has left them. Each of these steps began without that token.
        pools = step.pools
    wrong = difference(distances, max(2e-3, MARGIN * noise), strays=strays)
    return wrong and f"its logits differ from the module's {wrong}, whose own do by {noise:.2g}"


def _passed(model: nn.Module, tokens: list[int], cache: list[Any]) -> mx.array:
    """Return logits (tokens, vocabulary), evaluated."""
    logits: mx.array = model(mx.array([tokens]), cache=cache)[0]
    mx.eval([*kept_in(cache), logits])
    return logits


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rows whose pages and pools are filled up to their newest tokens.

    states: the numbers of the pools that are no pages. Each step changes these, and has a copy of
    its own.
    """

    tokens: Sequence[int]
    lengths: Sequence[int]
    pages: Sequence[np.ndarray[Any, Any]]
    pools: Sequence[Pool]
    states: Sequence[int]

    def padded(self, decoder: FusedDecoder, rows: int) -> Step:
        padding = [0] * (rows - len(self.tokens))
        seen = np.array([*self.lengths, *padding], np.int32)
        table = np.zeros((rows, max(len(own) for own in self.pages)), np.int32)
        for row, own in enumerate(self.pages):
            table[row, : len(own)] = own
        pools = list(self.pools)
        for number in self.states:
            pools[number] = tuple(part + 0 for part in pools[number])
        slots = [mx.array([*range(len(self.tokens)), *padding], mx.int32)] if self.states else []
        return Step(
            tokens=mx.array([*self.tokens, *padding], mx.uint32),
            before=mx.array(np.maximum(seen - 1, 0)),
            table=mx.array(table),
            pools=pools,
            splits=decoder.plan(seen),
            slots=slots,
            far=decoder.is_far(self.lengths),
        )


def _states(caches: Sequence[Sequence[Any]]) -> list[int]:
    """Return the numbers of the recurrent layers."""
    return [number for number, cache in enumerate(caches[0]) if isinstance(cache, ArraysCache)]


def _filled(
    caches: Sequence[Sequence[Any]],
    pages: Sequence[np.ndarray[Any, Any]],
    page_size: int,
    lengths: Sequence[int],
) -> list[Pool]:
    """Return each layer's pools, not evaluated: the content of each row's caches in its pages, or
    in slots in the rows' order."""
    slots = sum(len(own) for own in pages) * page_size
    pools = []
    for layer in zip(*caches, strict=True):
        if isinstance(layer[0], ArraysCache):
            pools.append(_in_slots(layer, lengths))
            continue
        pair = []
        for which in (0, 1):
            first = layer[0].state[which]
            pool = mx.zeros((first.shape[1], slots, first.shape[3]), first.dtype)
            for own, cache in zip(pages, layer, strict=True):
                content = cache.state[which][0, :, : cache.offset]
                places = np.arange(content.shape[1])
                pool[:, mx.array(own[places // page_size] * page_size + places % page_size)] = (
                    content
                )
            pair.append(pool)
        pools.append((pair[0], pair[1]))
    return pools


def _in_slots(caches: Sequence[ArraysCache], lengths: Sequence[int]) -> Pool:
    """Return the pool that a `StateStore` of these rows would have."""
    inputs = [cache.cache[0] for cache in caches]
    taps = inputs[0].shape[1] + 1
    ring = mx.zeros((len(caches), taps, inputs[0].shape[2]), inputs[0].dtype)
    for slot, (own, length) in enumerate(zip(inputs, lengths, strict=True)):
        for back in range(1, min(taps, length + 1)):
            ring[slot, (length - back) % taps] = own[0, -back]
    states = zip(*(cache.cache[1:] for cache in caches), strict=True)
    return ring, *(mx.concatenate(list(of_rows)) for of_rows in states)

"""Each row by itself over mlx-lm's own caches: for models whose caches cannot be batched."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_manager.mlx_server.errors import GenerationFailed
from mlx_manager.mlx_server.execution.base import PlainForward
from mlx_manager.mlx_server.execution.caches import bytes_of, filled, kept_in
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Prefixes, Snapshot
from mlx_manager.mlx_server.execution.images import Insertion, VisionTraits, angles_in, tokens_of
from mlx_manager.mlx_server.execution.module.shown import show


class Alone:
    """Pass of one row, as far as pictures go; see `Showing`."""

    chunk = True

    def __init__(self) -> None:
        self.insertion: Insertion | None = None
        self.angles: mx.array | None = None

    def begin(self, insertion: Insertion | None, angles: mx.array | None) -> None:
        self.insertion, self.angles = insertion, angles


class AloneForward(PlainForward):
    """Forward that runs each row by itself, over mlx-lm's own caches. vision: of a model that
    sees."""

    kind: ClassVar[str] = "alone"
    prefixes: Prefixes = "copy"
    attends_whole: bool = True

    def __init__(self, model: nn.Module, vision: VisionTraits | None = None) -> None:
        self._model = model
        self._pass = Alone()
        if vision is not None:
            show(model, vision, self._pass)
        self._own: dict[int, list[Any]] = {}
        self.stores = []
        # Caches grow by `KVCache.step` tokens at a time. Windows, whose caches stop growing, are
        # not taken into account.
        few, more = (sum(map(bytes_of, filled(model, n * KVCache.step))) for n in (1, 2))
        self.token_bytes = -(-(more - few) // KVCache.step)
        self.row_bytes = few

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        return list(range(len(keys)))

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        logits = []
        out: mx.array | None = None
        if decode:
            angles = angles_in(decode, [])
            for i, key in enumerate(decode.keys):
                own = None if angles is None else mx.array(angles[i : i + 1])
                self._pass.begin(None, own)
                out = self._row(key, _behind(decode.tokens[i : i + 1][None], out))
                logits.append(out)
        for chunk in chunks:
            if chunk.span.runs:
                raise GenerationFailed(
                    "This model is run row by row, and cannot let a picture's tokens see the whole "
                    "picture."
                )
            angles = chunk.angles
            insertion = None if chunk.shown is None else Insertion(chunk.shown)
            self._pass.begin(insertion, None if angles is None else mx.array(angles))
            out = self._row(chunk.key, _behind(mx.array([tokens_of(chunk)], mx.int32), out))
            if chunk.every:
                logits.append(out)
            elif chunk.final:
                logits.append(out[-1:])
        return mx.concatenate(logits) if logits else mx.zeros((1, 1))

    def forget(self, key: int) -> None:
        self._own.pop(key, None)

    def state(self) -> list[mx.array]:
        return [array for own in self._own.values() for array in kept_in(own)]

    def snapshot(self, key: int) -> Snapshot | None:
        own = self._own.get(key)
        if own is None:
            return None
        # Copies of arrays share their content until one of them is written into.
        kept = deepcopy(own)
        return Snapshot([[*kept_in(kept)]], kept)

    def restore(self, key: int, snapshot: Snapshot) -> None:
        self._own[key] = deepcopy(list(snapshot.caches))

    def _row(self, key: int, tokens: mx.array) -> mx.array:
        own = self._own.get(key)
        if own is None:
            own = self._own[key] = make_prompt_cache(self._model)
        logits: mx.array = self._model(tokens, cache=own)[0]
        return logits


def _behind(tokens: mx.array, before: mx.array | None) -> mx.array:
    """Return a row's tokens, which on a GPU depend on the logits `before` them, as by an added 0:
    sums over ranks that nothing orders are done in any order there, by each rank in its own."""
    if before is None or mx.default_device() == mx.cpu:
        return tokens
    return tokens + (before.reshape(-1)[:1] < -mx.inf).astype(tokens.dtype)

"""One sampling computation for all rows, whatever each of them asks for.

Every row's parameters become entries of arrays, so 64 rows with 64 temperatures cost what 64 rows
with one cost. A row's randomness is one number per token, made on the host from its seed and the
token's place in its output: the same seed gives the same draws whoever shares the batch, and no
noise as large as the vocabulary is drawn. (Logits that the batch's rounding moves may move a token
across the border that its draw lies at: where thousands are about as likely, one draw in 2,000.)
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from secrets import randbits

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.core import Sampling
from mlx_manager.mlx_server.devices.draws import MOST_TOKENS, DrawKernel, Parameter, checked
from mlx_manager.mlx_server.devices.draws.chances import chances, halves

# The draw finds its block first and its token within the block.
BLOCK = 64
# Candidates that almost always hold the whole nucleus; tried before a full sort on a CPU.
CANDIDATES = 256
# Colder is greedy: logits divided by less leave float32's range, and only the best is drawn there.
COLDEST = 1e-5
# Repetition penalties beyond these change no draw any more, but leave that range, too.
LEAST_PENALTY, MOST_PENALTY = 1e-25, 1e25
_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class SamplerState:
    """Sampling state of one sequence, kept up to date by `advance`.

    prompt: distinct prompt tokens, for the repetition penalty; empty unless it is used.
    banned: token ids that may not be drawn now (end-of-turn tokens before `min_tokens`).
    mask: (words,) int32, bit i of word w for token 32 * w + i: those that may be drawn now.
    """

    sampling: Sampling
    prompt: frozenset[int] = frozenset()
    banned: tuple[int, ...] = ()
    mask: NDArray[np.int32] | None = None
    counts: Counter[int] = field(default_factory=Counter)
    seed: int = 0
    penalised: bool = field(init=False)
    # Distinct tokens that the repetition penalty applies to: thousands, copied as one array a step.
    _seen: array[int] = field(init=False)

    def __post_init__(self) -> None:
        s = self.sampling
        self.penalised = bool(
            s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
        )
        self._seen = array("i", self.prompt | self.counts.keys())

    @classmethod
    def of(cls, sampling: Sampling, prompt: Sequence[int]) -> SamplerState:
        repeats = sampling.repetition_penalty != 1.0
        seed = randbits(63) if sampling.seed is None else sampling.seed & _MASK64
        return cls(sampling, frozenset(prompt) if repeats else frozenset(), seed=seed)

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < COLDEST

    @property
    def filtered(self) -> bool:
        s = self.sampling
        return not self.greedy and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)

    @property
    def adjusted(self) -> bool:
        """Return whether the logits must be changed, which takes the tokens drawn so far."""
        biased = bool(self.sampling.logit_bias) or bool(self.banned)
        return self.penalised or biased or self.mask is not None

    def advance(self, token: int) -> None:
        """Count a token that has been drawn. Only `penalised` sequences need this."""
        if token not in self.counts and token not in self.prompt:
            self._seen.append(token)
        self.counts[token] += 1

    def after(self, token: int) -> SamplerState:
        """Return the state once `token` has been drawn, with nothing banned and no mask."""
        counts = self.counts
        if self.penalised:
            counts = counts.copy()
            counts[token] += 1
        return SamplerState(self.sampling, self.prompt, counts=counts, seed=self.seed)

    def allows_the_same(self, other: SamplerState) -> bool:
        """Return whether both states exclude the same tokens."""
        return self.banned == other.banned and same_masks(self.mask, other.mask)

    @property
    def seen(self) -> NDArray[np.int32]:
        """Return the distinct tokens of `prompt` and those drawn since, (n,) int32."""
        return np.array(self._seen, np.int32)


def same_masks(one: NDArray[np.int32] | None, other: NDArray[np.int32] | None) -> bool:
    """Return whether both masks allow the same tokens; None allows all."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


class SamplingBatch:
    """Sampling parameters of a batch, computed once for as long as the same rows draw together.

    Attributes:
        rows: one state a row, in order.
        greedy: the numbers of the rows that want the best token.
        filtered: the numbers of the rows that exclude unlikely tokens.
    """

    def __init__(self, rows: Sequence[SamplerState]) -> None:
        self.rows = rows
        self.greedy = [i for i, row in enumerate(rows) if row.greedy]
        self.filtered = [i for i, row in enumerate(rows) if row.filtered]
        self._columns: dict[Parameter, mx.array] = {}
        self._next: tuple[list[int], mx.array] = [], mx.array([])

    @cached_property
    def host(self) -> NDArray[np.float32]:
        """Return the parameters, (rows, len(Parameter)) float32, on the host."""
        return np.array(
            [
                (
                    1.0 if row.greedy else row.sampling.temperature,
                    row.greedy,
                    math.log(row.sampling.min_p) if row.sampling.min_p > 0 else -math.inf,
                    row.sampling.top_k,
                    row.sampling.top_p,
                )
                for row in self.rows
            ],
            np.float32,
        ).reshape(-1, len(Parameter))

    @cached_property
    def parameters(self) -> mx.array:
        """Return `host` as an array in the device's memory, so that a GPU need not fetch it."""
        return mx.array(self.host) + 0

    @cached_property
    def wants_best(self) -> mx.array:
        """Return which rows are in `greedy`, (rows,) bool."""
        return self.column(Parameter.GREEDY)[:, 0] > 0

    @cached_property
    def _seeds(self) -> NDArray[np.uint64]:
        return np.array([row.seed for row in self.rows], np.uint64)

    @cached_property
    def seeds(self) -> mx.array:
        """Return the seeds as `DrawKernel` takes them, (rows, 2) uint32."""
        return mx.array(halves(self._seeds)) + 0

    def chances(self, drawn: Sequence[int]) -> NDArray[np.float32]:
        """Return (rows,) numbers in [0, 1), which decide each row's token after `drawn` ones."""
        return chances(self._seeds, drawn)

    def draw(self, kernel: DrawKernel, logits: mx.array, drawn: Sequence[int]) -> mx.array:
        """Draw a token of each row of `logits`, padding included, by `kernel`."""
        expected, places = self._next
        if expected != drawn:
            places = mx.array(list(drawn), mx.uint32)
        # Steps that follow one another take nothing from the host: a GPU stops to fetch it.
        tokens, places = kernel.draw(logits, self.parameters, self.seeds, places)
        self._next = [n + 1 for n in drawn], places
        return tokens

    def column(self, which: Parameter) -> mx.array:
        """Return one parameter of all rows, (rows, 1), on the device."""
        if which not in self._columns:
            self._columns[which] = self.parameters[:, which : which + 1]
        return self._columns[which]

    @cached_property
    def by_filtered(self) -> SamplingBatch:
        """Return the parameters of the `filtered` rows alone."""
        return SamplingBatch([self.rows[i] for i in self.filtered])


def sample(logits: mx.array, batch: SamplingBatch, drawn: Sequence[int]) -> mx.array:
    """Draw a token for each row.

    Args:
        logits: (rows, vocabulary), any float dtype. More rows than `batch` has are padding.
        batch: the rows' parameters, in order.
        drawn: tokens of each row so far, those included that its state does not know of yet.

    Returns:
        (rows,) uint32 token ids, not evaluated. There may be some for padding, too.
    """
    if any(row.adjusted for row in batch.rows):
        logits = _adjust(logits[: len(batch.rows)].astype(mx.float32), batch.rows)
    if len(batch.greedy) == len(batch.rows):
        return best(logits)
    match checked(logits.dtype):
        case DrawKernel() as kernel if logits.shape[-1] <= MOST_TOKENS:
            return batch.draw(kernel, logits, drawn)
    return sample_portably(logits[: len(batch.rows)], batch, drawn)


def best(logits: mx.array) -> mx.array:
    """Return the most likely token of each row of `logits`, (rows, vocabulary), the first of
    equals: (rows,) uint32, not evaluated."""
    match checked(logits.dtype):
        case DrawKernel() as kernel:
            return kernel.best(logits)
    return mx.argmax(logits, axis=-1)


def sample_portably(logits: mx.array, batch: SamplingBatch, drawn: Sequence[int]) -> mx.array:
    """Draw as `DrawKernel` does, in MLX's own operations; at least one row is not greedy."""
    scaled = logits.astype(mx.float32) / batch.column(Parameter.TEMPERATURE)
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    if batch.filtered:
        scaled = _filter(scaled, batch)
    tokens = _draw(mx.exp(scaled), mx.array(batch.chances(drawn)))
    if not batch.greedy:
        return tokens
    return mx.where(batch.wants_best, mx.argmax(logits, axis=-1), tokens)


def _draw(weights: mx.array, chance: mx.array) -> mx.array:
    """Invert the cumulative distribution: the first token past `chance` of the whole.

    The weights of excluded tokens are 0 and can't be drawn, also where a parallel scan's rounding
    makes the sums uneven. In two levels, since the scan over a block list is short.
    """
    rows, vocabulary = weights.shape
    blocks = -(-vocabulary // BLOCK)
    if vocabulary % BLOCK:
        weights = mx.pad(weights, [(0, 0), (0, blocks * BLOCK - vocabulary)])
    weights = weights.reshape(rows, blocks, BLOCK)
    mass = weights.sum(axis=-1)
    reached = mx.cumsum(mass, axis=-1)
    target = chance[:, None] * reached[:, -1:]
    block = mx.argmax((reached > target) & (mass > 0), axis=-1)[:, None]
    before = mx.take_along_axis(reached - mass, block, axis=-1)
    inside = mx.take_along_axis(weights, block[:, :, None], axis=1)[:, 0]
    past = before + mx.cumsum(inside, axis=-1) > target
    allowed = inside > 0
    # Rounding may leave the target just past the block's last sum: then take the last allowed
    # token.
    last = BLOCK - 1 - mx.argmax(allowed[:, ::-1], axis=-1)
    hit = past & allowed
    within = mx.where(hit.any(axis=-1), mx.argmax(hit, axis=-1), last)
    return block[:, 0] * BLOCK + within


def _filter(scaled: mx.array, batch: SamplingBatch) -> mx.array:
    """Exclude (-inf) what top_k, top_p over what that leaves, and min_p exclude.

    On a CPU only rows that filter are sorted; tokens tied with the last one kept are kept.
    """
    chosen = batch.filtered
    if len(chosen) == len(batch.rows) or mx.default_device() != mx.cpu:
        return _filtered(scaled, batch)
    at = mx.array(chosen)
    scaled[at] = _filtered(scaled[at], batch.by_filtered)
    return scaled


def _filtered(scaled: mx.array, batch: SamplingBatch) -> mx.array:
    # Relative to the best token, which is at 0: min_p needs no sort.
    limit = batch.column(Parameter.LOG_MIN_P)
    if (batch.host[:, Parameter.TOP_K] > 0).any() or (batch.host[:, Parameter.TOP_P] < 1.0).any():
        limit = mx.maximum(limit, _nucleus(scaled, batch))
    return mx.where(scaled < limit, -mx.inf, scaled)


def _nucleus(own: mx.array, batch: SamplingBatch) -> mx.array:
    """Return the logit of the last token that top_k and then top_p keep, (rows, 1)."""
    vocabulary = own.shape[-1]
    kept = batch.host[:, Parameter.TOP_K]
    enough = vocabulary if (kept == 0).any() else int(kept.max())
    keep = batch.column(Parameter.TOP_K)
    keep = mx.where(keep > 0, keep, vocabulary)
    mass = batch.column(Parameter.TOP_P)
    if enough > CANDIDATES and vocabulary > CANDIDATES and mx.default_device() == mx.cpu:
        head = _descending(mx.topk(own, CANDIDATES, axis=-1))
        within = mx.exp(head).sum(-1, keepdims=True) >= mass * mx.exp(own).sum(-1, keepdims=True)
        if mx.where(keep >= vocabulary, within & (mass < 1.0), keep <= CANDIDATES).all():
            return _last_kept(head, keep, mass, mx.exp(own).sum(-1, keepdims=True))
    head = own if enough >= vocabulary else mx.topk(own, enough, axis=-1)
    return _last_kept(_descending(head), keep, mass, mx.exp(own).sum(-1, keepdims=True))


def _last_kept(head: mx.array, keep: mx.array, mass: mx.array, whole: mx.array) -> mx.array:
    """Return the smallest of the sorted `head` that is among the first `keep` and within the
    nucleus."""
    size = head.shape[-1]
    place = mx.arange(size)
    among = place < keep
    weights = mx.where(among, mx.exp(head), 0.0)
    # Rows with a top_k renormalise over what it keeps; the others over the whole vocabulary.
    total = mx.where(keep <= size, weights.sum(-1, keepdims=True), whole)
    before = mx.cumsum(weights, axis=-1) - weights
    kept = among & ((before < mass * total) | (mass >= 1.0))
    last = mx.maximum(kept.sum(axis=-1, keepdims=True) - 1, 0)
    return mx.take_along_axis(head, last, axis=-1)


def _descending(values: mx.array) -> mx.array:
    return mx.sort(values, axis=-1)[:, ::-1]


def _adjust(logits: mx.array, rows: Sequence[SamplerState]) -> mx.array:
    """Apply repetition, presence and frequency penalties, biases, bans, masks, in that order."""
    scaled: list[tuple[int, NDArray[np.int32]]] = []
    added: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        s = row.sampling
        if s.repetition_penalty != 1.0 and len(seen := row.seen):
            scaled.append((i, seen))
        if s.presence_penalty or s.frequency_penalty:
            added += [
                (i, token, -s.presence_penalty - s.frequency_penalty * times)
                for token, times in row.counts.items()
            ]
        added += [(i, token, bias) for token, bias in s.logit_bias]
        added += [(i, token, -np.inf) for token in row.banned]
    if scaled:
        penalised = np.array([i for i, _ in scaled], np.int32)
        numbers = np.repeat(penalised, [len(seen) for _, seen in scaled])
        at, token = mx.array(numbers), mx.array(np.concatenate([seen for _, seen in scaled]))
        penalties = [row.sampling.repetition_penalty for row in rows]
        within = np.clip(penalties, LEAST_PENALTY, MOST_PENALTY).astype(np.float32)
        penalty = mx.array(within[numbers])
        value = logits[at, token]
        logits[at, token] = mx.where(value > 0, value / penalty, value * penalty)
    if added:
        at, token, amount = _columns(added)
        logits = logits.at[at, token].add(amount)
    return _mask(logits, rows)


def _mask(logits: mx.array, rows: Sequence[SamplerState]) -> mx.array:
    """Exclude (-inf) tokens that the rows' masks don't allow. Rows without a mask stay as they
    are."""
    chosen = [i for i, row in enumerate(rows) if row.mask is not None]
    if not chosen:
        return logits
    words = mx.array(np.stack([row.mask for row in rows if row.mask is not None]))
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.int32)) & 1
    allowed = bits.reshape(len(chosen), -1).astype(mx.bool_)
    vocabulary = logits.shape[-1]
    known = allowed.shape[-1]
    if known < vocabulary:
        allowed = mx.pad(allowed, [(0, 0), (0, vocabulary - known)])
    allowed = allowed[:, :vocabulary]
    if len(chosen) == len(rows):
        return mx.where(allowed, logits, -mx.inf)
    at = mx.array(chosen)
    logits[at] = mx.where(allowed, logits[at], -mx.inf)
    return logits


def logprobs(logits: mx.array, tokens: mx.array, best: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return the log probabilities that the model itself gives, before any sampling parameter.

    Args:
        logits: (rows, vocabulary).
        tokens: (rows,) one token of each row.
        best: how many of the most likely tokens to find.

    Returns:
        (rows,) natural logarithms of `tokens`' probabilities; (rows, best) ids of the most likely
        ones, in no order; (rows, best) their logarithms.
    """
    logits = logits.astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    # The dtype of `ids`: gathering by another dtype would compile another kernel, 5 s of NVRTC.
    chosen = mx.take_along_axis(logs, tokens[:, None].astype(mx.uint32), axis=-1)[:, 0]
    first = logs.shape[-1] - best
    ids = mx.argpartition(logs, min(first, logs.shape[-1] - 1), axis=-1)[:, first:]
    return chosen, ids, mx.take_along_axis(logs, ids, axis=-1)


def _columns(entries: list[tuple[int, int, float]]) -> tuple[mx.array, mx.array, mx.array]:
    rows, tokens, values = zip(*entries, strict=True)
    return mx.array(rows), mx.array(tokens), mx.array(values, mx.float32)


def every_way(logits: mx.array) -> Iterator[mx.array]:
    """Draw from `logits`, (2, vocabulary), once in every way that requests may ask for, so that the
    device compiles and checks its kernels. Nothing is evaluated except by those checks."""
    known = -(-logits.shape[-1] // 32)
    masked = partial(SamplerState, mask=np.full(known, -1, np.int32))
    greedy, warm = SamplerState(Sampling(temperature=0.0)), SamplerState(Sampling())
    nucleus = SamplerState(Sampling(top_p=0.9, min_p=0.01))
    few = SamplerState(Sampling(top_k=8))
    biased = SamplerState(
        Sampling(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1),
        prompt=frozenset((0, 1)),
        banned=(2,),
    )
    ways = [(greedy, greedy), (greedy, warm), (warm, warm), (greedy, nucleus), (few, few)]
    ways += [(biased, warm), (greedy, masked(Sampling())), (masked(Sampling()),) * 2]
    for way in ways:
        yield sample(logits, SamplingBatch(way), (0, 0))
    chosen = mx.argmax(logits, axis=-1)[mx.array([0])]
    yield chosen
    for best in (0, 2):
        yield from logprobs(logits[mx.array([0])], chosen, best)

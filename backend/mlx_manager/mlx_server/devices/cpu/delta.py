"""Gated delta layers (Qwen 3.5, Qwen 3 Next, OLMo Hybrid) where mlx-lm has no kernel for them.

Such a layer keeps a state S of values by keys for each head, and each token changes it:

    d_t = beta_t * (v_t - g_t * S_(t-1) k_t)        S_t = g_t * S_(t-1) + d_t k_t^T

mlx-lm has a kernel for this on Metal only, and elsewhere computes token by token. Here a chunk of
tokens is computed by a few matrix products. Within a chunk that begins with state S, the d solve a
lower triangular system of equations:

    d_i + sum_(j<i) beta_i * G_ij * (k_i . k_j) * d_j = beta_i * (v_i - G_i * S k_i)

where G_i is the product of the gates from the chunk's first to i, and G_ij of those from j + 1 to
i. Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
and "Gated Delta Networks"; Hugging Face's `torch_chunk_gated_delta_rule` is the same in PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import ceil

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models import gated_delta

from mlx_manager.mlx_server.devices.namespaces import namespaces_of

log = logging.getLogger(__name__)
Rule = Callable[..., tuple[mx.array, mx.array]]
"""Type of `mlx_lm.models.gated_delta.gated_delta_ops`."""

ON_CPU = 32
"""Tokens of a chunk on a CPU. In longer chunks the inverse costs more than the fewer products with
the state save (512 tokens of 16 heads of 128: 38, 40 and 68 ms in chunks of 16, 32 and 64)."""
ON_GPU = 64
"""Tokens of a chunk on a GPU, where each chunk waits for the launches of the chunk before."""

TRIED = 75
"""Tokens of the comparison with mlx-lm's loop: two chunks or more, the last one not full."""
ALLOWED_ON_CPU = 1e-4
"""Allowed difference from mlx-lm's loop on a CPU, relative to the largest number."""
ALLOWED_ON_GPU = 2e-2
"""Allowed difference on a GPU: NVIDIA's round factors to 11 bits (TF32) unless told not to."""


class ChunkedRule:
    """Gated delta rule with prompts computed in chunks.

    original: mlx-lm's loop over tokens, which serves all other cases.
    """

    def __init__(self, original: Rule) -> None:
        self.original = original

    def __call__(  # noqa: PLR0917 mlx-lm's signature
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return the outputs of some tokens, and the state after them.

        Args:
            q, k: (rows, tokens, key heads, key dim).
            v: (rows, tokens, value heads, value dim), as many heads as keys have, or a multiple.
            g: (rows, tokens, value heads), 0 to 1. With gates for each element of a key, which
                another axis is for, the loop is taken.
            beta: (rows, tokens, value heads), 0 to 2.
            state: float32 (rows, value heads, value dim, key dim); None: zeros.
            mask: (rows, tokens) bool, tokens that count. With one, the loop is taken.

        Returns:
            (rows, tokens, value heads, value dim) of `q`'s type, and the state.
        """
        if mask is not None or g.ndim == 4 or q.shape[1] == 1:
            return self.original(q, k, v, g, beta, state, mask)
        if state is None:
            state = mx.zeros((v.shape[0], *v.shape[2:], q.shape[3]))
        most = ON_CPU if mx.default_device() == mx.cpu else ON_GPU
        return in_chunks(q, k, v, g, beta, state, most)


def in_chunks(  # noqa: PLR0917
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    most: int,
) -> tuple[mx.array, mx.array]:
    """Compute `ChunkedRule` in chunks of at most `most` tokens, in float32."""
    rows, tokens, heads, _ = k.shape
    count = ceil(tokens / most)
    size = ceil(tokens / count)

    def cut(x: mx.array, filling: float = 0.0) -> mx.array:
        """Return (chunks, rows, key heads, value heads of each, size, ...)."""
        x = x.astype(mx.float32)
        if missing := count * size - tokens:
            widths = [(0, missing if axis == 1 else 0) for axis in range(x.ndim)]
            x = mx.pad(x, widths, constant_values=filling)
        x = x.reshape(rows, count, size, heads, -1, *x.shape[3:])
        return mx.contiguous(x.transpose(1, 0, 3, 4, 2, *range(5, x.ndim)))

    # Tokens whose gate is 1 and whose beta is 0 leave the state as it is.
    queries, keys, values, gates, betas = cut(q), cut(k), cut(v), cut(g, 1.0), cut(beta)
    betas, since = betas[..., None], mx.cumprod(gates, axis=-1)[..., None]
    decays = decays_between(gates)
    transposed = keys.swapaxes(-1, -2)
    solved = inverse((keys @ transposed) * decays * betas)
    scores = (queries @ transposed) * decays
    # Keys and queries are multiplied with the state by one product.
    asked = mx.concatenate([keys * (since * betas), queries * since], axis=-2)
    wanted, left = values * betas, keys * decays[..., -1, :, None]
    lasting = since[..., -1:, :]
    state = state.astype(mx.float32).reshape(rows, heads, -1, *state.shape[2:])
    outputs = []
    for i in range(count):
        said = asked[i] @ state.swapaxes(-1, -2)
        changes = solved[i] @ (wanted[i] - said[..., :size, :])
        outputs.append(mx.addmm(said[..., size:, :], scores[i], changes))
        state = mx.addmm(state * lasting[i], changes.swapaxes(-1, -2), left[i])
    y = mx.stack(outputs).transpose(1, 0, 4, 2, 3, 5)
    y = y.reshape(rows, count * size, *v.shape[2:])[:, :tokens]
    return y.astype(q.dtype), state.flatten(1, 2)


def decays_between(gates: mx.array) -> mx.array:
    """Return (..., size, size): the part of token j's change left at token i, 0 where i < j.

    gates: (..., size). Each decay is the product of the gates between j and i. Quotients of
    cumulative products or differences of logarithms would be NaN where a gate is 0, and inexact
    after small gates.
    """
    size = gates.shape[-1]
    between = mx.cumprod(mx.where(_below(size), gates[..., None], 1.0), axis=-2)
    return mx.where(_to_here(size), between, 0.0)


def inverse(a: mx.array) -> mx.array:
    """Return the inverse of I + the part of `a` below the diagonal, (..., size, size).

    Diagonal blocks of 1, 2, 4, ... are inverted in turn: the inverse of [[P, 0], [R, Q]] is
    [[P', 0], [-Q' R P', Q']], where the inverses P' and Q' come from the step before. This is as
    exact as solving row by row (Du Croz and Higham 1992, "Stability of Methods for Matrix
    Inversion"). A series of powers of `a` would take fewer products, but where keys are alike its
    terms reach 10^17 and have to cancel out.
    """
    first, *rest = _corners(a.shape[-1])
    out = _diagonal(a.shape[-1]) - mx.where(first, a, 0.0)
    for corner in rest:
        out = out - (out @ mx.where(corner, a, 0.0)) @ out
    return out


def compute_chunks(model: nn.Module) -> None:
    """Have prompts of `model`'s gated delta layers computed in chunks, if mlx-lm has no kernel.

    mlx-lm's `gated_delta_update` looks `gated_delta_ops` up at each call, so replacing that one
    function serves all models, for the rest of the process. The replacement is first compared with
    the original, because the model's reference logits will be computed by the replacement, too.
    """
    concerned = any("gated_delta_update" in names for names in namespaces_of(model))
    original = gated_delta.gated_delta_ops
    if mx.metal.is_available() or not concerned or isinstance(original, ChunkedRule):
        return
    rule = ChunkedRule(original)
    wrong = difference(rule)
    if wrong > (ALLOWED_ON_CPU if mx.default_device() == mx.cpu else ALLOWED_ON_GPU):
        log.warning("gated delta layers go token by token: in chunks they differ by %.2g", wrong)
        return
    gated_delta.gated_delta_ops = rule


def difference(rule: ChunkedRule) -> float:
    """Return the largest difference between `rule` and mlx-lm's loop.

    The difference is relative to the largest number; NaN counts as infinite.
    """
    made = np.random.default_rng(0)
    keys = made.normal(1, 1, (1, TRIED + 1, 2, 32))
    keys /= np.linalg.norm(keys, axis=3, keepdims=True)
    queries, values = made.normal(0, 0.2, keys.shape), made.normal(0, 1, (1, TRIED + 1, 4, 32))
    gates = 1 - made.uniform(0, 1, values.shape[:3]) ** 4
    numbers = (queries, keys, values, gates, made.uniform(0, 1, gates.shape))
    told = [mx.array(each.astype(np.float32)) for each in numbers]
    state, outputs = None, []
    for token in range(TRIED + 1):
        y, state = rule.original(*(x[:, token : token + 1] for x in told), state)
        outputs.append(y)
    first, half = rule(*(x[:, :TRIED] for x in told))
    last, after = rule(*[x[:, TRIED:] for x in told], half)  # type: ignore[call-arg]
    pairs = [(mx.concatenate([first, last], 1), mx.concatenate(outputs, 1)), (after, state)]
    both = [tuple(map(np.array, pair)) for pair in pairs]
    worst = max(float(np.abs(ours - own).max() / np.abs(own).max()) for ours, own in both)
    return float("inf") if np.isnan(worst) else worst


@cache
def _corners(size: int) -> list[mx.array]:
    """Return (size, size) bool masks for diagonal blocks of 1, 2, 4, ...

    Each mask marks the blocks that lie below pairs of neighbouring diagonal blocks, R in `inverse`.
    """
    place = np.arange(size)
    blocks = [place // 2**i for i in range(max(1, (size - 1).bit_length()) + 1)]
    return [mx.array((of[:, None] > of) & (pair[:, None] == pair)) for of, pair in pairwise(blocks)]


@cache
def _below(size: int) -> mx.array:
    return mx.array(np.tri(size, k=-1, dtype=bool))


@cache
def _to_here(size: int) -> mx.array:
    return mx.array(np.tri(size, dtype=bool))


@cache
def _diagonal(size: int) -> mx.array:
    return mx.array(np.eye(size, dtype=np.float32))

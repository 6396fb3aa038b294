"""Check of the sampling kernel against the definition, which it must pass to be used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices.draws.chances import halves, seed_of
from mlx_manager.mlx_server.devices.draws.kernel import DrawKernel
from mlx_manager.mlx_server.devices.draws.parameter import Parameter

# Allowed error of a sum of float32 weights, relative to the whole weight.
ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class DrawProblem:
    """Rows to draw from.

    logits: (rows, vocabulary). parameters: (rows, len(Parameter)). chances: (rows,).
    """

    logits: NDArray[np.float32]
    parameters: NDArray[np.float32]
    chances: NDArray[np.float32]

    @property
    def origins(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Seeds and numbers of tokens drawn that the kernel makes `chances` of."""
        seeds = np.array([seed_of(chance) for chance in self.chances.tolist()], np.uint64)
        return halves(seeds), np.zeros(len(seeds), np.uint32)

    def mistake(self, tokens: NDArray[np.unsignedinteger]) -> str | None:
        """Return an error for the first token that can't have been drawn; None if none."""
        vocabulary = self.logits.shape[1]
        for row, token in enumerate(tokens.tolist()):
            if token >= vocabulary or not self.allows(row, token):
                asked = dict(zip(Parameter.__members__, self.parameters[row].tolist(), strict=True))
                return f"of {vocabulary} tokens {token} was drawn for {asked}"
        return None

    def allows(self, row: int, token: int) -> bool:
        """Return whether `row` draws `token`, or would with other rounding of its sums."""
        logits, parameters = self.logits[row].astype(np.float64), self.parameters[row]
        if parameters[Parameter.GREEDY]:
            return token == int(logits.argmax())
        distances = (logits.max() - logits) / float(parameters[Parameter.TEMPERATURE])
        weights = np.exp(-distances)
        for off in (0.0, -ROUNDING, ROUNDING):
            kept = np.where(distances <= _reach(distances, weights, parameters, off), weights, 0.0)
            upto = np.cumsum(kept) / kept.sum()
            before = upto[token - 1] if token else 0.0
            near = before - ROUNDING <= self.chances[row] <= upto[token] + ROUNDING
            if near and kept[token] > 0:
                return True
        return False


def _reach(
    distances: NDArray[np.float64], weights: NDArray[np.float64], parameters: NDArray[np.float32],
    off: float,
) -> float:  # fmt: skip
    """Return the distance from the best token to the last token kept, with sums off by `off`."""
    order = np.argsort(distances, kind="stable")
    keep, mass = int(parameters[Parameter.TOP_K]) or len(order), float(parameters[Parameter.TOP_P])
    first = order[:keep]
    before = np.cumsum(weights[first]) - weights[first]
    inside = before < (mass + off) * weights[first].sum() if mass < 1 else before < math.inf
    inside[0] = True
    # The floor, a logarithm in float32, has a rounding of its own.
    floor = -float(parameters[Parameter.LOG_MIN_P]) * (1 + off) + off
    return min(float(distances[first[inside][-1]]), max(floor, 0.0))


def row_of(
    temperature: float = 1.0,
    greedy: bool = False,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[float, ...]:
    """Return a row of `parameters`."""
    return temperature, greedy, math.log(min_p) if min_p else -math.inf, top_k, top_p


ROWS = (
    row_of(),
    row_of(greedy=True),
    row_of(0.3),
    row_of(top_k=1),
    row_of(top_k=7, temperature=1.7),
    row_of(top_k=900),
    row_of(top_p=0.9),
    row_of(top_p=0.4, temperature=0.6),
    row_of(top_p=1e-6),
    row_of(min_p=0.05),
    row_of(top_k=50, top_p=0.8, min_p=0.01),
    row_of(temperature=1e-3, top_p=0.95),
)
CHANCES = (0.0, 0.37, 0.81, 1 - 2.0**-23)
# Vocabulary sizes, each with the chances of its rows: multiples of 8 and others, shorter than the
# first pass of a block and longer.
SHAPES = ((40, CHANCES), (1003, CHANCES), (36_000, CHANCES[1:2]))


def random_problem(
    vocabulary: int, dtype: mx.Dtype, chances: Sequence[float] = CHANCES, seed: int = 0
) -> DrawProblem:
    """Return rows of every kind: spread, tied, flat, mostly excluded; values exact in `dtype`."""
    rng = np.random.default_rng(seed)
    each = len(ROWS) * len(chances)
    spread = rng.normal(size=(each, vocabulary)) * rng.choice([0.5, 2.0, 8.0], size=(each, 1))
    logits = np.concatenate([spread, np.round(spread), np.zeros((each, vocabulary)), spread])
    excluded = rng.random((each, vocabulary)) < 0.9
    excluded[:, rng.integers(vocabulary)] = False
    logits[-each:][excluded] = -np.inf
    exact = np.array(mx.array(logits.astype(np.float32)).astype(dtype).astype(mx.float32))
    parameters = np.array([own for own in ROWS for _ in chances], np.float32)
    each_chance = np.tile(np.array(chances, np.float32), 4 * len(ROWS))
    return DrawProblem(exact, np.tile(parameters, (4, 1)), each_chance)


def self_check(kernel: DrawKernel, dtype: mx.Dtype) -> str | None:
    """Return the first wrong result of `kernel`, as a message; None if all are right."""
    for vocabulary, chances in SHAPES:
        problem = random_problem(vocabulary, dtype, chances)
        given = mx.array(problem.logits).astype(dtype)
        tokens, _ = kernel.draw(given, *map(mx.array, (problem.parameters, *problem.origins)))
        wrong = problem.mistake(np.array(tokens))
        if wrong is not None:
            return wrong
        best = np.array(kernel.best(given))
        if (best != problem.logits.argmax(axis=1)).any():
            return f"of {vocabulary} tokens the best is not found"
    return None

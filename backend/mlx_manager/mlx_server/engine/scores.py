"""Log probabilities of tokens, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from mlx_manager.mlx_server.core import TokenLogprob
from mlx_manager.mlx_server.engine.sampling import logprobs
from mlx_manager.mlx_server.execution.forward import Chunk

if TYPE_CHECKING:
    from mlx_manager.mlx_server.engine.sequence import Sequence as Row


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log probabilities that a row asks for.

    best: number of alternatives to each token. prompt: whether the prompt's tokens are scored, too.
    piece: returns the bytes of a token.
    """

    best: int
    prompt: bool
    piece: Callable[[int], bytes]

    def write(
        self, token: int, logprob: float | None, ids: Sequence[int], values: Sequence[float]
    ) -> TokenLogprob:
        """Return the score of `token`. `ids`, `values`: at least `best` alternatives, in no
        order."""
        order = sorted(range(len(ids)), key=lambda i: (-values[i], ids[i]))[: self.best]
        top = tuple((ids[i], self.piece(ids[i]), values[i]) for i in order)
        return TokenLogprob(token, self.piece(token), logprob, top)


@dataclass(frozen=True, slots=True)
class LogitPositions:
    """Positions in a step's logits.

    draws: the position of each draw, in order. chunks: the first position of each chunk
    whose tokens all have logits, by the chunk's number.
    """

    draws: list[int]
    chunks: dict[int, int]

    @classmethod
    def of(cls, rows: int, chunks: Sequence[Chunk], drafts: Sequence[int] = ()) -> LogitPositions:
        """Return the positions of a step. drafts: of each of the first chunks, which are rows'
        drafts, the number of its last tokens at which the row draws."""
        end = rows
        positions = cls(list(range(end)), {})
        for chunk, places in zip(chunks, drafts, strict=False):
            end += len(chunk.tokens)
            positions.draws.extend(range(end - places, end))
        for number, chunk in enumerate(chunks[len(drafts) :], len(drafts)):
            if chunk.every:
                positions.chunks[number] = end
                end += len(chunk.tokens)
            elif chunk.final:
                end += 1
            if chunk.final:
                positions.draws.append(end - 1)
        return positions

    def drawn(self, logits: mx.array) -> mx.array:
        """Return the logits that are drawn from, (draws, vocabulary); all of them if nothing is
        drawn. Those of padding may follow."""
        first = not self.chunks and self.draws == list(range(len(self.draws)))
        return logits if first or not self.draws else logits[mx.array(self.draws, mx.int32)]


Logprobs = tuple[mx.array, mx.array, mx.array]
"""Result of `sampling.logprobs`."""


@dataclass(slots=True)
class Scores:
    """Scores of one step, on their way from the device."""

    asking: list[int] = field(default_factory=list)
    drawn: Logprobs | None = None
    prompts: list[tuple[Row, int, Logprobs]] = field(default_factory=list)

    def add_drawn(self, logits: mx.array, rows: Sequence[Row], tokens: mx.array) -> None:
        """Score the next tokens of rows that ask for it; `logits` begin with those of `rows`, each
        as often as it draws."""
        wanted = {i: row.scoring.best for i, row in enumerate(rows) if row.scoring is not None}
        if wanted:
            self.asking = list(wanted)
            at = mx.array(self.asking)
            self.drawn = logprobs(logits[at], tokens[at], max(wanted.values()))

    def add_prompt(self, row: Row, logits: mx.array, chunk: Chunk) -> None:
        """Score the prompt's tokens that follow those of `chunk`, which `logits` begin with."""
        assert row.scoring is not None
        first = row.computed - len(chunk.tokens) + 1
        following = row.tokens[first : min(row.computed + 1, row.prompt_length)]
        if following:
            tokens = mx.array(following, mx.int32)
            found = logprobs(logits[: len(following)], tokens, row.scoring.best)
            self.prompts.append((row, first, found))

    def arrays(self) -> list[mx.array]:
        found = [*(each for _, _, each in self.prompts), *((self.drawn,) if self.drawn else ())]
        return [array for each in found for array in each]

    def read(self, rows: Sequence[Row], tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """Return the scores of tokens by their numbers; add prompts' scores to their rows.

        rows: the row that each token was drawn for.
        """
        for row, first, found in self.prompts:
            listed = _listed(row, row.tokens[first:], found)
            # A row that was paused computes some of its prompt again.
            row.prompt_scores += listed[len(row.prompt_scores) + 1 - first :]
        if self.drawn is None:
            return {}
        scored = {}
        for i, columns in zip(self.asking, _columns(self.drawn), strict=True):
            row = rows[i]
            assert row.scoring is not None
            scored[i] = row.scoring.write(tokens[i], *columns)
        return scored


def _listed(row: Row, tokens: Sequence[int], found: Logprobs) -> list[TokenLogprob]:
    assert row.scoring is not None
    write = row.scoring.write
    return [write(token, *columns) for token, columns in zip(tokens, _columns(found), strict=False)]


def _columns(found: Logprobs) -> Iterable[tuple[float, list[int], list[float]]]:
    chosen, ids, values = (cast(list[Any], array.tolist()) for array in found)
    return zip(chosen, ids, values, strict=True)

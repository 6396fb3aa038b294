"""Drafts for nothing: tokens found in the prompt, the answer, a prediction or a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlx_manager.mlx_server.engine.speculation.acceptance import Acceptance
from mlx_manager.mlx_server.engine.speculation.draft import Method, Proposal

if TYPE_CHECKING:
    from mlx_manager.mlx_server.engine.sequence import Sequence as Row

# Fewest tokens at the end of what has been written that must stand elsewhere, too: in the prompt or
# the answer, where two follow each other often, and in a prediction, which is likely throughout.
LEAST_MATCH = 3
LEAST_IN_PREDICTION = 2
# Longest match that is looked at.
LONGEST_MATCH = 32
# Steps without a draft until one is looked for in one step of so many only.
PATIENCE, SELDOM = 6, 8
# The same, where steps are queued ahead, after ever more looks that have found nothing.
LONGEST_APART = 32


class SearchedTokens:
    """Tokens that grow, in which ends of texts are searched."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.empty(max(2 * len(tokens), 256), np.int32)
        self.size = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        size = self.size + len(tokens)
        if size > len(self._tokens):
            larger = np.empty(2 * size, np.int32)
            larger[: self.size] = self._tokens[: self.size]
            self._tokens = larger
        self._tokens[self.size : size] = tokens
        self.size = size

    def follow(self, end: Sequence[int], least: int, most: int) -> list[int]:
        """Return at most `most` tokens that follow the longest match of `end` in this text; none if
        fewer than `least` tokens match.

        Of equally long matches, the last one is taken that so many tokens follow. The text's own
        end is no match: nothing follows it.
        """
        if len(end) < least:
            return []
        own = self._tokens[: self.size]
        last = np.flatnonzero(own[:-1] == end[-1])
        for back in range(1, len(end)):
            longer = last[last >= back]
            longer = longer[own[longer - back] == end[-1 - back]]
            if not len(longer):
                if back < least:
                    return []
                break
            last = longer
            if len(last) == 1 and back + 1 >= least:
                break
        if not len(last):
            return []
        enough = last[last + most < self.size]
        behind = int(enough[-1] if len(enough) else last[0]) + 1
        following: list[int] = own[behind : behind + most].tolist()
        return following

    def first(self, most: int) -> list[int]:
        """Return the first tokens, at most `most`."""
        tokens: list[int] = self._tokens[: min(most, self.size)].tolist()
        return tokens


class Proposer:
    """Proposer of one row's drafts.

    Args:
        prediction: tokens that the answer is expected to be much like.

    Attributes:
        acceptance: what became of its drafts.
        idle: steps in which it was asked for one and had none since it had one.
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self.acceptance = Acceptance()
        self.idle = 0
        # Step until which it was noted that nothing was tried; 0: none.
        self._passed = 0
        # What was foreseen behind the row's first so many tokens.
        self._foreseen: tuple[int, Proposal] | None = None
        self._prediction = SearchedTokens(prediction) if prediction else None
        self._text: SearchedTokens | None = None

    def looks(self, step: int, seldom: int = SELDOM) -> bool:
        """Return whether a draft is to be looked for in a step: in one of `seldom`, where none has
        been found lately, and then in the same steps as for other rows. To look, the host must have
        read the row's last token before the step begins, which then can't be put together
        meanwhile."""
        return self.idle < PATIENCE or step % seldom == 0

    @property
    def rarely(self) -> int:
        """Return in one of how many steps a draft is to be looked for, where steps are queued
        ahead: a power of two that grows with each look in vain, so that rows are looked at in the
        same steps."""
        return int(min(2 << max(self.idle - PATIENCE, 0), LONGEST_APART))

    def pass_over(self, row: Row, step: int) -> None:
        """Note at a look, in so many-th a step, that no draft has been tried since the last one."""
        if self._passed:
            self.acceptance.pass_over(self.likeliest(row)[0], step - self._passed)
        self._passed = step

    def likeliest(self, row: Row) -> tuple[Method, float]:
        """Return the way in which the draft that is likeliest to be drawn could be found, and how
        likely that is."""
        methods: list[Method] = ["ngram"]
        if row.guide is not None:
            methods.append("grammar")
        if self._prediction is not None:
            methods.append("prediction")
        rates = self.acceptance.rates
        return max(((each, rates[each]) for each in methods), key=lambda each: each[1])

    def foresee(self, row: Row, most: int) -> Proposal | None:
        """Return at most `most` tokens that follow those of the row that the host knows; None if
        nothing tells them. Learn from what comes after them, which need not be tried for that. It
        counts as a look in vain until it turns out to be worth a try."""
        self.see(row)
        found = self.propose(row, most)
        if found is not None:
            self._foreseen = len(row.tokens), found
        self.idle += 1
        return found

    def see(self, row: Row) -> None:
        """Learn how many of the tokens that were foreseen are those that were drawn."""
        if self._foreseen is not None and len(row.tokens) > self._foreseen[0]:
            place, proposal = self._foreseen
            drawn = row.tokens[place : place + len(proposal.tokens)]
            right = 0
            for token, foreseen in zip(drawn, proposal.tokens, strict=False):
                if token != foreseen:
                    break
                right += 1
            self.acceptance.learn(proposal.method, len(drawn), right)
            self._foreseen = None

    def propose(self, row: Row, most: int) -> Proposal | None:
        """Return at most `most` tokens that the row may draw next, after those that the host knows;
        None if nothing tells them."""
        if row.guide is not None and (forced := row.guide.forced):
            return Proposal("grammar", forced[:most])
        found: tuple[Method, list[int]] = "prediction", self._predicted(row, most)
        if not found[1]:
            found = "ngram", self._repeated(row, most)
        method, tokens = found
        ends = [i for i, token in enumerate(tokens) if token in row.stop_ids]
        # Nothing follows an end, which need not be drafted to be drawn.
        tokens = tokens[: ends[0]] if ends else tokens
        return Proposal(method, tokens) if tokens else None

    def _predicted(self, row: Row, most: int) -> list[int]:
        if self._prediction is None:
            return []
        answer = row.tokens[max(row.prompt_length, len(row.tokens) - LONGEST_MATCH) :]
        if len(answer) < LEAST_IN_PREDICTION:
            first = self._prediction.first(most + len(answer))
            return first[len(answer) :] if first[: len(answer)] == answer else []
        return self._prediction.follow(answer, LEAST_IN_PREDICTION, most)

    def _repeated(self, row: Row, most: int) -> list[int]:
        if self._text is None:
            self._text = SearchedTokens(row.tokens)
        self._text.extend(row.tokens[self._text.size :])
        return self._text.follow(row.tokens[-LONGEST_MATCH:], LEAST_MATCH, most)

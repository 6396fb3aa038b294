"""Tokens that a row may draw next, as its answer goes on: grammars and thinking budgets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from mlx_manager.mlx_server.errors import GenerationFailed, InvalidParameter, MLXManagerError
from mlx_manager.mlx_server.formats import Region
from mlx_manager.mlx_server.text.grammar.matchers import (
    Mask,
    allows,
    allows_one,
    fill_masks,
    only,
    reason,
    with_tokens,
)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit of thinking: after `tokens` tokens of it, `end` is written for the model."""

    tokens: int
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """A row's grammar, and the part of the answer that it covers.

    matcher: at the beginning of the grammar; the row's own. texts: its vocabulary. end_ids: tokens
    that end an answer, which may not end before the grammar has begun. param: the field that asked
    for it.
    openers: tokens that may begin thinking in place of the grammar's first token. whole: the
    grammar covers the answer from its first token, and not from the end of the thinking on. free:
    nothing has to be said, so that the answer may end before the grammar has begun, and may think
    wherever it likes. unheld: names of requirements that answers are not held to.
    """

    matcher: LLMatcher
    texts: LLTokenizer
    end_ids: tuple[int, ...]
    param: str
    openers: tuple[int, ...] = ()
    whole: bool = False
    free: bool = False
    unheld: tuple[str, ...] = ()


class Guide:
    """Guide of one row: it keeps the mask of the row's next token.

    Attributes:
        mask: tokens that may be drawn next, None for any; `Masks` keeps it up to date.
        words: number of words in a mask.
        complete: nothing can follow; the row has what was asked for.
        failure: why the grammar can't be followed any further, if so.
    """

    def __init__(
        self, region: Region, rules: Rules | None, budget: ThinkingBudget | None, words: int
    ) -> None:
        self._rules = rules
        self._budget = budget
        self.words = words
        self._forced: deque[int] = deque()
        self._spent = False
        self._matched = 0
        self._begun = rules is not None and (rules.whole or region == "content")
        self.mask: Mask | None = None
        self.complete = False
        self.failure: MLXManagerError | None = None
        self._spend(region, 0)

    def observe(self, token: int, region: Region, thought: int, shown: str) -> None:
        """Take in a drawn token.

        Args:
            region: what the token after this one will be part of.
            thought: tokens of thinking so far.
            shown: what of this token is content.
        """
        if self._forced and token == self._forced[0]:
            self._forced.popleft()
        if self._rules is not None:
            self._follow(self._rules, token, region, shown)
        self._spend(region, thought)

    def _follow(self, rules: Rules, token: int, region: Region, shown: str) -> None:
        if self._begun:
            if token in self._openers(rules):
                self._begun = False
                return
            self._consume(rules, [token])
            self._check(rules)
        elif region == "content":
            self._begun = True
            # A marker that is no token of its own may share its last one with the content.
            if shown.strip():
                self._consume(rules, rules.texts.tokenize_str(shown))
                if rules.matcher.is_error():
                    self.failure = GenerationFailed(
                        f"The answer has begun with what `{rules.param}` has no room for: "
                        f"{reason(rules.matcher.get_error())}"
                    )

    def _consume(self, rules: Rules, tokens: Sequence[int]) -> None:
        self._matched += 1
        rules.matcher.consume_tokens(list(tokens))
        self.complete = rules.matcher.is_stopped()

    def _check(self, rules: Rules) -> None:
        """Fail the row if its matcher has failed. Only allowed tokens are drawn, so the matcher can
        fail only at a grammar that has become too much for it."""
        if rules.matcher.is_error():
            self.failure = InvalidParameter(
                f"`{rules.param}` can't be followed any further, as happens when what has been "
                f"written fits it in too many ways: {reason(rules.matcher.get_error())}",
                param=rules.param,
            )

    def _spend(self, region: Region, thought: int) -> None:
        budget = self._budget
        if budget is None or thought < budget.tokens:
            return
        self._spent = True
        if region == "reasoning" and not self._forced:
            self._forced.extend(budget.end)

    def foresee(self, drafts: Iterable[int]) -> Iterator[tuple[Mask | None]]:
        """Yield the mask after each of `drafts`, as long as these are allowed and those can be
        foreseen.

        A mask is right unless a draft changes the part of the answer that the next token is in.
        """
        if self._forced:
            for _, following in zip(drafts, islice(self._forced, 1, None), strict=False):
                yield (only(following, self.words),)
            return
        matcher = self.matching
        if matcher is None or self._rules is None:
            for _ in drafts:
                yield (self.mask,)
            return
        allowed, openers = self.mask, self._openers(self._rules)
        copy = matcher.deep_copy()
        for token in drafts:
            if token in openers or not (allowed is None or allows(allowed, token)):
                return
            copy.consume_tokens([token])
            if copy.is_error() or copy.is_stopped():
                return
            (allowed,) = fill_masks(None, [copy], self.words)
            if copy.is_error():
                return
            yield (allowed,)

    @property
    def forced(self) -> list[int]:
        """Return the tokens that can only follow now, as far as is known."""
        if self._forced:
            return list(self._forced)
        matcher = self.matching
        if matcher is None or self.mask is None or not allows_one(self.mask):
            return []
        return list(matcher.compute_ff_tokens())

    @property
    def rules(self) -> Rules | None:
        return self._rules

    @property
    def matching(self) -> LLMatcher | None:
        """Return the matcher that computes the next mask; None if none has to."""
        if self._forced or not self._begun or self._rules is None:
            return None
        return self._rules.matcher

    def set_mask(self, allowed: Mask | None) -> None:
        """Set the next mask from `allowed`, the mask of `matching`, whose matcher may have
        failed."""
        if self._rules is not None and self.matching is not None:
            # A matcher that failed allows an end, wherever the answer is.
            self._check(self._rules)
        if self._forced:
            self.mask = only(self._forced[0], self.words)
        elif self._rules is None or (allowed is None and self._rules.free):
            self.mask = None
        elif allowed is None:
            self.mask = _all_but(self._rules.end_ids, self.words)
        elif openers := self._openers(self._rules):
            self.mask = with_tokens(allowed, openers)
        else:
            self.mask = allowed

    def _openers(self, rules: Rules) -> tuple[int, ...]:
        """Return the tokens that may begin thinking now."""
        return () if self._matched or self._spent else rules.openers


def _all_but(ids: Iterable[int], words: int) -> Mask:
    return ~with_tokens(np.zeros(words, np.int32), ids)


class Masks:
    """Executor that computes the masks of several rows in parallel."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def update(self, guides: Sequence[Guide]) -> None:
        """Set the mask of each guide, all of one model."""
        matching = [(guide, guide.matching) for guide in guides]
        found = [matcher for _, matcher in matching if matcher is not None]
        if len(found) > 1 and self._executor is None:
            self._executor = LLExecutor()
        allowed = iter(fill_masks(self._executor, found, guides[0].words) if found else ())
        for guide, matcher in matching:
            guide.set_mask(None if matcher is None else next(allowed))

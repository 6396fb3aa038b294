"""Speculation of an engine: which rows bring drafts to a step, and how long ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from mlx_manager.mlx_server.engine.scheduler.cost import Cost
from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.scheduler.pace import STRETCH
from mlx_manager.mlx_server.engine.sequence import Sequence as Row
from mlx_manager.mlx_server.engine.speculation.acceptance import Acceptance
from mlx_manager.mlx_server.engine.speculation.draft import Proposal
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer

# Drafts must give at least so many times the tokens that the batch would draw in the seconds that
# they take, since acceptance and prices are estimates.
WORTH = 1.2
# And where rows share a step, it may take so many times what it takes without drafts, as one with
# prompts may (`pace.STRETCH`): rows that bring none wait for those that do.
SLOWER = STRETCH
# One step in so many brings no drafts, to learn what rows take without.
PLAIN = 48
# Seconds, as parts of a plain step's, before they are known: of a step with drafts at all, of each
# draft, and of each of its tokens, which costs as much as a row where there are so many more.
STEP, DRAFT, LIKE_ROWS = 1 / 16, 1 / 48, 12
# Drafts and tokens of steps that are taken to have been seen when learning begins, or one slow step
# would end all trying.
PRESUMED = ((1, 1), (1, 8), (2, 4), (4, 32))
# Steps after which prices by which nothing pays are forgotten.
FORGOTTEN = 128
DRAFTS, TOKENS = 4, 8

Able = list[tuple[Row, Proposer]]
"""Rows that may bring drafts."""


class Speculation:
    """Chooser of drafts, by what they bring: the tokens a second of the step with and without.

    Args:
        longest: most tokens of a draft.
        most: most tokens of a step, besides those of rows.
        plain: returns the seconds of a step of so many rows without drafts; 0: unknown.
        always: drafts are tried whatever they bring.
    """

    def __init__(
        self, longest: int, most: int, plain: Callable[[int], float], *, always: bool
    ) -> None:
        self._longest = longest
        self._most = most
        self._plain = plain
        self._always = always
        # Seconds of drafts, of each of them and of each token, by rows as a power of two.
        self._prices: dict[int, Cost] = {}
        self._since_plain = 0
        self._without = 0
        self._steps = 0

    def is_likely(self, rows: Sequence[Row]) -> bool:
        """Return whether one of the running rows may bring a draft to the next step, for which all
        its tokens must be known."""
        able = _able(rows)
        if not able or self._always:
            return bool(able)
        plan = self._plan(len(rows))
        if not plan.bears(self._longest):
            return False
        rates = [
            proposer.likeliest(row)[1] for row, proposer in able if proposer.looks(self._steps)
        ]
        return any(plan.lengths((rate, self._longest) for rate in rates))

    def choose(
        self, rows: Sequence[Row], load: StepLoad, most: int
    ) -> Iterable[tuple[Row, Proposal]]:
        """Return the rows that had best bring a draft to a step of this load, and their drafts, at
        most `most` tokens in all."""
        self._steps += 1
        able = _able(rows)
        if not able:
            return ()
        most = min(most, self._most - load.tokens)
        if self._always:
            return list(_within(self._found(able), most))
        plan = self._plan(load.rows)
        if not plan.bears(self._longest) or self._since_plain >= PLAIN:
            self._since_plain = 0
            self._forget(load.rows)
            return ()
        return list(_within(self._worthwhile(able, plan), most))

    def observe(self, seconds: float, load: StepLoad) -> None:
        """Learn that a step of `load`, with drafts, took `seconds`."""
        plain = self._plain(load.rows)
        if plain > 0 and not load.tokens:
            amounts = _amounts(load.drafting, load.drafts)
            self._price(load.rows, plain).learn(amounts, max(seconds - plain, plain * DRAFT))

    def _found(self, able: Able) -> list[tuple[Row, Proposal]]:
        """Return the rows that have a draft."""
        found = []
        for row, proposer in able:
            longest = min(self._longest, row.limit - row.drawn - 1)
            known = not row.pending and row.outcome is None
            proposal = proposer.propose(row, longest) if known and longest > 0 else None
            proposer.idle = 0 if proposal is not None else proposer.idle + 1
            if proposal is not None:
                found.append((row, proposal))
            elif not known:
                proposer.acceptance.pass_over(proposer.likeliest(row)[0])
        return found

    def _worthwhile(self, able: Able, plan: _Plan) -> list[tuple[Row, Proposal]]:
        """Return the rows that have a draft which is worth it, and as much of it as is."""
        found = []
        for row, proposal in self._found(able):
            assert row.proposer is not None
            found.append((row.proposer.acceptance.rates[proposal.method], row, proposal))
        found.sort(key=lambda each: -each[0])
        lengths = plan.lengths((rate, len(each.tokens)) for rate, _, each in found)
        chosen = []
        for length, (_, row, proposal) in zip(lengths, found, strict=True):
            if length:
                chosen.append((row, Proposal(proposal.method, proposal.tokens[:length])))
            elif row.proposer is not None:
                row.proposer.acceptance.pass_over(proposal.method)
        self._since_plain = self._since_plain + 1 if chosen else 0
        return chosen

    def _plan(self, rows: int) -> _Plan:
        """Return the plan of a step of so many rows, which brings no draft yet."""
        plain = self._plain(rows)
        most = plain * SLOWER if rows > 1 else inf
        if not plain:
            return _Plan(rows, 0.0, 0.0, 0.0, 0.0, most)
        step, draft, token = self._price(rows, plain).prices
        return _Plan(rows, plain, step, draft / DRAFTS, token / TOKENS, most)

    def _price(self, rows: int, plain: float) -> Cost:
        known = self._prices.get(rows.bit_length())
        if known is not None:
            return known
        cost = self._prices[rows.bit_length()] = Cost(3)
        cost.learn_all(
            (
                _amounts(drafts, tokens),
                plain * (STEP + drafts * DRAFT + tokens / (rows + LIKE_ROWS)),
            )
            for drafts, tokens in PRESUMED
        )
        return cost

    def _forget(self, rows: int) -> None:
        """Count a step without drafts, and forget prices by which there were none for long."""
        self._without += 1
        if self._without >= FORGOTTEN:
            self._without = 0
            self._prices.pop(rows.bit_length(), None)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step without drafts, and what drafts cost.

    tokens: those that it gives. seconds: those that it takes. step: seconds more with drafts at
    all. draft: of each row's draft. token: of each token of it. most: most seconds.
    """

    tokens: int
    seconds: float
    step: float
    draft: float
    token: float
    most: float

    def bears(self, longest: int) -> bool:
        """Return whether a draft that is sure to be drawn would be worth it: not in a crowd."""
        return self.seconds > 0 and self._length(1.0, longest, inf) > 0

    def lengths(self, drafts: Iterable[tuple[float, int]]) -> list[int]:
        """Return how many tokens of each draft had best be tried, 0 for none.

        drafts: how likely each token is to be drawn, and how many there are.
        """
        left, given, taken = self.most - self.seconds - self.step, 0.0, self.step
        found = []
        for rate, tokens in drafts:
            length = self._length(rate, tokens, left)
            found.append(length)
            if length:
                own = self.draft + length * self.token
                left, taken = left - own, taken + own
                given += Acceptance.tokens(rate, length)
        pays = given >= WORTH * taken * self.tokens / self.seconds
        return found if pays else [0] * len(found)

    def _length(self, rate: float, most: int, left: float) -> int:
        """Return how many tokens of a draft give the most tokens a second, besides others, in
        `left` seconds at most."""
        pace = self.tokens / self.seconds
        best, length = pace, 0
        for count in range(1, most + 1):
            own = self.draft + count * self.token
            if own > left:
                break
            given = Acceptance.tokens(rate, count)
            speed = (self.tokens + given) / (self.seconds + own)
            if speed > best and given >= WORTH * own * pace:
                best, length = speed, count
        return length


def _able(rows: Sequence[Row]) -> Able:
    return [(row, row.proposer) for row in rows if row.proposer is not None]


def _amounts(drafts: int, tokens: int) -> tuple[float, float, float]:
    return 1.0, drafts / DRAFTS, tokens / TOKENS


def _within(found: Iterable[tuple[Row, Proposal]], most: int) -> Iterator[tuple[Row, Proposal]]:
    """Yield drafts, cut so that they have at most `most` tokens in all."""
    for row, proposal in found:
        tokens = proposal.tokens[: max(most, 0)]
        most -= len(tokens)
        if tokens:
            yield row, Proposal(proposal.method, tokens)

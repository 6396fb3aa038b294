"""Speculation of an engine: which rows bring drafts to a step, and how long ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.engine.scheduler.cost import Cost
from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.scheduler.pace import STRETCH
from mlx_manager.mlx_server.engine.sequence import Sequence as Row
from mlx_manager.mlx_server.engine.speculation.acceptance import Acceptance
from mlx_manager.mlx_server.engine.speculation.draft import Proposal
from mlx_manager.mlx_server.engine.speculation.draft_model import DraftModel
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.execution.forward import Forward

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
# A draft model reads what a row has so far if that takes at most this part of the seconds of what
# the row may still draw, of which so many tokens count.
CATCHING_UP, TO_COME = 0.25, 512
# Steps until a draft model, whose guesses did not pay, guesses again for one row, at first and at
# most, and the tokens that it guesses then: enough to tell, too few to be felt.
WAIT, LONGEST_WAIT, PROBE = 32, 1024, 4
# Fewest tokens that it reads in a step.
FEWEST = 16

Able = list[tuple[Row, Proposer]]
"""Rows that may bring drafts."""

Room = Callable[[Row, int], int]
"""Function that gives a row pages for so many tokens beyond its next one, where there are some, and
returns for how many of them it has pages."""


class Speculation:
    """Chooser of drafts, by what they bring: the tokens a second of the step with and without.

    Args:
        longest: most tokens of a draft.
        most: most tokens of a step, besides those of rows.
        plain: returns the seconds of a step of so many rows without drafts; 0: unknown.
        always: drafts are tried whatever they bring.
        model: guesses for rows that nothing else is found for; None: there is no such model.
    """

    def __init__(
        self,
        longest: int,
        most: int,
        plain: Callable[[int], float],
        *,
        always: bool,
        model: DraftModel | None = None,
    ) -> None:
        self._longest = longest
        self._most = most
        self._plain = plain
        self._always = always
        self._model = model
        # Steps since the draft model has guessed, and until it does so again if it does not pay.
        self._rested, self._wait = 0, WAIT
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
        if any(plan.lengths((rate, self._longest) for rate in rates)):
            return True
        return self._probes or bool(self._guessable(able, plan)[1])

    def choose(
        self, rows: Sequence[Row], load: StepLoad, most: int, room: Room
    ) -> Iterable[tuple[Row, Proposal]]:
        """Return the rows that had best bring a draft to a step of this load, and their drafts, at
        most `most` tokens in all."""
        self._steps += 1
        able = _able(rows)
        if not able:
            return ()
        most = min(most, self._most - load.tokens)
        if self._always:
            found = list(_within(self._found(able), most))
            return found + self._guessed(_others(able, found), None, _left(most, found), room)
        plan = self._plan(load.rows)
        if not plan.bears(self._longest) or self._since_plain >= PLAIN:
            self._since_plain = 0
            self._forget(load.rows)
            return ()
        found = list(_within(self._worthwhile(able, plan), most))
        if self._model is not None:
            rates = ((_rate(row, each), len(each.tokens)) for row, each in found)
            after, others = plan.after(rates), _others(able, found)
            found += self._guessed(others, after, _left(most, found), room)
        self._since_plain = self._since_plain + 1 if found else 0
        return found

    def take_seconds(self) -> float:
        """Return the seconds in which the draft model has worked since the last call."""
        return 0.0 if self._model is None else self._model.take_seconds()

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
            found.append((_rate(row, proposal), row, proposal))
        found.sort(key=lambda each: -each[0])
        lengths = plan.lengths((rate, len(each.tokens)) for rate, _, each in found)
        chosen = []
        for length, (_, row, proposal) in zip(lengths, found, strict=True):
            if length:
                chosen.append((row, Proposal(proposal.method, proposal.tokens[:length])))
            elif row.proposer is not None:
                row.proposer.acceptance.pass_over(proposal.method)
        return chosen

    # -- a draft model -------------------------------------------------------------------------

    def _guessable(self, able: Able, plan: _Plan) -> tuple[list[Row], int]:
        """Return the rows for which a draft model had best guess, and how many tokens; none, 0
        where that is not worth it."""
        model = self._model
        if model is None or not plan.seconds:
            return [], 0
        rates = []
        for row, proposer in able:
            unread = len(row.tokens) - max(row.drafted, row.adopted)
            if self._may_guess(row) and self._affords(model, row, unread):
                known = proposer.acceptance.modelled
                rates.append((model.usual if known is None else known, row))
        rates.sort(key=lambda each: -each[0])
        plain = self._plain(1) or plan.seconds

        def run(rows: int) -> float:
            return model.seconds(plain, rows)

        count, length = plan.guesses([rate for rate, _ in rates], run, self._longest)
        return [row for _, row in rates[:count]], length

    @property
    def _probes(self) -> bool:
        """Return whether a draft model whose guesses have not paid for long is to guess again."""
        return self._model is not None and self._rested >= self._wait

    def _probed(self, able: Able, plan: _Plan) -> tuple[list[Row], int]:
        """Return what `_guessable` does, or one row now and then where it is none."""
        rows, length = self._guessable(able, plan)
        able = [(row, each) for row, each in able if self._may_guess(row)]
        if rows:
            self._rested, self._wait = 0, WAIT
        elif self._probes and able and self._model is not None:
            self._rested, self._wait = 0, min(2 * self._wait, LONGEST_WAIT)
            rows = [min((row for row, _ in able), key=self._model.behind)]
            length = min(PROBE, self._longest)
        else:
            self._rested += 1
        for row, proposer in able:
            if row not in rows and self._model is not None:
                proposer.acceptance.pass_over_model(self._model.usual)
        return rows, length

    def _may_guess(self, row: Row) -> bool:
        model = self._model
        return model is not None and model.takes(row, self._longest) and row.limit - row.drawn > 1

    def _affords(self, model: DraftModel, row: Row, unread: int) -> bool:
        """Return whether a row still draws so many tokens that the draft model had best read so
        many for it."""
        plain = self._plain(1)
        to_come = min(row.limit - row.drawn, TO_COME)
        return unread * _reading(model, plain) <= CATCHING_UP * plain * to_come

    def _guessed(
        self, able: Able, plan: _Plan | None, most: int, room: Room
    ) -> list[tuple[Row, Proposal]]:
        """Return the rows for which the draft model has guessed, and their drafts, at most `most`
        tokens. plan: of the step so far; None: guess whatever it brings."""
        model = self._model
        able = [(row, each) for row, each in able if not row.pending and row.outcome is None]
        if model is None or not able or most < 1:
            return []
        if plan is None:
            rows, length = [row for row, _ in able if self._may_guess(row)], self._longest
        else:
            rows, length = self._probed(able, plan)
        if not rows:
            return []
        ready = self._caught_up(model, rows, plan)
        wanted = []
        for row in ready:
            count = min(length, row.limit - row.drawn - 1, most)
            count = room(row, count) if count > 0 else 0
            if count > 0:
                wanted.append((row, count))
                most -= count
        guesses = model.guess(wanted) if wanted else []
        found = []
        for (row, _), tokens in zip(wanted, guesses, strict=True):
            if row.proposer is not None and tokens:
                row.proposer.acceptance.begin(model.usual)
                model.learn(row.proposer.acceptance.rates["draft_model"])
                found.append((row, Proposal("draft_model", tokens)))
        return found

    def _caught_up(self, model: DraftModel, rows: Sequence[Row], plan: _Plan | None) -> list[Row]:
        """Return the rows whose tokens the draft model has read, but for a few. It reads some of
        the others', as many as a step has room for."""
        left, token = self._most, _reading(model, self._plain(1))
        if plan is not None and plan.rows > 1 and token:
            # Rows that share the step wait for it.
            left = min(left, max(FEWEST, int((plan.most - plan.seconds) / token)))
        ready, reads = [], []
        for row in rows:
            behind = model.behind(row)
            if behind <= self._longest + 1:
                ready.append(row)
            elif plan is None or self._affords(model, row, behind):
                tokens = min(behind - 1, left)
                left -= tokens
                if tokens:
                    reads.append((row, tokens))
                if tokens == behind - 1:
                    ready.append(row)
        if reads:
            model.read(reads)
        return ready

    def _plan(self, rows: int) -> _Plan:
        """Return the plan of a step of so many rows, which brings no draft yet."""
        plain = self._plain(rows)
        most = plain * SLOWER if rows > 1 else inf
        if not plain:
            return _Plan(rows, rows, 0.0, 0.0, 0.0, 0.0, most)
        step, draft, token = self._price(rows, plain).prices
        return _Plan(rows, rows, plain, step, draft / DRAFTS, token / TOKENS, most)

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
            if self._model is not None:
                self._model.forget_prices()


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step, and what drafts cost.

    rows: those of the step. tokens: those that it gives. seconds: those that it takes. step:
    seconds more with drafts at all. draft: of each row's draft. token: of each token of it. most:
    most seconds.
    """

    rows: int
    tokens: float
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

    def after(self, drafts: Iterable[tuple[float, int]]) -> _Plan:
        """Return the plan of the step with these drafts, as `lengths` is given them."""
        given, taken = 0.0, 0.0
        for rate, length in drafts:
            given += Acceptance.tokens(rate, length)
            taken += self.draft + length * self.token
        if not taken:
            return self
        seconds = self.seconds + self.step + taken
        return replace(self, tokens=self.tokens + given, seconds=seconds, step=0.0)

    def guesses(
        self, rates: Sequence[float], run: Callable[[int], float], longest: int
    ) -> tuple[int, int]:
        """Return for how many rows a draft model had best guess, and how many tokens for each; 0, 0
        where that is not worth it.

        rates: how likely the rows are to draw a guessed token, the likeliest first. run: returns
        the seconds in which the model guesses a token for each of so many rows.
        """
        pace = self.tokens / self.seconds
        best, found, rows = pace, (0, 0), len(rates)
        while rows:
            for length in range(1, longest + 1):
                own = self.step + length * run(rows) + rows * (self.draft + length * self.token)
                if self.seconds + own > self.most:
                    break
                given = sum(Acceptance.tokens(rate, length) for rate in rates[:rows])
                speed = (self.tokens + given) / (self.seconds + own)
                if speed > best and given >= WORTH * own * pace:
                    best, found = speed, (rows, length)
            rows //= 2
        return found

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


def objection(limits: EngineLimits, forward: Forward, *, looks_ahead: bool) -> str | None:
    """Return why rows bring no drafts; None if they may.

    They bring none where the next step is queued before the tokens are read that a draft follows,
    and where recurrent layers would have to go back.
    """
    if limits.speculation == "off":
        return "speculation is off"
    if looks_ahead:
        return "steps are queued ahead"
    return None if forward.prefixes == "pages" else "its state is not all on pages"


def _able(rows: Sequence[Row]) -> Able:
    return [(row, row.proposer) for row in rows if row.proposer is not None]


def _rate(row: Row, proposal: Proposal) -> float:
    """Return how likely the row is to draw each token of a proposal."""
    assert row.proposer is not None
    return row.proposer.acceptance.rates[proposal.method]


def _reading(model: DraftModel, plain: float) -> float:
    """Return the seconds in which a draft model reads a token of many; 0: unknown. plain: of a step
    of one row of the model."""
    return model.seconds(plain, 0, 1000) / 1000 if plain else 0.0


def _others(able: Able, found: Sequence[tuple[Row, Proposal]]) -> Able:
    """Return the rows that have no draft yet."""
    keys = {row.key for row, _ in found}
    return [each for each in able if each[0].key not in keys]


def _left(most: int, found: Sequence[tuple[Row, Proposal]]) -> int:
    return most - sum(len(proposal.tokens) for _, proposal in found)


def _amounts(drafts: int, tokens: int) -> tuple[float, float, float]:
    return 1.0, drafts / DRAFTS, tokens / TOKENS


def _within(found: Iterable[tuple[Row, Proposal]], most: int) -> Iterator[tuple[Row, Proposal]]:
    """Yield drafts, cut so that they have at most `most` tokens in all."""
    for row, proposal in found:
        tokens = proposal.tokens[: max(most, 0)]
        most -= len(tokens)
        if tokens:
            yield row, Proposal(proposal.method, tokens)

"""Speculation of an engine: which rows bring drafts to a step, and how long ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.engine.scheduler.cost import Cost
from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.scheduler.pace import STRETCH
from mlx_manager.mlx_server.engine.sequence import Sequence as Row
from mlx_manager.mlx_server.engine.speculation.acceptance import Acceptance
from mlx_manager.mlx_server.engine.speculation.draft import Proposal
from mlx_manager.mlx_server.engine.speculation.draft_model import DraftModel
from mlx_manager.mlx_server.engine.speculation.proposers import SELDOM, Proposer
from mlx_manager.mlx_server.execution.forward import Forward

# Drafts must give at least so many times the tokens that the batch would draw in the seconds that
# they take, since acceptance and prices are estimates.
WORTH = 1.2
# And where rows share a step, it may take so many times what it takes without drafts, as one with
# prompts may (`pace.STRETCH`): rows that bring none wait for those that do.
SLOWER = STRETCH
# The same where steps are queued ahead: they are short, and so few rows bring drafts that nobody
# waits for long. This is the gap that readers of running streams are promised at most.
SLOWER_AHEAD = 4.0
# Most rows of a step with drafts where steps are queued ahead, and where rows keep copies of states
# for them. With the first, more rows are no longer next to free, and what the host has to do for
# their drafts, it does while the device waits.
FEW = 8
# One step in so many brings no drafts, to learn what rows take without.
PLAIN = 48
# Seconds, as parts of a plain step's, before they are known: of a step with drafts at all, of each
# draft, and of each of its tokens, which costs as much as a row where there are so many more.
STEP, DRAFT, LIKE_ROWS = 1 / 16, 1 / 48, 12
# Drafts and tokens of steps that are taken to have been seen when learning begins, or one slow step
# would end all trying.
PRESUMED = ((1, 1), (1, 8), (2, 4), (4, 32))
# The same where steps are queued ahead. A step with drafts is not, and is put together while the
# device waits; it is large enough for more tokens to cost it little.
STEP_AHEAD, LIKE_ROWS_AHEAD = 1 / 2, 128
# Part of a plain step's seconds that a step takes more if it is not queued ahead, before it is
# known, and the weight of each such step in the moving average.
LATE, LATE_LEARNT = 1 / 4, 0.1
# Most of a plain step's seconds that rows lose on average by looking for drafts that can't be
# foreseen and are not there.
LOST = 1 / 50
# First steps with drafts whose least seconds are what learning begins with, where steps are queued
# ahead.
FIRST = 3
# Steps that nothing is learnt from, since their kind is not compiled yet, and how many more each
# step makes whose kind is. There are some thirty kinds, with three such steps each; if new ones
# came again and again, what they take would be a part of the price.
FRESH, EARNED = 96, 1 / 16
# A price, found by least squares of shares, is hardly moved by the few steps that take many times
# as long, which are most of what is lost if they come again and again. So the sums of seconds are
# compared with those of prices, each step weighing so many times the one after it, and as no more
# than so many times its price: a step that is compiled only once ends no trying.
SUMMED, OUTLIER = 0.95, 8.0
# Steps, as a power of two, until prices by which nothing pays are looked at again, where steps are
# queued ahead.
UNLOOKED = 16
# Steps after which prices by which nothing pays are forgotten, at first and at most.
FORGOTTEN, LONGEST_FORGOTTEN = 128, 4096
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
        ahead: whether a step is queued before the last one's tokens are read, unless it may have
            drafts: what that costs is a part of their price.
        sees_again: whether a row whose draft is not drawn to its end has to see again what it has
            drawn: that, too, is a part of the price.
        model: guesses for rows that nothing else is found for; None: there is no such model.
    """

    def __init__(
        self,
        longest: int,
        most: int,
        plain: Callable[[int], float],
        *,
        always: bool,
        ahead: bool = False,
        sees_again: bool = False,
        model: DraftModel | None = None,
    ) -> None:
        self._longest = longest
        self._most = most
        self._plain = plain
        self._always = always
        self._ahead = ahead
        self._sees_again = sees_again
        self._model = model
        # Steps since the draft model has guessed, and until it does so again if it does not pay.
        self._rested, self._wait = 0, WAIT
        # Seconds of drafts, of each of them and of each token, by rows as a power of two.
        self._prices: dict[int, Cost] = {}
        # Steps of new kinds that nothing is learnt from, and by rows, what the first ones of others
        # took of their price.
        self._fresh: float = FRESH
        self._first: defaultdict[int, list[float]] = defaultdict(list)
        # Seconds that steps took more for their drafts, and those that their prices said.
        self._sums: dict[int, tuple[float, float]] = {}
        # Seconds that a step without drafts takes more if it is not queued ahead.
        self._late: dict[int, float] = {}
        # Whether the last step has drafts, and steps to come that have none.
        self._tried, self._rests = False, 0
        self._since_plain = 0
        self._without, self._forgotten = 0, FORGOTTEN
        self._steps = 0
        # Whether a draft is waited for: if not, no row that goes on brings one to the next step.
        self._awaited = True
        # Whether nothing would have paid when that was looked at last, though there was something.
        self._poor = False
        # Rows of a step that bore no drafts when that was looked at last.
        self._unbearable = 0

    def is_likely(self, rows: Sequence[Row], *, prompts: bool = False) -> bool:
        """Return whether one of the running rows may bring a draft to the next step, for which all
        its tokens must be known. prompts: whether there are prompts under way."""
        if self._ahead and not self._always:
            # A step with a prompt takes long to put together, which is done while the device works.
            self._awaited = not prompts and not self._rests and self._is_foreseen(rows)
            return self._awaited
        able = _able(rows)
        if not able or self._always:
            return bool(able)
        if self._sees_again and len(rows) > FEW:
            return False
        plan = self._plan(len(rows))
        if self._rests or not plan.bears(self._longest, len(able)):
            return False
        if any(plan.lengths(self._expected(able))):
            return True
        return self._probes or bool(self._guessable(able, plan)[1])

    def _is_foreseen(self, rows: Sequence[Row]) -> bool:
        """Return whether a draft is worth waiting for, where steps are queued ahead. Whatever is
        looked at costs each step something: first how many rows there are, then which of them are
        to be looked at now, and only then prices and texts."""
        if len(rows) > FEW:
            return False
        if self._unbearable == len(rows) and self._steps % UNLOOKED:
            return False
        able = _able(rows)
        looked = [(row, each) for row, each in able if each.looks(self._steps, _apart(row, each))]
        if not looked and (self._model is None or not able):
            return False
        plan = self._plan(len(rows))
        self._poor = not plan.bears(self._longest, len(able))
        self._unbearable = len(rows) if self._poor else 0
        if self._poor:
            return False
        found = self._foreseen(looked, plan)
        lengths = plan.lengths((rate, tokens) for rate, tokens, _ in found)
        for (_, _, row), length in zip(found, lengths, strict=True):
            # Poor drafts are looked for as seldom as none, and learnt from as a whole then.
            if length and row.guide is None and row.proposer is not None:
                row.proposer.idle = 0
        self._poor = bool(found) and not any(lengths)
        return any(lengths) or self._probes or bool(self._guessable(able, plan)[1])

    def _expected(self, able: Able) -> list[tuple[float, int]]:
        """Return the drafts that rows may bring, as `_Plan.lengths` takes them."""
        return [
            (proposer.likeliest(row)[1], self._longest)
            for row, proposer in able
            if proposer.looks(self._steps)
        ]

    def _foreseen(self, able: Able, plan: _Plan) -> list[tuple[float, int, Row]]:
        """Return the drafts that rows will bring if they draw next what they are expected to, the
        likeliest first: to look costs the host little while the device is busy, but to wait for it,
        much. What a grammar allows is not known before."""
        lost = self._lost(plan.rows, plan.seconds) / (LOST * plan.seconds)
        seldom = SELDOM * max(ceil(lost / SELDOM), 1)
        drafts = []
        for row, proposer in able:
            left = min(self._longest, row.limit - row.drawn - 1)
            if row.outcome is not None or left < 1 or row.due > self._longest:
                continue
            proposer.pass_over(row, self._steps)
            if row.guide is not None:
                if proposer.looks(self._steps, seldom):
                    drafts.append((proposer.likeliest(row)[1], left, row))
                continue
            proposal = proposer.foresee(row, left + row.pending)
            tokens = 0 if proposal is None else len(proposal.tokens) - row.pending
            if proposal is not None and tokens > 0:
                drafts.append((_rate(row, proposal), tokens, row))
        return sorted(drafts, key=lambda each: each[:2], reverse=True)

    def choose(
        self, rows: Sequence[Row], load: StepLoad, most: int, room: Room
    ) -> Iterable[tuple[Row, Proposal]]:
        """Return the rows that had best bring a draft to a step of this load, and their drafts, at
        most `most` tokens in all."""
        self._steps += 1
        if not self._always and not self._suits(load):
            self._tried = False
            return ()
        waited = self._awaited or not all(row.pending for row in rows)
        if self._ahead and not self._always and not waited:
            self._rested += 1
            self._rest(load.rows)
            return ()
        able = _able(rows)
        if not able:
            return ()
        most = min(most, self._most - load.tokens)
        if self._always:
            found = list(_within(self._found(able), most))
            return found + self._guessed(_others(able, found), None, _left(most, found), room)
        plan = self._plan(load.rows)
        if self._rests or self._since_plain >= PLAIN or not plan.bears(self._longest, len(able)):
            self._rest(load.rows)
            return ()
        found = list(_within(self._worthwhile(able, plan), most))
        if self._model is not None:
            rates = ((_rate(row, each), len(each.tokens)) for row, each in found)
            after, others = plan.after(rates), _others(able, found)
            found += self._guessed(others, after, _left(most, found), room)
        self._since_plain = self._since_plain + 1 if found else 0
        self._tried = bool(found)
        return found

    def _suits(self, load: StepLoad) -> bool:
        """Return whether a step of this load may have drafts."""
        if self._ahead and load.tokens:
            return False
        return load.rows <= FEW or not (self._ahead or self._sees_again)

    def _rest(self, rows: int) -> None:
        """Let a step have no drafts. What a step takes that is queued ahead shows in the second of
        two."""
        if self._rests:
            self._rests -= 1
        elif self._since_plain >= PLAIN:
            self._rests, self._forgotten = int(self._ahead), FORGOTTEN
        elif self._poor or not self._ahead:
            self._forget(rows)
        self._since_plain, self._tried = 0, False

    def take_seconds(self) -> float:
        """Return the seconds in which the draft model has worked since the last call."""
        return 0.0 if self._model is None else self._model.take_seconds()

    def observe(self, seconds: float, load: StepLoad) -> bool:
        """Learn that a step of `load` took `seconds`, if that is due to drafts; return whether it
        is."""
        if not load.drafts and not (load.late and self._ahead):
            return False
        plain, kind = self._plain(load.rows), load.rows.bit_length()
        known = plain > 0 and not load.tokens
        if load.drafts:
            if known:
                self._learn(load, plain, max(seconds - plain, plain * DRAFT))
            return True
        if not known:
            return False
        before = self._lost(load.rows, plain)
        self._late[kind] = before + LATE_LEARNT * (max(seconds - plain, 0.0) - before)
        return True

    def _learn(self, load: StepLoad, plain: float, more: float) -> None:
        """Learn that drafts took so many seconds more than a step without, which is `plain`."""
        amounts, kind = _amounts(load.drafting, load.drafts), load.rows.bit_length()
        price = self._price(load.rows, plain)
        if self._ahead:
            if load.fresh and self._fresh >= 1:
                self._fresh -= 1
                return
            if not load.fresh:
                self._fresh = min(self._fresh + EARNED, FRESH)
            first = self._first[kind]
            if len(first) < FIRST:
                first.append(more / price.of(amounts))
                if len(first) < FIRST:
                    return
                price = self._prices[kind] = self._presumed(load.rows, plain * min(first))
        price.learn(amounts, more)
        if self._ahead:
            told = price.of(amounts)
            before = self._sums.get(kind, (plain, plain))
            counted = min(more, OUTLIER * told) if told else more
            self._sums[kind] = SUMMED * before[0] + counted, SUMMED * before[1] + told

    def _times(self, rows: int) -> float:
        """Return how many times their prices drafts take in sum; at least 1."""
        taken, told = self._sums.get(rows.bit_length(), (1.0, 1.0))
        return max(taken / told, 1.0)

    def _lost(self, rows: int, plain: float) -> float:
        """Return the seconds that a step of so many rows takes more if it is not queued ahead."""
        return self._late.get(rows.bit_length(), LATE * plain)

    def _found(self, able: Able) -> list[tuple[Row, Proposal]]:
        """Return the rows that have a draft."""
        found = []
        for row, proposer in able:
            longest = min(self._longest, row.limit - row.drawn - 1)
            if row.pending or row.outcome is not None:
                if not self._ahead:
                    proposer.acceptance.pass_over(proposer.likeliest(row)[0])
                continue
            proposer.see(row)
            # What a row has to see again would grow with each draft that is not drawn to its end.
            tries = longest > 0 and row.due <= self._longest
            proposal = proposer.propose(row, longest) if tries else None
            proposer.idle = 0 if proposal is not None else proposer.idle + 1
            if proposal is not None:
                found.append((row, proposal))
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
                proposer.acceptance.pass_over_model(self._model.method, self._model.usual)
        return rows, length

    def _may_guess(self, row: Row) -> bool:
        model = self._model
        if model is None or row.due > self._longest:
            return False
        return model.takes(row, self._longest) and row.limit - row.drawn > 1

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
                row.proposer.acceptance.begin(model.method, model.usual)
                model.learn(row.proposer.acceptance.rates[model.method])
                found.append((row, Proposal(model.method, tokens)))
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
        slower = SLOWER_AHEAD if self._ahead else SLOWER
        most = plain * slower if rows > 1 else inf
        if not plain:
            return _Plan(rows, rows, 0.0, 0.0, 0.0, 0.0, most, self._sees_again)
        times = self._times(rows)
        step, draft, token = (times * price for price in self._price(rows, plain).prices)
        if self._ahead and not self._tried:
            # The step after the last one with drafts will not be queued ahead either.
            step += self._lost(rows, plain)
        prices = (step, draft / DRAFTS, token / TOKENS)
        return _Plan(rows, rows, plain, *prices, most, self._sees_again)

    def _price(self, rows: int, plain: float) -> Cost:
        known = self._prices.get(rows.bit_length())
        if known is None:
            known = self._prices[rows.bit_length()] = self._presumed(rows, plain)
        return known

    def _presumed(self, rows: int, plain: float) -> Cost:
        cost = Cost(3)
        step = STEP_AHEAD if self._ahead else STEP
        like = LIKE_ROWS_AHEAD if self._ahead else LIKE_ROWS
        cost.learn_all(
            (
                _amounts(drafts, tokens),
                plain * (step + drafts * DRAFT + tokens / (rows + like)),
            )
            for drafts, tokens in PRESUMED
        )
        return cost

    def _forget(self, rows: int) -> None:
        """Count a step without drafts, and forget prices by which there were none for long. If they
        have not paid by the next ones either, those are kept for longer."""
        self._without += 1
        if self._without >= self._forgotten:
            self._without, self._forgotten = 0, min(2 * self._forgotten, LONGEST_FORGOTTEN)
            kind = rows.bit_length()
            self._prices.pop(kind, None)
            self._first.pop(kind, None)
            self._sums.pop(kind, None)
            self._unbearable = 0
            if self._model is not None:
                self._model.forget_prices()


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step, and what drafts cost.

    rows: those of the step. tokens: those that it gives. seconds: those that it takes. step:
    seconds more with drafts at all. draft: of each row's draft. token: of each token of it. most:
    most seconds. sees_again: see `Speculation`.
    """

    rows: int
    tokens: float
    seconds: float
    step: float
    draft: float
    token: float
    most: float
    sees_again: bool = False

    def bears(self, longest: int, rows: int) -> bool:
        """Return whether drafts of so many rows would be worth it if all were sure to be drawn: not
        in a crowd, nor where steps are too short."""
        length = self._length(1.0, longest, inf) if self.seconds > 0 else 0
        if not length:
            return False
        own = self._own(1.0, length)
        count = min(rows, max(self.most - self.seconds - self.step, 0.0) / own) if own else rows
        pace = self.tokens / self.seconds
        return count * length >= WORTH * (self.step + count * own) * pace

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
                own = self._own(rate, length)
                left, taken = left - own, taken + own
                given += Acceptance.tokens(rate, length)
        pays = given >= WORTH * taken * self.tokens / self.seconds
        return found if pays else [0] * len(found)

    def after(self, drafts: Iterable[tuple[float, int]]) -> _Plan:
        """Return the plan of the step with these drafts, as `lengths` is given them."""
        given, taken = 0.0, 0.0
        for rate, length in drafts:
            given += Acceptance.tokens(rate, length)
            taken += self._own(rate, length)
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
                own = self.step + length * run(rows)
                own += sum(self._own(rate, length) for rate in rates[:rows])
                if self.seconds + own > self.most:
                    break
                given = sum(Acceptance.tokens(rate, length) for rate in rates[:rows])
                speed = (self.tokens + given) / (self.seconds + own)
                if speed > best and given >= WORTH * own * pace:
                    best, found = speed, (rows, length)
            rows //= 2
        return found

    def _own(self, rate: float, length: int) -> float:
        """Return the seconds that a draft of so many tokens takes in this step, and those that it
        takes in the next on average."""
        own = self.draft + length * self.token
        if not self.sees_again:
            return own
        again = self.draft + Acceptance.tokens(rate, length) * self.token
        return own + (1 - rate**length) * again

    def _length(self, rate: float, most: int, left: float) -> int:
        """Return how many tokens of a draft give the most tokens a second, besides others, in
        `left` seconds at most."""
        pace = self.tokens / self.seconds
        best, length = pace, 0
        for count in range(1, most + 1):
            own = self._own(rate, count)
            if own > left:
                break
            given = Acceptance.tokens(rate, count)
            speed = (self.tokens + given) / (self.seconds + own)
            if speed > best and given >= WORTH * own * pace:
                best, length = speed, count
        return length


def objection(limits: EngineLimits, forward: Forward) -> str | None:
    """Return why rows bring no drafts; None if they may.

    They bring none where all that a row keeps would have to be copied for each.
    """
    if limits.speculation == "off":
        return "speculation is off"
    return "its rows keep mlx-lm's own caches" if forward.prefixes == "copy" else None


def _able(rows: Sequence[Row]) -> Able:
    return [(row, row.proposer) for row in rows if row.proposer is not None]


def _apart(row: Row, proposer: Proposer) -> int:
    """Return in one of how many steps a row in which nothing was found is looked at again, where
    steps are queued ahead."""
    return proposer.rarely if row.guide is None else SELDOM


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

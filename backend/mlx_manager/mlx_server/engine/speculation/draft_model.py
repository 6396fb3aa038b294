"""A draft model: a smaller model with the same tokenizer, which guesses what rows draw next.

Its keys and values lie on the pages of the model, in layers of their own, so a row's table is that
of both: what a row shares, gives up or loses, it shares, gives up or loses in both. What was
guessed and not drawn is overwritten, as the model's own is. A page that others hold, too, is filled
by whoever drafts first, or by several with the same.

It draws with the row's sampler, as the model would at that place. So it draws the same as the model
where both find tokens equally likely, at any temperature. What it draws decides nothing but how
many tokens a step gives: see `draft`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.kv.prefix import Node
from mlx_manager.mlx_server.engine.sampling import SamplerState, SamplingBatch, best, sample
from mlx_manager.mlx_server.engine.scheduler.cost import Cost
from mlx_manager.mlx_server.engine.scores import LogitPositions
from mlx_manager.mlx_server.engine.sequence import Sequence as Row
from mlx_manager.mlx_server.engine.speculation.acceptance import EXPECTED
from mlx_manager.mlx_server.engine.speculation.draft import Method
from mlx_manager.mlx_server.engine.step.clock import StepClock
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward

# Amounts of a run are counted in these, to be of the order of one.
ROWS, TOKENS = 8, 64
# Rows and tokens of runs that are taken to have been seen when learning begins, and the number of
# rows or tokens besides one that take as long as one alone.
PRESUMED = ((1, 0), (8, 0), (1, 64))
LIKE_A_RUN = 12
# Weight of a row's acceptance in the moving average of all rows.
LEARNT = 0.1

Give = Callable[[mx.array, Sequence[int]], None]
"""Function that gives an MTP head's next run the hidden states before its tokens, (tokens, width),
in the run's order, and the numbers of the tokens at place 0."""


@dataclass(frozen=True, slots=True)
class DraftForward:
    """The way in which a draft model is run, and what it has to do with the model.

    vocabulary: tokens that the model knows. embedded: those that the draft model knows.
    context_length: tokens that the draft model takes. part: bytes of its weights ÷ those of the
    model's. give: of an MTP head, see `Give`; None: it is a model of its own. state_bytes: of one
    token's hidden state, which such a head needs.
    """

    forward: Forward
    vocabulary: int
    embedded: int
    context_length: int
    part: float
    give: Give | None = None
    state_bytes: int = 0


@dataclass(slots=True, eq=False)
class Guess:
    """Tokens that are being guessed for one row, at most `most`.

    ahead: gives the sampler's states. sampler: the state by which the next token is drawn. read:
    places that the draft model has filled. lag: see `DraftModel.lag`. number: its own among the
    guesses of the last run.
    """

    row: Row
    most: int
    ahead: Generator[SamplerState, int, None]
    read: int
    lag: int = 0
    number: int = 0
    sampler: SamplerState = field(init=False)
    drawn: list[int] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.sampler = next(self.ahead)

    @property
    def length(self) -> int:
        """Return the number of places that the next draw follows."""
        return len(self.row.tokens) + len(self.drawn) - self.lag

    @property
    def unread(self) -> list[int]:
        """Return the tokens that are to be read before the next draw, at least one."""
        tokens = self.row.tokens
        return self.drawn[-1:] if self.drawn else tokens[self.read + self.lag :]

    def take(self, token: int) -> None:
        """Append a token that was drawn, and find how the next one is."""
        self.drawn.append(token)
        if token in self.row.stop_ids or len(self.drawn) >= self.most:
            self.ended = True
            return
        try:
            self.sampler = self.ahead.send(token)
        except StopIteration:
            self.ended = True

    @property
    def tokens(self) -> list[int]:
        """Return the tokens up to an end, which need not be drafted to be drawn."""
        ends = bool(self.drawn) and self.drawn[-1] in self.row.stop_ids
        return self.drawn[:-1] if ends else self.drawn


class DraftModel:
    """Runs a draft model over the rows' pages, all rows together.

    Args:
        of: how it is run.
        pool: the pages of the model and the draft model.
        clear: removes what other rows have left in pages that have been handed out.
        clock: of the engine; it works between two steps.

    Attributes:
        usual: likelihood that a guessed token is drawn, of all rows.
        method: the name of its drafts.
        lag: tokens before the one at its first place.
    """

    method: ClassVar[Method] = "draft_model"
    lag: ClassVar[int] = 0

    def __init__(
        self, of: DraftForward, pool: PagePool, clear: Callable[[], None], clock: StepClock
    ) -> None:
        self.usual = EXPECTED[self.method]
        self._of = of
        self._forward = of.forward
        self._pool = pool
        self._clear = clear
        self._clock = clock
        # Seconds in which it has worked since they were last asked for.
        self._spent = 0.0
        # Pages that hold the draft model's keys and values in full, by what the pages hold.
        self._filled: dict[int, Node] = {}
        self._cost: Cost | None = None

    # -- prices --------------------------------------------------------------------------------

    def seconds(self, plain: float, rows: int, tokens: int = 0) -> float:
        """Return the seconds of one run for so many rows, and of reading so many tokens.

        plain: seconds of a step of the model for a row, by which they are guessed at first.
        """
        return self._price(plain).of(_amounts(rows, tokens))

    def take_seconds(self) -> float:
        """Return the seconds in which it has worked since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def forget_prices(self) -> None:
        """Take seconds as they are guessed at first."""
        self._cost = None

    def learn(self, rate: float) -> None:
        """Learn how likely a guessed token of one row is drawn."""
        self.usual += LEARNT * (rate - self.usual)

    def _price(self, plain: float) -> Cost:
        if self._cost is None:
            self._cost = Cost(3)
            run = plain * self._of.part
            self._cost.learn_all(
                (_amounts(rows, tokens), run * (1 + (rows - 1 + tokens) / LIKE_A_RUN))
                for rows, tokens in PRESUMED
            )
        return self._cost

    # -- what it has read ----------------------------------------------------------------------

    def takes(self, row: Row, tokens: int) -> bool:
        """Return whether it can guess so many tokens for a row: none for one with pictures, which
        it does not see."""
        return row.images is None and len(row.tokens) + tokens <= self._of.context_length

    def behind(self, row: Row) -> int:
        """Return the number of the row's tokens that it has not read, at least one: the last token
        is read for what follows it. The host must know all tokens of the row."""
        if not row.drafted and row.adopted:
            row.drafted = self._found(row)
        following = row.tokens[row.drafted : row.drafted + len(row.guessed)]
        for token, guessed in zip(following, row.guessed, strict=False):
            if token != guessed:
                break
            row.drafted += 1
        row.guessed = []
        row.drafted = min(row.drafted, len(row.tokens) - 1)
        return len(row.tokens) - row.drafted

    def _found(self, row: Row) -> int:
        """Return the number of tokens at the row's beginning that others have had it read."""
        size = self._pool.page_size
        return next(iter(self._unfilled(row)), row.adopted // size) * size

    def _unfilled(self, row: Row) -> Iterator[int]:
        """Yield the numbers of the pages that the row began with and that nobody has had it
        read."""
        pages: list[int] = row.table.pages[: row.adopted // self._pool.page_size].tolist()
        for number, page in enumerate(pages):
            known = self._filled.get(page)
            if known is None or known != self._pool.content(page):
                yield number

    def _note(self, row: Row, before: int) -> None:
        """Note the pages that it has filled since it had filled so many of the row's places."""
        size = self._pool.page_size
        # The page of the newest token is indexed a step later than it is filled.
        first, behind = max(before // size - 1, 0), min(row.drafted, row.computed) // size
        for page in row.table.pages[first:behind].tolist():
            content = self._pool.content(page)
            if content is not None:
                self._filled[page] = content

    def abandon(self) -> None:
        """Forget all pages, which are gone."""
        self._filled.clear()
        self._forward.abandon()

    # -- work ----------------------------------------------------------------------------------

    def read(self, rows: Sequence[tuple[Row, int]]) -> None:
        """Read so many of each row's tokens, fewer than it has not read: prompts, which the model
        alone has seen so far. The rows have pages for them."""
        begun = self._clock.now()
        self._clear()
        chunks = []
        for row, most in rows:
            begin = row.drafted + self.lag
            tokens = self._known(row.tokens[begin : begin + most])
            span = self._span(row, row.drafted + most, most)
            chunks.append(Chunk(row.key, span, tokens, False))
        self._hand_over([(row, row.drafted, most) for row, most in rows])
        logits = self._forward.run(None, chunks)
        self._finish_reading(logits, sum(most for _, most in rows), begun)
        for row, most in rows:
            before, row.drafted = row.drafted, row.drafted + most
            self._note(row, before)
        self._let_go([row for row, _ in rows])

    def guess(self, rows: Sequence[tuple[Row, int]]) -> list[list[int]]:
        """Return at most so many tokens for each row, perhaps none: those that the rows may draw
        next. The host must know all tokens of the rows, which have pages for the guesses, too."""
        self._clear()
        guesses = []
        for row, most in rows:
            self.behind(row)
            guesses.append(Guess(row, most, row.samplers_ahead(), row.drafted, self.lag))
        going = guesses
        while going:
            for guess, token in self._draw(going):
                guess.take(token)
            going = [guess for guess in going if not guess.ended]
        for guess in guesses:
            row = guess.row
            row.drafted, row.guessed = len(row.tokens) - self.lag, self._stays(guess)
            self._note(row, guess.read)
        self._let_go([row for row, _ in rows])
        return [guess.tokens for guess in guesses]

    def _finish_reading(self, logits: mx.array, tokens: int, begun: float) -> None:
        """Have so many tokens read, by a run that has been put together since `begun`."""
        self._clock.wait(lambda: mx.eval(logits, self._forward.state()))
        self._worked(_amounts(0, tokens), begun)

    def _stays(self, guess: Guess) -> list[int]:
        """Return the guessed tokens that it need not read again if they are drawn."""
        return guess.drawn[:-1]

    def _span(self, row: Row, length: int, queries: int) -> Span:
        """Return the span of `queries` places that end with the row's place `length`."""
        return Span(row.table, length, queries)

    def _hand_over(self, read: Sequence[tuple[Row, int, int]]) -> None:
        """Prepare a run that reads of each row so many places from one on, in this order."""

    def _continue(self, guesses: Sequence[Guess]) -> None:
        """Prepare a run that goes on with each of the guesses of the last run, in this order."""

    def _let_go(self, rows: Sequence[Row]) -> None:
        """Drop what is kept of what has been read."""

    def _draw(self, guesses: Sequence[Guess]) -> list[tuple[Guess, int]]:
        """Draw the next token of each, in one run."""
        begun = self._clock.now()
        single = [guess for guess in guesses if len(guess.unread) == 1]
        others = [guess for guess in guesses if len(guess.unread) > 1]
        keys, lengths = [g.row.key for g in single], [g.length for g in single]
        single = [single[i] for i in self._forward.order(keys, lengths)]
        chunks = [self._chunk(guess) for guess in others]
        ordered = [*single, *others]
        if any(guess.drawn for guess in guesses):
            self._continue(ordered)
        else:
            self._hand_over([(g.row, g.read, len(g.unread)) for g in ordered])
        logits = self._forward.run(self._decode(single) if single else None, chunks)
        for number, guess in enumerate(ordered):
            guess.number = number
        logits = LogitPositions.of(len(single), chunks, [1] * len(chunks)).drawn(logits)
        tokens = self._drawn(logits[: len(ordered)], ordered)
        self._clock.wait(lambda: mx.eval(tokens, self._forward.state()))
        drawn: list[int] = tokens.tolist()  # type: ignore[assignment]
        read = sum(len(guess.unread) for guess in others)
        self._worked(_amounts(len(single), read), begun)
        return list(zip(ordered, drawn, strict=True))

    def _decode(self, guesses: Sequence[Guess]) -> Decode:
        newest = self._known([guess.unread[0] for guess in guesses])
        tokens = send(np.array(newest, np.int32)).view(mx.uint32)
        spans = [self._span(guess.row, guess.length, 1) for guess in guesses]
        tables, lengths = [span.table for span in spans], [span.length for span in spans]
        return Decode([guess.row.key for guess in guesses], tables, lengths, tokens)

    def _chunk(self, guess: Guess) -> Chunk:
        tokens = self._known(guess.unread)
        span = self._span(guess.row, guess.length, len(tokens))
        return Chunk(guess.row.key, span, tokens, True, every=True)

    def _drawn(self, logits: mx.array, guesses: Sequence[Guess]) -> mx.array:
        """Draw from logits, (guesses, tokens that it knows), as the model would."""
        most = self._of.vocabulary
        logits = logits[:, :most]
        if (lacking := most - logits.shape[1]) > 0:
            # A finite number, which biases move as they move others.
            logits = mx.pad(logits, [(0, 0), (0, lacking)], constant_values=-1e4)
        states = [guess.sampler for guess in guesses]
        if all(state.greedy and not state.adjusted for state in states):
            return best(logits)
        drawn = [guess.row.drawn + len(guess.drawn) for guess in guesses]
        return sample(logits, SamplingBatch(states), drawn)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens, with 0 for those that the draft model lacks."""
        return [token if token < self._of.embedded else 0 for token in tokens]

    def _worked(self, amounts: tuple[float, float, float], begun: float) -> None:
        seconds = self._clock.now() - begun
        self._spent += seconds
        if self._cost is not None:
            self._cost.learn(amounts, seconds)


def _amounts(rows: int, tokens: int) -> tuple[float, float, float]:
    return 1.0, rows / ROWS, tokens / TOKENS

"""How much of the waiting prompts a step may process without making running streams stutter."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt

from mlx_manager.mlx_server.engine.scheduler.cost import Cost
from mlx_manager.mlx_server.engine.scheduler.load import Budget, Load

# A step with prompt tokens in it may take this many times a step without. Readers of running
# streams are promised a p99 gap of four times the median; the rest is for what varies: of a hundred
# steps, one takes 1.5 to 1.6 times what half of them take.
STRETCH = 2.2
# What has been seen of steps of so many prompt tokens is trusted for so many times as many.
BOLDNESS = 2
LESS_BOLD = 0.98
# With up to so many times the rows of any step without prompts it is known what such a step takes.
LIKE = 2
# Steps without prompts come by the thousand, and are learnt from when a prompt comes: from the last
# of them, which outweigh all others (`cost.KEPT`).
MEMORY = 64
# Seconds of a step that is short: what a reader hardly notices, and who gives up waits for.
SHORT = 0.08
# Seconds of a step that nobody's next token waits for. Who comes meanwhile waits for its end, so it
# takes no longer, or as long as costs the prompt little: prompt tokens that keep a device busy, and
# so many times what a step takes besides what its tokens do.
LONG = 0.1
BUSY = 128
WORTH = 10
# Of steps of one size nobody can tell what they would take in two: of long ones one in so many is
# halved.
HALVED = 4
# Fewest prompt tokens of a step on a device that takes long over each: a page of them.
FEWEST = 16
# Of what a step took the host so much is kept with each that follows.
HOST_KEPT = 0.9
# Amounts are counted in these, to be of the order of one.
ROWS, TOKENS, CONTEXT = 8, 64, 1024


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a step on a device that ends work that takes too long, or that has little memory.

    first: most prompt tokens before it is known what one costs. seconds: longest step. seen: most
    pairs of a prompt token and a token that it sees, of a chunk. least_by_host: see `Pace._least`.
    """

    first: float = inf
    seconds: float = inf
    seen: float = inf
    least_by_host: bool = False


class Pace:
    """Learns what rows and prompts cost, and sets the prefill budget from it.

    Args:
        most: prompt tokens of a step when nobody is waiting for their next token; see `budget` for
            when there may be more, and `LONG` for when there are fewer.
        least: prompt tokens of a step at any time.
        grain: what the tokens of a step, rows and all, are a multiple of if prompts allow it: as a
            power of two, so that there are few numbers of them.
        limits: what the device bears, on one that does not bear everything.
    """

    def __init__(
        self, most: int, least: int, grain: int = 1, limits: StepLimits | None = None
    ) -> None:
        self._most = most
        self._usual_least = least
        self._grain = grain
        self._limits = limits or StepLimits()
        # Seconds that a step with prompts takes the host.
        self._host = 0.0
        # A step, and each row. A prompt token, each token it sees, a chunk, each token before it.
        self._rows = Cost(2)
        self._prompts = Cost(4)
        self._tried = 0.0
        # Most rows of a step without prompts.
        self._alone = 0
        # Steps without prompts, which nothing has been learnt from yet.
        self._seen: deque[tuple[Load, float]] = deque(maxlen=MEMORY)

    def observe(self, seconds: float, load: Load) -> None:
        """A step took so long."""
        if load.tokens == 0:
            self._alone = max(self._alone, load.rows)
            self._seen.append((load, seconds))
            return
        self._tried = max(float(load.tokens), self._tried * LESS_BOLD)
        if not self._may_compare(load):
            return
        self._catch_up()
        rows = self._rows.of(_of_rows(load)) if load.rows else 0.0
        self._prompts.learn(_of_prompts(load), max(seconds - rows, seconds * 0.1))

    def _may_compare(self, load: Load) -> bool:
        """Whether it is known what the step's rows take."""
        return load.rows <= LIKE * self._alone

    def _catch_up(self) -> None:
        self._rows.learn_all([(_of_rows(load), seconds) for load, seconds in self._seen])
        self._seen.clear()

    def observe_host(self, seconds: float) -> None:
        """To put a step with prompts together took so long."""
        before = self._host or seconds
        self._host = HOST_KEPT * before + (1 - HOST_KEPT) * seconds

    @property
    def _least(self) -> int:
        """Prompt tokens of a step at any time: by the host, no more than the device processes while
        the host puts a step together."""
        if not self._limits.least_by_host:
            return self._usual_least
        token = self._prompts.prices[0] / TOKENS
        least = self._host / token if token > 0 else 0.0
        return int(min(max(least, FEWEST), self._usual_least))

    def is_short(self, tokens: int) -> bool | None:
        """Whether a step of so many tokens of a prompt, and no rows, is short; None: it is not
        known."""
        if not self._prompts.known or tokens > BOLDNESS * BOLDNESS * self._tried:
            return None
        return self._prompts.of(_of_prompts(Load().with_chunk(0, tokens))) <= SHORT

    def budget(self, beginning: int, wanted: int = 0) -> Budget:
        """What a step may do for prompts besides its rows.

        While more are beginning (prompts, and rows that have only just begun) than there are rows
        in their course, the rows give way: a burst is not made to wait behind the few that got in
        first.

        beginning: see `Scheduler.beginning`. wanted: tokens that are better processed in one step
        where the rows give way and it is short.
        """
        return partial(self._tokens, beginning, wanted)

    def _tokens(self, beginning: int, wanted: int, load: Load, before: int) -> int:
        tokens = self._wished(beginning, wanted, load, before)
        most = self._bearable(load, before, tokens)
        if most >= tokens:
            return tokens
        return self._whole(load.rows, load.tokens + most) - load.tokens

    def _bearable(self, load: Load, before: int, tokens: int) -> int:
        """Return how many of a prompt's next `tokens`, each seeing those before it, the device
        bears."""
        limits = self._limits
        if not self._prompts.known:
            most = min(tokens, limits.first - load.tokens)
        elif limits.seconds < inf:
            left = limits.seconds - self._alone_time(load)
            bold = max(int(BOLDNESS * self._tried) - load.tokens, 0)
            most = self._within(left, load, before, min(tokens, bold))
        else:
            most = tokens
        if limits.seen < inf:
            # The positive root of n * (before + n) - seen.
            most = min(most, (sqrt(before * before + 4 * limits.seen) - before) / 2)
        # A prompt goes on, whatever it takes.
        return int(most if load.tokens else max(most, min(tokens, FEWEST)))

    def _wished(self, beginning: int, wanted: int, load: Load, before: int) -> int:
        """Return the tokens that running and arriving rows leave a prompt, whatever the device
        bears."""
        most = self._most
        if beginning > load.rows:
            if wanted > most and self._prompts.known:
                left = SHORT - self._alone_time(load)
                short = load.tokens + self._within(left, load, before, wanted)
                # Those of the last steps were whole grains with the rows.
                bold = int(BOLDNESS * self._tried) + self._grain
                most = max(most, min(wanted, short, bold))
                if most == wanted:
                    # Perhaps a prompt's last token.
                    return max(most, self._least) - load.tokens
            if not load.rows:
                most = min(most, max(load.tokens + self._unhurried(load, before, most), BUSY))
        else:
            if not self._may_compare(load):
                # Where prompts come without end, all that steps take would be put down to them.
                return 0
            bold = int(BOLDNESS * self._tried) - load.tokens
            affordable = min(self._affordable(load, before), bold)
            most = min(most, load.tokens + max(affordable, 0))
        return self._whole(load.rows, max(most, self._least)) - load.tokens

    def _unhurried(self, load: Load, before: int, most: int) -> int:
        """How many tokens of a prompt, each seeing those before it, a step without rows processes
        besides."""
        if not self._prompts.known:
            return most
        _, _, chunk, context = self._prompts.prices
        besides = chunk + context * (load.context + before) / CONTEXT
        tokens = self._within(max(LONG, WORTH * besides), load, before, most)
        long = tokens > self._within(LONG, load, before, most)
        return tokens // 2 if long and before // most % HALVED == HALVED - 1 else tokens

    def _whole(self, rows: int, tokens: int) -> int:
        """Up to `tokens` of prompts, that make a power of two of grains with the rows, if that
        leaves them a grain; of more than usual, so many times the usual."""
        if tokens > self._most:
            return max((rows + tokens) // self._most * self._most - rows, self._most)
        grains = (rows + tokens) // self._grain
        if self._grain == 1 or not grains:
            return tokens
        whole = (self._grain << grains.bit_length() - 1) - rows
        return whole if whole >= self._grain else tokens

    def _affordable(self, load: Load, before: int) -> int:
        """How many tokens of a prompt, each seeing those before it, the rows have time for."""
        left = (STRETCH - 1) * self._alone_time(load)
        return self._within(left, load, before, self._most)

    def _alone_time(self, load: Load) -> float:
        """What the rows take by themselves."""
        self._catch_up()
        # A row costs what a prompt token costs at least; what was last seen may be older.
        token = self._prompts.prices[0] / TOKENS
        return max(self._rows.of(_of_rows(load)), load.rows * token)

    def _within(self, seconds: float, load: Load, before: int, most: int) -> int:
        """How many tokens more of a prompt, each seeing those before it, all prompts' tokens take
        so long with."""
        token, seen, _, _ = self._prompts.prices
        token, seen = token / TOKENS, seen / (TOKENS * CONTEXT)
        left = seconds - self._prompts.of(_of_prompts(load.with_chunk(before, 0)))
        if left <= 0:
            return 0
        # The positive root of seen / 2 * n ** 2 + first * n - left.
        first = token + seen * before
        root = first + sqrt(first * first + 2 * seen * left)
        return int(min(2 * left / root, most)) if root > 0 else most


def _of_rows(load: Load) -> tuple[float, ...]:
    return 1.0, load.rows / ROWS


def _of_prompts(load: Load) -> tuple[float, ...]:
    return load.tokens / TOKENS, load.seen / (TOKENS * CONTEXT), 1.0, load.context / CONTEXT

"""Prefill budget: prompt tokens that a step may process without making running streams stutter."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt

from mlx_manager.mlx_server.engine.scheduler.cost import Cost
from mlx_manager.mlx_server.engine.scheduler.load import Budget, StepLoad

# A step with prompt tokens in it may take this many times a step without. Readers of running
# streams are promised a p99 gap of four times the median; the rest is for what varies: of a hundred
# steps, one takes 1.5 to 1.6 times what half of them take.
STRETCH = 2.2
# Costs learnt from steps of n prompt tokens are trusted up to BOLDNESS * n; n shrinks by the factor
# LESS_BOLD with each smaller step.
BOLDNESS = 2
LESS_BOLD = 0.98
# The seconds of rows alone are known up to so many times the rows of the largest step without
# prompts.
LIKE = 2
# Part of the seconds of other work that remains beside a step with prompts, since prompts may come
# without end.
BESIDE_PROMPTS = 0.25
# Number of steps without prompts that are kept. Such steps come by the thousand, and are learnt
# from when a prompt comes: from the last ones, which outweigh all others (`cost.KEPT`).
MEMORY = 64
# Seconds of a short step: a reader hardly notices them, and a cancelled request can wait for them.
SHORT = 0.08
# Seconds of a step without rows. A request that comes meanwhile waits for its end, so it takes no
# longer, except where that would cost the prompt much: it has at least BUSY prompt tokens, which
# keep a device busy, and may take WORTH times what a step takes besides its tokens.
LONG = 0.1
BUSY = 128
WORTH = 10
# Steps of one size alone do not show what two halves would take, so one long step in so many is
# halved.
HALVED = 4
# Fewest prompt tokens of a step on a device that takes long over each: a page of them.
FEWEST = 16
# Factor on the moving average of the host's seconds at each new step.
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
    """Prefill budget, set from the costs of rows and prompts, which it learns.

    Args:
        most: prompt tokens of a step when nobody is waiting for their next token; see `budget` for
            when there may be more, and `LONG` for when there are fewer.
        least: prompt tokens of a step at any time.
        grain: tokens of a step, rows included, are this many times a power of two if prompts allow
            it, so that there are few different sizes.
        limits: limits of the device, if it has any.
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
        self._seen: deque[tuple[StepLoad, float]] = deque(maxlen=MEMORY)

    def observe(self, seconds: float, load: StepLoad) -> None:
        """Learn that a step of `load` took `seconds`."""
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

    def _may_compare(self, load: StepLoad) -> bool:
        """Return whether the seconds of the step's rows alone are known."""
        return load.rows <= LIKE * self._alone

    def _catch_up(self) -> None:
        self._rows.learn_all([(_of_rows(load), seconds) for load, seconds in self._seen])
        self._seen.clear()

    def observe_host(self, seconds: float) -> None:
        """Learn that the host took `seconds` to put a step with prompts together."""
        before = self._host or seconds
        self._host = HOST_KEPT * before + (1 - HOST_KEPT) * seconds

    @property
    def _least(self) -> int:
        """Return the prompt tokens of a step at any time. With `limits.least_by_host`, return no
        more than the device processes while the host puts a step together, or `FEWEST`."""
        if not self._limits.least_by_host:
            return self._usual_least
        token = self._prompts.prices[0] / TOKENS
        least = self._host / token if token > 0 else 0.0
        return int(min(max(least, FEWEST), self._usual_least))

    def is_short(self, tokens: int) -> bool | None:
        """Return whether a step of `tokens` tokens of a prompt and no rows is short; None:
        unknown."""
        if not self._prompts.known or tokens > BOLDNESS * BOLDNESS * self._tried:
            return None
        return self._prompts.of(_of_prompts(StepLoad().with_chunk(0, tokens))) <= SHORT

    def slack(self, load: StepLoad, waiting: int) -> float:
        """Return the seconds of other work beside a step of this load that leave running streams
        their pace. Where fewer run than wait for that work, they give way; whoever comes is then
        delayed by no more than by a step.

        waiting: rows that wait for the other work.
        """
        if waiting > load.rows:
            return LONG
        slack = (STRETCH - 1) * self._alone_time(load)
        return slack * BESIDE_PROMPTS if load.tokens else slack

    def budget(self, beginning: int, wanted: int = 0) -> Budget:
        """Return the budget of a step's prompts besides its rows.

        While `beginning` (prompts, and rows that have only just begun) exceeds the step's rows,
        the rows give way: a burst need not wait behind the few rows that were admitted first.

        beginning: see `Scheduler.beginning`. wanted: prompt tokens that are better processed in one
        step, if the rows give way and the step is short.
        """
        return partial(self._tokens, beginning, wanted)

    def _tokens(self, beginning: int, wanted: int, load: StepLoad, before: int) -> int:
        tokens = self._wished(beginning, wanted, load, before)
        most = self._bearable(load, before, tokens)
        if most >= tokens:
            return tokens
        return self._whole(load.rows, load.tokens + most) - load.tokens

    def _bearable(self, load: StepLoad, before: int, tokens: int) -> int:
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

    def _wished(self, beginning: int, wanted: int, load: StepLoad, before: int) -> int:
        """Return the tokens that running and arriving rows leave a prompt, whatever the device
        bears."""
        most = self._most
        if beginning > load.rows:
            if wanted > most and self._prompts.known:
                left = SHORT - self._alone_time(load)
                short = load.tokens + self._within(left, load, before, wanted)
                # The last steps' tokens were whole grains together with the rows.
                bold = int(BOLDNESS * self._tried) + self._grain
                most = max(most, min(wanted, short, bold))
                if most == wanted:
                    # Perhaps a prompt's last token.
                    return max(most, self._least) - load.tokens
            if not load.rows:
                most = min(most, max(load.tokens + self._unhurried(load, before, most), BUSY))
        else:
            if not self._may_compare(load):
                # If prompts come without end, all seconds of steps would be put down to prompts.
                return 0
            bold = int(BOLDNESS * self._tried) - load.tokens
            affordable = min(self._affordable(load, before), bold)
            most = min(most, load.tokens + max(affordable, 0))
        return self._whole(load.rows, max(most, self._least)) - load.tokens

    def _unhurried(self, load: StepLoad, before: int, most: int) -> int:
        """Return how many more tokens of a prompt, each seeing those before it, a step without rows
        processes: at most `most`, within `LONG` seconds or `WORTH` times what the step takes
        besides tokens, whichever is more. Halve one in `HALVED` of the longer steps."""
        if not self._prompts.known:
            return most
        _, _, chunk, context = self._prompts.prices
        besides = chunk + context * (load.context + before) / CONTEXT
        tokens = self._within(max(LONG, WORTH * besides), load, before, most)
        long = tokens > self._within(LONG, load, before, most)
        return tokens // 2 if long and before // most % HALVED == HALVED - 1 else tokens

    def _whole(self, rows: int, tokens: int) -> int:
        """Return at most `tokens` prompt tokens that make a power of two of grains with the rows,
        if that leaves prompts a grain. If `tokens` is more than the usual most, return as many as
        make a multiple of that most with the rows."""
        if tokens > self._most:
            return max((rows + tokens) // self._most * self._most - rows, self._most)
        grains = (rows + tokens) // self._grain
        if self._grain == 1 or not grains:
            return tokens
        whole = (self._grain << grains.bit_length() - 1) - rows
        return whole if whole >= self._grain else tokens

    def _affordable(self, load: StepLoad, before: int) -> int:
        """Return how many tokens of a prompt, each seeing those before it, fit into a step that may
        take `STRETCH` times what the rows take by themselves."""
        left = (STRETCH - 1) * self._alone_time(load)
        return self._within(left, load, before, self._most)

    def _alone_time(self, load: StepLoad) -> float:
        """Return the seconds that the rows take by themselves."""
        self._catch_up()
        # A row costs at least as much as a prompt token; the last observation of rows may be old.
        token = self._prompts.prices[0] / TOKENS
        return max(self._rows.of(_of_rows(load)), load.rows * token)

    def plain_time(self, rows: int) -> float:
        """Return the seconds of a step of so many rows, without prompts and drafts; 0: unknown."""
        load = StepLoad(rows)
        return self._alone_time(load) if rows and self._may_compare(load) else 0.0

    def _within(self, seconds: float, load: StepLoad, before: int, most: int) -> int:
        """Return how many more tokens of a prompt, each seeing those before it, fit so that the
        step's prompts take `seconds`; at most `most`."""
        token, seen, _, _ = self._prompts.prices
        token, seen = token / TOKENS, seen / (TOKENS * CONTEXT)
        left = seconds - self._prompts.of(_of_prompts(load.with_chunk(before, 0)))
        if left <= 0:
            return 0
        # The positive root of seen / 2 * n ** 2 + first * n - left.
        first = token + seen * before
        root = first + sqrt(first * first + 2 * seen * left)
        return int(min(2 * left / root, most)) if root > 0 else most


def _of_rows(load: StepLoad) -> tuple[float, ...]:
    return 1.0, load.rows / ROWS


def _of_prompts(load: StepLoad) -> tuple[float, ...]:
    return load.tokens / TOKENS, load.seen / (TOKENS * CONTEXT), 1.0, load.context / CONTEXT

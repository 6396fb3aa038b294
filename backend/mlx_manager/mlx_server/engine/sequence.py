"""One row of work on its way through the engine."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.core import Event, FinishReason, TextDelta, TokenLogprob
from mlx_manager.mlx_server.engine.disk.names import PrefixChain
from mlx_manager.mlx_server.engine.kv.contents import salted
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.kv.prefix import ROOT, Node
from mlx_manager.mlx_server.engine.prompt_images import PromptImages
from mlx_manager.mlx_server.engine.sampling import SamplerState
from mlx_manager.mlx_server.engine.scores import Scoring
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.engine.speculation.unread import UnreadStates
from mlx_manager.mlx_server.engine.stream import Sink, merge
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.images import Features
from mlx_manager.mlx_server.text.grammar.guide import Guide
from mlx_manager.mlx_server.text.grammar.matchers import allows_more_than
from mlx_manager.mlx_server.text.output_parser import OutputParser

_keys = count(1)


class Sequence:
    """A prompt, what has been drawn for it, and the pages that hold its keys and values.

    Args:
        prompt: token ids, at least one.
        limit: most tokens to draw, at least one.
        stop_ids: tokens that end the row, and are not part of its text.
        cutting_ids: those of them that the client has asked for: they may cut a call in two, where
            the model's own end what it has written.
        guide: what the next token may be, if that depends on the answer so far.
        scoring: which log probabilities are wanted, if any.
        priority: lower ones are admitted first.
        owner: name of the owner that the row is counted for; owners share the engine evenly.
        request_id: identifies the request that the row belongs to.
        turn: prompt tokens before the last turn, which other prompts may begin with; 0 if unknown.
        images: the prompt's pictures, if it has any.
        proposer: proposes drafts; None: the row draws one token a step.
        salt: nothing that is kept of the row is found by rows with another one.

    Attributes:
        tokens: prompt and drawn tokens, as far as the host knows them.
        content: `tokens`, or the same with a number for a picture's content in each of its places,
            and one for the salt and the first token in the first place. Prompts that begin with
            equal content begin with the same pages.
        names: what these numbers stand for. Equal names are of equal contents, in any process.
        runs: (first, behind the last) of the tokens that see all of their run.
        features: those of pictures that are still to be computed, by digest.
        ready: the first token behind `computed` whose picture's features are not there.
        chain: names of its pages on disk, where there is a disk for them.
        awaits, arrives: the tokens whose keys and values are being read from disk: the first, and
            the one behind the last; both beyond all tokens if there are none.
        computed: how many tokens' keys and values are in pages, or will be once the step under
            way is done.
        pending: tokens drawn on the device that the host has not read yet (lookahead).
        cached: prompt tokens that were found in pages when the row was first admitted.
        kept: prompt tokens beyond these that are kept for others once the prompt is processed.
        adopted: the same when it was last admitted.
        drafted: how many tokens' keys and values of a draft model are in pages. guessed: the tokens
            after these that it has there besides, drawn or not. unread: hidden states that an MTP
            head has not read; None: it has seen nothing of the row.
        branches: tokens after which other prompts that begin alike go another way.
        outcome: why the row stops, once that is known.
        failure: why the row can't go on, if it can't.
        prompt_scores: of the prompt's tokens but the first, where they are asked for.
        parsed: events of tokens that were parsed before the next step is queued, as those of guided
            rows and of drafts are; None: there are none of these.
        ended: nothing more is wanted of this row; results still under way are dropped.
        submitted_at, joined_at, stepped_at: by the scheduler's count of steps, when it came, when
            its prompt was done, and when its last token was drawn.
        queued_at, admitted_at, read_at: by the engine's clock, when it came, when its prompt was
            first worked on, and when its last token was read; 0 before.
    """

    def __init__(
        self,
        prompt: list[int],
        *,
        limit: int,
        stop_ids: frozenset[int],
        min_tokens: int,
        sampler: SamplerState,
        parser: OutputParser,
        stream: Sink,
        cutting_ids: frozenset[int] = frozenset(),
        guide: Guide | None = None,
        scoring: Scoring | None = None,
        priority: int = 0,
        owner: str = "",
        request_id: str = "",
        turn: int = 0,
        images: PromptImages | None = None,
        proposer: Proposer | None = None,
        salt: str = "",
    ) -> None:
        self.key = next(_keys)
        self.tokens = self.content = list(prompt)
        self.salt = salt
        self.names: Mapping[int, str] = {}
        self.images = _salted(images, salt)
        self.shift = 0 if images is None else images.shift
        self.runs = () if images is None else images.runs
        self.features: dict[str, Features] = {}
        self.ready = self.awaits = self.arrives = sys.maxsize
        self.chain: PrefixChain | None = None
        self.prompt_length = len(prompt)
        self.limit = limit
        self.stop_ids, self.cutting_ids = stop_ids, cutting_ids
        self.min_tokens = min_tokens
        self.sampler = sampler
        self.parser = parser
        self.stream = stream
        self.shape: Callable[[list[Event]], list[Event]] | None = None
        self.guide = guide
        self.scoring = scoring
        self.prompt_scores: list[TokenLogprob] = []
        self.priority, self.owner, self.request_id = priority, owner, request_id
        self.proposer = proposer
        self.parsed: list[Event] | None = None
        self.failure: MLXManagerError | None = None
        self.table = PageTable()
        self.computed = self.pending = self.kept = self.adopted = 0
        self.drafted, self.guessed = 0, list[int]()
        self.unread: UnreadStates | None = None
        self.cached: int | None = None
        self.turn, self.branches = turn, set[int]()
        self.outcome: FinishReason | None = None
        self.started = self.ended = False
        self.submitted_at = self.joined_at = self.stepped_at = 0
        self.queued_at = self.admitted_at = self.read_at = 0.0
        self._committed = 0
        self._node: Node = ROOT
        self._forbid_early_stop()
        self.follow_guide()

    @property
    def drawn(self) -> int:
        """Return the number of tokens generated so far, known to the host or not."""
        return self.known() + self.pending

    def known(self) -> int:
        """Return the number of generated tokens that the host knows of. Safe on any thread."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Return the number of tokens whose keys and values must be computed before the next
        draw."""
        return len(self.tokens) - self.computed

    @property
    def due(self) -> int:
        """Return the number of tokens that the next step computes of a running row: its newest, and
        those before that recurrent layers have to see again, since they went further than the row
        has drawn."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def blocked(self) -> bool:
        """Return whether the next token is a picture's whose features are not there, or is being
        read from disk."""
        return min(self.ready, self.awaits) <= self.computed

    @property
    def possible(self) -> int:
        """Return the number of tokens that can be computed by now."""
        return min(self.ready, self.awaits, len(self.tokens))

    @property
    def needs_host(self) -> bool:
        """Return whether the next draw depends on tokens that the host must have read."""
        return self.sampler.adjusted or self.guide is not None

    @property
    def plain(self) -> bool:
        """Return whether the row draws its most likely token in all steps and wants nothing
        else."""
        free = self.guide is None and self.scoring is None
        return free and self.sampler.greedy and not self.sampler.adjusted

    def span(self, queries: int) -> Span:
        """Return the span of a step of `queries` tokens, which `computed` already counts."""
        if not self.runs:
            return Span(self.table, self.computed, queries)
        start = self.computed - queries
        within = tuple(run for run in self.runs if run[0] < self.computed and start < run[1])
        windowed = self.images is not None and self.images.windowed
        return Span(self.table, self.computed, queries, within, windowed)

    def append(self, token: int) -> None:
        """Append a token that was drawn, and set `outcome` if it ends the row."""
        self.tokens.append(token)
        if self.content is not self.tokens:
            self.content.append(token)
        sampler = self.sampler
        if sampler.penalised:
            sampler.advance(token)
        if sampler.banned:
            self._forbid_early_stop()
        if token in self.stop_ids:
            self.outcome = "stop"
        # Tokens that are not read yet don't count: they come after this one.
        elif len(self.tokens) - self.prompt_length >= self.limit:
            self.outcome = "length"

    @property
    def scores_prompt(self) -> bool:
        """Return whether all of the prompt must be computed, for its tokens' log probabilities."""
        return self.scoring is not None and self.scoring.prompt

    def parse_ahead(self, token: int, logprob: TokenLogprob | None) -> None:
        """Parse the last token before the next is drawn, and tell the guide, if there is one, what
        it was.

        May end the row: its grammar or its answer is complete, or can't go on.
        """
        guide, parser = self.guide, self.parser
        events = parser.push(token, logprob)
        self.parsed = events if self.parsed is None else merge(self.parsed + events)
        if guide is None:
            if parser.complete:
                self.outcome = "stop"
            return
        shown = "".join(event.text for event in events if isinstance(event, TextDelta))
        guide.observe(token, parser.region, parser.reasoning_tokens, shown)
        self.failure = guide.failure
        if parser.complete or guide.complete or guide.failure:
            self.outcome = "stop"

    def follow_guide(self) -> None:
        """Hand the guide's mask to the sampler. The row can't go on if none could be found."""
        if self.guide is not None:
            self.sampler.mask = self.guide.mask
            self.failure = self.guide.failure
            self._forbid_early_stop()

    def samplers_along(self, drafts: Iterable[int]) -> list[SamplerState]:
        """Return the sampler's state now and after each of `drafts`, as far as it can be foreseen:
        no further than the guide allows the drafts."""
        ahead = self.samplers_ahead()
        states = [next(ahead)]
        for token in drafts:
            try:
                states.append(ahead.send(token))
            except StopIteration:
                break
        return states

    def samplers_ahead(self) -> Generator[SamplerState, int, None]:
        """Yield the sampler's state now and, for each drafted token that is sent, the one after it,
        as far as it can be foreseen."""
        drafts: deque[int] = deque()
        masks = None if self.guide is None else self.guide.foresee(iter(drafts.popleft, None))
        state = self.sampler
        for drawn in count(self.known() + 1):
            token = yield state
            mask = None
            if masks is not None:
                drafts.append(token)
                found = next(masks, None)
                if found is None:
                    return
                (mask,) = found
            state = state.after(token)
            state.mask, state.banned = mask, self._early_bans(drawn, mask)

    def adopt(self, pages: Iterable[int], tokens: int, node: Node) -> None:
        """Begin with `pages`, found in the prefix index, that hold `tokens` tokens."""
        self.table.extend(pages)
        self.computed = tokens
        self._committed = len(self.table)
        self._node = node
        self.adopted = tokens
        if self.cached is None:
            self.cached = tokens

    def jump(self, tokens: int) -> None:
        """Go on behind `tokens` tokens whose keys and values have been read into the pages."""
        gained = tokens - self.computed
        self.computed = tokens
        self.adopted += gained
        if not self.started and self.cached is not None:
            self.cached += gained
            self.kept = max(0, self.kept - gained)

    def full_pages(self, page_size: int) -> Iterable[tuple[int, int]]:
        """Yield (first token, page) of each page that is full, known to the host and not shared."""
        ready = min(self.computed, len(self.tokens)) // page_size
        for i in range(self._committed, ready):
            yield i * page_size, int(self.table.pages[i])

    @property
    def node(self) -> Node:
        """Return the prefix index's node of the last page that was shared."""
        return self._node

    def committed(self, node: Node) -> None:
        self._node = node
        self._committed += 1

    def vacate(self) -> list[int]:
        """Give up and return all pages; tokens are kept, so their pages can be recomputed."""
        self.computed = self.drafted = 0
        self.guessed, self.unread = [], None
        self._committed = 0
        self._node = ROOT
        self.awaits = self.arrives = sys.maxsize
        return self.table.clear()

    def _forbid_early_stop(self) -> None:
        sampler = self.sampler
        sampler.banned = self._early_bans(len(self.tokens) - self.prompt_length, sampler.mask)

    def _early_bans(self, drawn: int, mask: NDArray[np.int32] | None) -> tuple[int, ...]:
        """Return `stop_ids` before `min_tokens`, unless the mask allows nothing else."""
        early = drawn < self.min_tokens
        if early and mask is not None:
            early = allows_more_than(mask, self.stop_ids)
        return tuple(self.stop_ids) if early else ()


def _salted(images: PromptImages | None, salt: str) -> PromptImages | None:
    """Return the pictures by digests that only rows with this salt have, as features are found by
    them."""
    if images is None or not salt:
        return images
    return images.renamed(partial(salted, salt))

"""An engine over a tiny real model, driven from a test as the backend drives it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

from mlx_manager.mlx_server.config import EngineLimits, PrefixDisk
from mlx_manager.mlx_server.core import Event, Finished, Progress, Sampling, Started
from mlx_manager.mlx_server.engine.disk.folder import Folder
from mlx_manager.mlx_server.engine.disk.threads import BlockDisk
from mlx_manager.mlx_server.engine.sampling import SamplerState
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation.draft_model import DraftForward
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.engine.stream import Inbox, LoopRow, working
from mlx_manager.mlx_server.engine.text_engine import TextEngine
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.execution.forward import Forward
from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.execution.working import vocabulary_of
from mlx_manager.mlx_server.formats import PLAIN, OutputFormat
from mlx_manager.mlx_server.models.checkpoint.building import BuildPlan, build, planned
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.mtp import head_of
from mlx_manager.mlx_server.models.loading.mtp import SharedVocabulary, build_head
from mlx_manager.mlx_server.text.detokenizer import TokenTexts
from mlx_manager.mlx_server.text.output_parser import OutputParser
from mlx_manager.mlx_server.utils.memory import Ledger

GREEDY = Sampling(temperature=0.0)


class RecordingParser(OutputParser):
    """A real parser that also remembers the tokens it was given."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.tokens: list[int] = []

    def push(self, token_id: int, logprob: object = None) -> list[Event]:
        self.tokens.append(token_id)
        return super().push(token_id)


class NoText(Proposer):
    """Proposer that finds nothing in the row's own text."""

    def propose(self, row: object, most: int) -> None:
        return None


class EventStream(LoopRow):
    """A row whose events are read, all that have come since the last time as one list."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        super().__init__(lambda events, _: self._inbox.put([(0, events)]))
        self._steps = self._read()

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> list[Event]:
        [(_, events)] = await anext(self._steps)
        return events

    async def _read(self) -> AsyncGenerator[Progress, None]:
        async with working(lambda _: self.over(lambda: None), self._inbox) as task:
            async for step in self._inbox:
                yield step
            await task


@dataclass
class Row:
    sequence: Sequence
    parser: RecordingParser
    stream: EventStream
    came_with_start: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.parser.tokens

    async def events(self) -> list[Event]:
        later = [event async for events in self.stream for event in events]
        return [*self.came_with_start, *later]

    async def finished(self) -> Finished:
        last = (await self.events())[-1]
        assert isinstance(last, Finished)
        return last

    async def started(self) -> Started:
        """Wait for the end of the prefill."""
        events: list[Event] = []
        while not (found := [event for event in events if isinstance(event, Started)]):
            events += await anext(self.stream)
        # To who looks late the rest comes at once, up to the end.
        self.came_with_start = events[events.index(found[0]) + 1 :]
        return found[0]


class Rig:
    """Owns an MLX thread, a model on it and its engine."""

    def __init__(
        self,
        folder: Path,
        *,
        memory: int = 1 << 30,
        looks_ahead: bool = False,
        size: StepSize | None = None,
        choose: Callable[[nn.Module, int], Forward] = choose,
        clock: Callable[[], float] = perf_counter,
        disk: PrefixDisk | None = None,
        draft: Path | None = None,
        part: float = 1.0,
        head: bool = False,
        **limits: object,
    ) -> None:
        self._kept_in = disk
        self.disk: BlockDisk | None = None
        self.thread = MLXThread()
        self._looks_ahead = looks_ahead
        self._size = size
        self._folder = folder
        self._choose = choose
        self._clock = clock
        self._draft, self._part = draft, part
        # Whether the folder's own MTP head drafts.
        self._head = head
        # Other tests' freed buffers are none of this one's business.
        self.ledger = Ledger(memory, cache_bytes=lambda: 0)
        self._limits = EngineLimits(**limits)  # type: ignore[arg-type]

    async def __aenter__(self) -> Rig:
        self.thread.start()
        await self.thread.call(self._load)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.thread.call(self._unload)
        self.thread.close()

    def _load(self) -> None:
        if self._head:
            plan = planned(ModelFolder.read(self._folder))
            self.model, _ = build(plan)
            self.shared = SharedVocabulary.of(self.model)
        else:
            self.model, _ = load_model(self._folder)
        self.tokenizer = load_tokenizer(self._folder)
        self.texts = TokenTexts(self.tokenizer)
        self.forward = self._choose(self.model, self._limits.page_size)
        ahead = self._looks_ahead or self.forward.looks_ahead
        wake = partial(self.thread.post, _nothing)
        self._open_disk(wake)
        self.engine = TextEngine(
            "tiny",
            self.forward,
            self._limits,
            self.ledger,
            looks_ahead=ahead,
            size=self._size,
            clock=self._clock,
            draft=self._heading(plan) if self._head else self._drafting(),
            wake=None if self.disk is None else wake,
            disk=self.disk,
        )
        self.thread.attach(self.engine)

    def _open_disk(self, wake: Callable[[], None]) -> None:
        if self._kept_in is not None:
            self.disk = disk_of(self._kept_in, self.forward, self._limits.page_size, wake)
            assert self.disk.settled.wait(30)

    def _heading(self, plan: BuildPlan) -> DraftForward:
        """Return the way of running the model's own MTP head."""
        files = head_of(plan.folder, plan.config["model_type"])
        assert files is not None
        self.head, given = build_head(files, plan, self.shared)
        self.given = given
        assert self.forward.keep_hidden()
        run = self._choose(self.head, self._limits.page_size)
        assert run.keep_hidden(fed=True)
        size = vocabulary_of(self.model)
        return DraftForward(run, size, size, 4096, self._part, given.give, 64 * 4)

    def _drafting(self) -> DraftForward | None:
        """Return the way of running the draft model, said to be a part of the model's size."""
        if self._draft is None:
            return None
        model, config = load_model(self._draft)
        forward = self._choose(model, self._limits.page_size)
        size = config["vocab_size"]
        return DraftForward(forward, vocabulary_of(self.model), size, 4096, self._part)

    def _unload(self) -> None:
        self.thread.detach()
        self.engine.close()

    def row(
        self,
        prompt: list[int],
        limit: int = 16,
        sampling: Sampling = GREEDY,
        stop_ids: frozenset[int] = frozenset(),
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        owner: str = "",
        output: OutputFormat = PLAIN,
    ) -> Row:
        """A sequence that has not been submitted."""
        stream = EventStream()
        parser = RecordingParser(self.texts.stream(output), output, stop)
        sequence = Sequence(
            prompt,
            limit=limit,
            stop_ids=stop_ids,
            min_tokens=min_tokens,
            sampler=SamplerState.of(sampling, prompt),
            parser=parser,
            stream=stream,
            owner=owner,
        )
        return Row(sequence, parser, stream)

    def submit(self, *args: object, **kwargs: object) -> Row:
        row = self.row(*args, **kwargs)  # type: ignore[arg-type]
        self.thread.post(partial(self.engine.submit, row.sequence))
        return row

    def submit_together(self, rows: list[Row]) -> None:
        """Let the rows arrive between the same two steps."""

        def all_of_them() -> None:
            for row in rows:
                self.engine.submit(row.sequence)

        self.thread.post(all_of_them)

    def cancel(self, row: Row) -> None:
        self.thread.post(partial(self.engine.cancel, row.sequence))

    async def on_thread(self, function: Callable[[], object]) -> object:
        return await self.thread.call(function)


def disk_of(
    limits: PrefixDisk, forward: Forward, page_size: int, wake: Callable[[], None]
) -> BlockDisk:
    """The blocks of a tiny model, whose weights are the same for each family."""
    facts = {"forward": forward.kind, "page": page_size}
    return BlockDisk(Folder(limits), "tiny", facts, (), wake)


def _nothing() -> None:
    pass


def drafting(
    rig: Rig,
    given: list[int],
    limit: int,
    sampling: Sampling = GREEDY,
    guess: Proposer | None = None,
) -> Row:
    """Return a row with a proposer of drafts, which finds none in texts unless it is given."""
    row = rig.row(given, limit, sampling)
    row.sequence.proposer = guess or NoText()
    return row


class HandRig(Rig):
    """A rig whose engine the test steps itself, so that things happen at exact steps."""

    async def __aenter__(self) -> HandRig:
        self._submitted: list[Row] = []
        self._load()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._unload()

    def submit(self, *args: object, **kwargs: object) -> Row:
        row = self.row(*args, **kwargs)  # type: ignore[arg-type]
        self.submit_together([row])
        return row

    def submit_together(self, rows: list[Row]) -> None:
        self._submitted += rows
        for row in rows:
            self.engine.submit(row.sequence)

    def cancel(self, row: Row) -> None:
        self.engine.cancel(row.sequence)

    def step(self, times: int = 1) -> None:
        """As the MLX thread does it."""
        for _ in range(times):
            if self.engine.has_work():
                try:
                    self.engine.step()
                except Exception as error:  # noqa: BLE001 so does the thread
                    self.engine.fail(error)

    def run(self, most: int = 3000) -> None:
        """Step until every row has ended."""
        for _ in range(most):
            if not self.engine.has_work():
                break
            self.step()
        assert all(row.sequence.ended for row in self._submitted)

    def ran(self, rows: list[Row]) -> list[list[int]]:
        """Run rows that come together, and return their tokens."""
        self.submit_together(rows)
        self.run()
        return [row.tokens for row in rows]

    def lose(self, gone: Row, stays: Row, after: int, tokens: list[int]) -> None:
        """Check that a row goes on to its `tokens` when one beside it leaves after so many
        steps."""
        self.submit_together([gone, stays])
        self.step(after)
        self.cancel(gone)
        self.run()
        assert stays.tokens == tokens
        assert self.engine.stats().pages_held == 0


def prompt(length: int, salt: int = 1) -> list[int]:
    """Tokens as good as any; another salt gives others."""
    return [3 + (salt * 31 + 7 * i * salt + i * i) % 200 for i in range(length)]


def alone(
    model: nn.Module, tokens: list[int], limit: int, guess: list[int] | None = None
) -> list[int]:
    """What the model itself draws greedily, with mlx-lm's caches. Where each token of a `guess` is
    the likeliest after those before it, which takes one step to see, it is the answer."""
    if guess is not None and len(guess) == limit and regret(model, tokens, guess) == 0:
        return guess
    cache = make_prompt_cache(model)
    drawn: list[int] = []
    given = tokens
    for _ in range(limit):
        logits = model(mx.array([given]), cache=cache)
        given = [int(mx.argmax(logits[0, -1]).item())]
        drawn += given
    return drawn


def regret(model: nn.Module, given: list[int], drawn: list[int]) -> float:
    """How far `drawn` are from the tokens that `model` by itself draws greedily (0: the same), in
    standard deviations of its logits."""
    logits = model(mx.array([given + drawn[:-1]]), cache=make_prompt_cache(model))
    logits = logits[0, len(given) - 1 :].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(drawn)[:, None], axis=1)[:, 0]
    return float(((logits.max(axis=1) - chosen) / logits.std(axis=1)).max())

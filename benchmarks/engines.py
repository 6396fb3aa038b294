"""The engines in this process: ours behind its backend, mlx-lm's as its users call it.

Both give one `Trace` a row, so that one definition of a rate holds for both.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlx_lm import load as mlx_lm_load
from mlx_lm import stream_generate
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlx_manager.mlx_server.backends.text import TextBackend, prepare
from mlx_manager.mlx_server.config import EngineLimits, PoolLimits
from mlx_manager.mlx_server.core import (
    Backend,
    Constraint,
    Event,
    Finished,
    GenerationRequest,
    Sampling,
    StopRules,
    TextDelta,
    Tokens,
)
from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas
from mlx_manager.mlx_server.devices.cpu.delta import ChunkedRule
from mlx_manager.mlx_server.engine.stream import Steps, steps
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.execution.decoder.packed import multiplies_packed
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.loading.draft import load_draft, prepared_draft
from mlx_manager.mlx_server.models.loading.load import Foresight, LoadedModel, load
from mlx_manager.mlx_server.models.settings import AS_IT_IS
from mlx_manager.mlx_server.utils.memory import Ledger, default_limit, set_memory_limit
from workload import Row

load_fast_blas()

T = TypeVar("T")


@dataclass(slots=True)
class Trace:
    """When each piece of a row's answer came, and what it was. Times in seconds."""

    started: float = 0.0
    times: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    def tokens_between(self, begin: float, end: float) -> float:
        """Tokens that came in the time from `begin` to `end`; pieces carry equal shares."""
        inside = sum(begin < moment <= end for moment in self.times)
        return inside * self.tokens / len(self.times)


def whole_rate(traces: Sequence[Trace]) -> float:
    """Tokens per second from the submission to the last token, prompts included."""
    spent = max(t.last for t in traces) - min(t.started for t in traces)
    return sum(t.tokens for t in traces) / spent


def together(traces: Sequence[Trace]) -> tuple[float, float] | None:
    """The time in which every row is generating, if there is any: after the last row's first token,
    before the first row's last."""
    begin, end = max(t.first for t in traces), min(t.last for t in traces)
    return (begin, end) if begin < end else None


def decode_rate(traces: Sequence[Trace]) -> float:
    """Tokens per second while every row is generating."""
    found = together(traces)
    if found is None:
        raise ValueError("the rows never generate together; raise max_tokens")
    begin, end = found
    return sum(t.tokens_between(begin, end) for t in traces) / (end - begin)


def tell(doing: str) -> None:
    print(f"{time.strftime('%X')} {doing}", file=sys.stderr, flush=True)


async def events_of(
    backend: Backend, request: GenerationRequest
) -> AsyncGenerator[list[Event], None]:
    """Yield the events of one request's answer; closing the iterator cancels the request."""

    async def work(inbox: Steps) -> None:
        await backend.generate(request, lambda events, _: inbox.put([(0, events)]))

    async with aclosing(steps(work)) as progress:
        async for [(_, events)] in progress:
            yield events


class OurEngine:
    """The text backend on its MLX thread, driven from an event loop of its own.

    draft: the folder of a draft model.
    """

    def __init__(
        self,
        model: Path,
        limits: PoolLimits | None = None,
        engine: EngineLimits | None = None,
        draft: Path | None = None,
    ) -> None:
        self._engine = engine or EngineLimits()
        self._runner = asyncio.Runner()
        self._limits = limits or PoolLimits()
        self.thread = MLXThread()
        self.thread.start()
        self.loaded, self.backend = self.run(self.thread.call(lambda: self._load(model, draft)))
        # As the server does it: a full collection would stop everybody for 0.1 s.
        gc.collect()
        gc.freeze()

    def _load(self, model: Path, draft: Path | None) -> tuple[LoadedModel, TextBackend]:
        self.ledger = Ledger(self._limits.memory_limit or default_limit())
        set_memory_limit(self.ledger.limit)
        source = ModelSource(str(model), model, "configured")
        # As the server has it; one model alone has room for its steps.
        foresight = Foresight(multiplies_packed=multiplies_packed)
        loaded = load(source, self._limits, self.ledger, foresight=foresight, doing=tell)
        drafting = None
        if draft is not None:
            named = ModelSource(str(draft), draft, "configured")
            ready = prepared_draft(loaded.id, loaded.tokenizer, named, AS_IT_IS, self._limits)
            drafting = partial(load_draft, ready, self._limits, self.ledger, foresight)
        backend = prepare(
            loaded, self.thread, self._engine, self.ledger, draft=drafting, doing=tell
        )
        return loaded, backend

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def generate(self, rows: Sequence[Row], ignore_eos: bool = True) -> list[Trace]:
        """All rows at once."""

        async def all_rows() -> list[Trace]:
            return await asyncio.gather(*(self.answer(row, ignore_eos) for row in rows))

        return self.run(all_rows())

    def generate_in_form(
        self, rows: Sequence[Row], forms: Sequence[Constraint | None]
    ) -> list[Trace]:
        """All rows at once, each held to its form."""

        async def all_rows() -> list[Trace]:
            return await asyncio.gather(
                *(self.answer(row, constraint=form) for row, form in zip(rows, forms, strict=True))
            )

        return self.run(all_rows())

    async def answer(
        self,
        row: Row,
        ignore_eos: bool = True,
        trace: Trace | None = None,
        constraint: Constraint | None = None,
    ) -> Trace:
        """Fills `trace`, or a new one, as the answer comes."""
        request = GenerationRequest(
            model="",
            prompt=Tokens(row.prompt),
            sampling=Sampling(
                temperature=row.temperature,
                top_p=row.top_p,
                top_k=row.top_k,
                min_p=row.min_p,
                seed=row.seed,
            ),
            stop=StopRules(ignore_eos=ignore_eos),
            max_tokens=row.max_tokens,
            constraint=constraint,
        )
        trace = trace or Trace()
        trace.started = time.perf_counter()
        async for events in events_of(self.backend, request):
            now = time.perf_counter()
            for event in events:
                match event:
                    case TextDelta():
                        trace.times.append(now)
                        trace.text += event.text
                    case Finished():
                        trace.tokens = event.usage.completion_tokens
        return trace

    def close(self) -> None:
        self.run(self.thread.call(self.backend.close))
        self.thread.close()
        self._runner.close()


@contextmanager
def originals() -> Iterator[None]:
    """MLX's and mlx-lm's functions as they have them, where our engine has put others in place."""
    spaces = [
        vars(sys.modules[name]) for name in sys.modules if name.startswith(("mlx.", "mlx_lm."))
    ]
    placed = [
        (space, name, ours)
        for space in spaces
        for name, ours in space.items()
        if isinstance(ours, ChunkedRule)
    ]
    for space, name, ours in placed:
        space[name] = ours.original
    try:
        yield
    finally:
        for space, name, ours in placed:
            space[name] = ours


class MlxLm:
    """mlx-lm in this process: `stream_generate` for one row, `BatchGenerator` for several."""

    def __init__(self, model: Path) -> None:
        self.model, self.tokenizer = mlx_lm_load(str(model))

    @originals()
    def stream(self, row: Row) -> Trace:
        trace = Trace(started=time.perf_counter())
        for response in stream_generate(
            self.model,
            self.tokenizer,
            list(row.prompt),
            max_tokens=row.max_tokens,
            sampler=make_sampler(temp=row.temperature, top_p=row.top_p),
        ):
            trace.times.append(time.perf_counter())
            trace.text += response.text
            trace.tokens += 1
        return trace

    @originals()
    def batch(self, rows: Sequence[Row], stop: Sequence[int] = ()) -> list[Trace]:
        """All rows at once; shared sampling uses one sampler, as its server does."""
        same = len({(row.temperature, row.top_p) for row in rows}) == 1
        sampler = make_sampler(temp=rows[0].temperature, top_p=rows[0].top_p)
        generator = BatchGenerator(
            self.model,
            stop_tokens=[[token] for token in stop],
            sampler=sampler,
            completion_batch_size=len(rows),
        )
        begin = time.perf_counter()
        ids = generator.insert(
            [list(row.prompt) for row in rows],
            max_tokens=[row.max_tokens for row in rows],
            samplers=None
            if same
            else [make_sampler(temp=row.temperature, top_p=row.top_p) for row in rows],
        )
        traces = {key: Trace(started=begin) for key in ids}
        tokens: dict[int, list[int]] = {key: [] for key in ids}
        running = len(rows)
        while running:
            responses = generator.next_generated()
            now = time.perf_counter()
            for response in responses:
                trace = traces[response.uid]
                if response.finish_reason != "stop":
                    trace.times.append(now)
                    tokens[response.uid].append(response.token)
                running -= response.finish_reason is not None
        generator.close()
        for key, trace in traces.items():
            trace.tokens = len(tokens[key])
            trace.text = self.tokenizer.decode(tokens[key])
        return [traces[key] for key in ids]

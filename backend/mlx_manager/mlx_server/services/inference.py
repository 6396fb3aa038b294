"""One path for every protocol: lease the model, generate, observe.

`generate_chat_completion` and `generate_completion` are the same path for scripts that run inside
the server's process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from mlx_manager.mlx_server.config import ImageLimits, TimeLimits
from mlx_manager.mlx_server.core import (
    NOBODY,
    Backend,
    Caller,
    Conversation,
    Encoder,
    Event,
    GenerationRequest,
    Kind,
    Overlay,
    Progress,
    Prompt,
    RowStatus,
    Started,
    Tokenized,
    TokenizerInfo,
    Tokens,
)
from mlx_manager.mlx_server.defaults import fill_sampling, overlaid, overlaid_prompt
from mlx_manager.mlx_server.engine.stream import Inbox, Steps, Work, steps, working
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.images.reader import ImageReader
from mlx_manager.mlx_server.observability.observer import Observer, observed
from mlx_manager.mlx_server.protocols import chat, completions, sse
from mlx_manager.mlx_server.protocols.images import places, put, sources
from mlx_manager.mlx_server.schemas.openai import ChatCompletionRequest, CompletionRequest
from mlx_manager.mlx_server.services.accounts import UNLIMITED, Account
from mlx_manager.mlx_server.services.calls import UNHURRIED, Call, Calls
from mlx_manager.mlx_server.timeline import Timeline

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.hub import Listed
    from mlx_manager.mlx_server.models.settings import SettingsWritten
    from mlx_manager.mlx_server.models.status import ModelStatus, Reloaded, Unloaded

T = TypeVar("T")
L = TypeVar("L")
Question = Callable[..., Coroutine[Any, Any, T]]
"""Method of a backend, called with the backend and `caller`."""

Report = Callable[[int, int], None]
"""Told of a download's progress: bytes there, bytes in all."""


class EverShorter(Protocol):
    """Requests of which each is shorter than the one before. There may be thousands; few are looked
    at, in a thread."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> GenerationRequest: ...


class TokenBackend(Backend, Protocol):
    """A backend that knows its model's tokens. caller: who asks; keys take turns.

    The methods raise InvalidRequest: the prompt can't be rendered, or has unknown token ids.
    """

    async def tokenize(
        self, prompt: Prompt, special: bool = True, *, texts: bool = False, caller: Caller = NOBODY
    ) -> Tokenized:
        """Return a prompt's tokens. special: a text's begin with the model's BOS. texts: also as
        texts."""
        ...

    async def leaves_room(self, request: GenerationRequest, *, caller: Caller = NOBODY) -> bool:
        """Return whether an answer as long as is asked for, or half the context long, can
        follow."""
        ...

    async def detokenize(self, ids: Sequence[int], *, caller: Caller = NOBODY) -> str:
        """Return the text of tokens, special ones included."""
        ...

    async def render(self, conversation: Conversation, *, caller: Caller = NOBODY) -> str:
        """Return a conversation as text."""
        ...

    async def tokenizer_info(self, *, caller: Caller = NOBODY) -> TokenizerInfo:
        """Return what clients need to know of the tokenizer."""
        ...


class Lease(Protocol):
    """A loaded model that is not evicted while it is held."""

    @property
    def id(self) -> str: ...

    @property
    def backend(self) -> TokenBackend: ...


class EncoderLease(Protocol):
    """A loaded embedding model or reranker that is not evicted while it is held."""

    @property
    def backend(self) -> Encoder: ...


class ModelPool(Protocol):
    """Pool that leases models; `models.pool.ModelPoolManager` is one."""

    def resolve(self, model_id: str | None) -> str:
        """Return the id that a request's `model` means; the default model's if it names none."""
        ...

    def is_loaded(self, model_id: str) -> bool:
        """Return whether the model is in memory now."""
        ...

    def offers(self, model_id: str) -> bool:
        """Return whether a model of that id is on offer, without a look at the disk."""
        ...

    async def sees(self, model_id: str) -> bool:
        """Return whether the model reads pictures, as far as is known before it is loaded.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        ...

    def sampling(self, model_id: str) -> Mapping[str, float]:
        """Return the sampling parameters for requests that state none.

        The owner's settings go first; a loaded model's others are its makers' defaults.
        """
        ...

    def overlay(self, model_id: str) -> Overlay:
        """Return what the owner lays over requests that name the model."""
        ...

    async def models(self) -> Sequence[ModelStatus]:
        """Return the models that a request may name."""
        ...

    def failure(self, model_id: str) -> str | None:
        """Return why a model is left down; None if it is not."""
        ...

    def doing(self, model_id: str) -> str | None:
        """Return what a model's load is at; None if it is not being loaded."""
        ...

    async def look(self) -> None:
        """Have loaded models tell their figures, which `rows`, `figures` and `status` then know."""
        ...

    def workers(self) -> Mapping[str, int]:
        """Return the ids of the models' processes, by model."""
        ...

    def figures(self) -> dict[str, Any]:
        """`ledger` and `mlx` in bytes, and the figures of each loaded model's engine."""
        ...

    def rows(self) -> Sequence[RowStatus]:
        """Return all rows of all models that have not ended."""
        ...

    async def status(self, model_id: str) -> ModelStatus:
        """
        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        ...

    async def unload(self, model_id: str) -> Unloaded | None:
        """Free a model's memory; None if it was not loaded.

        Raises:
            ModelInUse: it is answering requests, or being loaded.
            ModelNotFound: nothing of that name is offered.
        """
        ...

    async def pin(self, model_id: str, pinned: bool) -> None:
        """Keep a model that is loaded, or let it go.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        ...

    async def keep(self, model_id: str, seconds: float) -> None:
        """Keep a model for so long without use, 0: unload it as soon as it is idle.

        Holds until the next call; what is pinned stays.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        ...

    async def download(self, repository: str, report: Report) -> None:
        """Fetch a model from the hub. `report` is called, in another thread, with bytes there and
        bytes in all.

        Raises:
            MLXManagerError: it can't be downloaded.
        """
        ...

    async def search(self, words: str, limit: int) -> Sequence[Listed]:
        """Return the models of the hub with these words in their names.

        Raises:
            DownloadFailed: the hub can't be reached.
        """
        ...

    async def plan(self, repository: str) -> Mapping[str, Any]:
        """Return what a model of the hub would take on this machine: the fields of
        `schemas.hub.ModelPlan`.

        Raises:
            MLXManagerError: see `hub.look_up`.
        """
        ...

    async def settings_of(self, model_id: str) -> Mapping[str, Any]:
        """Return a model's table in the owner's file; {} if it has none.

        Raises:
            InvalidSettings: the file can't be read.
        """
        ...

    async def change_settings(
        self, model_id: str, settings: Mapping[str, Any], *, dry_run: bool
    ) -> SettingsWritten:
        """Write a model's table into the owner's file, where the file stays valid.

        Raises:
            InvalidSettings: there is no file, or a setting is invalid; the file stays as it is.
        """
        ...

    async def delete(self, model_id: str) -> None:
        """Unload a model and delete its files.

        Raises:
            ModelInUse: it is answering requests, or being loaded.
            ModelNotFound: nothing of that name lies in the owner's folders.
            InvalidRequest: it is embedded, or lies elsewhere.
        """
        ...

    async def reload(self) -> Reloaded:
        """Read the models' settings again.

        Raises:
            InvalidSettings: those in force stay.
        """
        ...

    async def clear_prefixes(self, model_id: str | None = None) -> Mapping[str, int]:
        """Forget the prompts kept for reuse; bytes given back, by model.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        ...

    @overload
    def lease(
        self, model_id: str, kind: Literal["text"] | None = None
    ) -> AbstractAsyncContextManager[Lease]: ...

    @overload
    def lease(
        self, model_id: str, kind: Literal["embedding", "reranker"]
    ) -> AbstractAsyncContextManager[EncoderLease]: ...

    def lease(self, model_id: str, kind: Kind | None = None) -> Any:
        """Load the model unless it is loaded, and keep it for the length of the context.

        kind: what it is wanted for; None: what models of every kind can do.

        Raises:
            WrongModelKind: it is of another kind.
            ModelNotFound: there is no such model.
            ModelLoadFailed: it can't be loaded.
            OutOfMemory: it can't be loaded now.
        """
        ...


PushRow = Callable[[int, list[Event], int], None]
"""`core.Push` for several rows; the first argument is the row's index."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A call that is ready to run.

    timeline: the call's; it arrived when this was made. run: runs the call, and returns once its
    rows have finished and their steps, which it puts where its argument says, have been read. Then
    nothing is held any more. Cancelling `run` cancels every row. It raises RequestTimedOut where a
    limit is reached, and any MLXManagerError of a row, whose failure ends them all.
    """

    timeline: Timeline
    run: Work


class Inference:
    """Inference for one caller on the models of a pool, watched by observers.

    account: account of the caller's key, with the rest of its limits. calls: register of the calls
    under way. limits: time limits of the calls.
    """

    def __init__(
        self,
        pool: ModelPool,
        observers: Sequence[Observer] = (),
        caller: Caller = NOBODY,
        account: Account = UNLIMITED,
        *,
        calls: Calls | None = None,
        limits: TimeLimits = UNHURRIED,
    ) -> None:
        self.pool = pool
        self.observers = observers
        self.caller = caller
        self.account = account
        self.calls = Calls() if calls is None else calls
        self.limits = limits

    def generate(self, requests: Sequence[GenerationRequest]) -> Generation:
        """Return a call that answers `requests`, which all name the same model."""
        own = self._own(requests)
        leasing = self.pool.lease(own[0].model, "text")
        return self.call(own, leasing, lambda lease, push: rows(lease.backend, own, push))

    def generate_fitting(self, requests: EverShorter) -> Generation:
        """Return a call that answers the first of `requests` that leaves room for an answer.

        If none leaves room, the last is generated. See `generate`.
        """
        whole = self._own([requests[0]])

        async def work(lease: Lease, push: PushRow) -> None:
            request = await first_fitting(lease.backend, requests, self._own)
            await rows(lease.backend, [request], push)

        return self.call(whole, self.pool.lease(whole[0].model, "text"), work)

    def _own(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Return the requests in the caller's name, with default sampling and owner's overlay."""
        model = requests[0].model
        defaults, overlay = self.pool.sampling(model), self.pool.overlay(model)
        # The answers to one prompt go on sharing it.
        prompts = {id(each.prompt): overlaid_prompt(each.prompt, overlay) for each in requests}
        return [
            replace(
                overlaid(request, prompts[id(request.prompt)], overlay),
                caller=self.caller,
                sampling=fill_sampling(request.sampling, defaults),
                priority=self.account.priority(request.priority),
                cache_salt=self.account.salt(request.cache_salt),
            )
            for request in requests
        ]

    def call(
        self,
        requests: Sequence[GenerationRequest],
        leasing: AbstractAsyncContextManager[L],
        work: Callable[[L, PushRow], Coroutine[Any, Any, None]],
    ) -> Generation:
        """Return a call whose `work` is done on the model that `leasing` gives."""
        call = Call(requests, self.limits, self.account)
        return Generation(call.timeline, partial(self._run, call, leasing, work))

    async def _run(
        self,
        call: Call,
        leasing: AbstractAsyncContextManager[L],
        work: Callable[[L, PushRow], Coroutine[Any, Any, None]],
        steps: Steps,
    ) -> None:
        """Run a call; see `Generation`.

        The one path of every protocol: the key's turn, the model, the clock, the observers.
        """
        self.account.check_priority(call.requests)
        call.steps = steps
        with ExitStack() as watched:
            watched.enter_context(self.calls.enter(call))
            watched.enter_context(observed(self.observers, call.requests, call.timeline))
            watched.callback(self._charge_answers, call.timeline)
            async with AsyncExitStack() as held:
                with call.interruptible():
                    await held.enter_async_context(self.account.turn())
                    call.enter("load")
                    if not self.pool.is_loaded(call.requests[0].model):
                        call.timeline.loading = call.timeline.now()
                    lease = await held.enter_async_context(leasing)
                    call.timeline.leased = call.timeline.now()
                    call.enter("queue")
                    await work(lease, call.push)
            await call.linger()

    def _charge_answers(self, timeline: Timeline) -> None:
        """Charge the answers, and prompts whose tokens were not known when the answers began."""
        begun = [timeline.rows[row] for row in timeline.prompts]
        charged = sum(line.started.prompt_tokens for line in begun if line.started is not None)
        usage = timeline.usage
        self.account.charge(usage.completion_tokens + max(0, usage.prompt_tokens - charged))

    async def ask(
        self,
        model: str,
        question: Question[T],
        kind: Literal["text"] | None = None,
    ) -> T:
        """Return what a model's tokenizer answers to `question`.

        kind: "text" if an embedding model has no answer to it.

        Raises:
            RequestTimedOut: one of the limits has been reached.
            MLXManagerError: there is no such model, or it has no answer.
        """
        async with self._asking(model, kind) as backend:
            return await question(backend, caller=self.caller)

    async def count(self, requests: EverShorter) -> int:
        """Return the number of tokens of the prompt that `generate_fitting` would read.

        Raises:
            MLXManagerError: as `ask`.
        """
        async with self._asking(requests[0].model, "text") as backend:
            fitting = await first_fitting(backend, requests, self._own)
            return len((await backend.tokenize(fitting.prompt, caller=self.caller)).ids)

    @asynccontextmanager
    async def _asking(
        self, model: str, kind: Literal["text"] | None
    ) -> AsyncGenerator[TokenBackend, None]:
        """Yield the backend of a model that is asked about its tokens, by a call that is watched by
        the clock alone."""
        call = Call([self.reading(model, self.caller.request_id)], self.limits)
        leasing = self.pool.lease(model, kind)
        with self.calls.enter(call):
            async with AsyncExitStack() as held:
                with call.interruptible():
                    call.enter("load")
                    lease = await held.enter_async_context(leasing)
                    call.enter("prompt")
                    yield lease.backend

    def reading(
        self, model: str, request_id: str, inputs: tuple[str | tuple[int, ...], ...] = ()
    ) -> GenerationRequest:
        """Return the request that observers see for a call that generates nothing.

        Its priority is that of the caller's requests that ask for none.
        """
        return GenerationRequest(
            model,
            Tokens(()),
            max_tokens=0,
            priority=self.account.priority(0),
            inputs=inputs,
            request_id=request_id,
            caller=self.caller,
        )


async def first_fitting(
    backend: TokenBackend,
    requests: EverShorter,
    own: Callable[[Sequence[GenerationRequest]], list[GenerationRequest]],
) -> GenerationRequest:
    """Return the first of `requests` that leaves room for an answer, by binary search.

    If none leaves room, return the last. After a hang-up no further request is looked at.
    """
    first, last = 0, len(requests) - 1
    while first < last:
        middle = (first + last) // 2
        asked = own([requests[middle]])[0]
        if await backend.leaves_room(asked, caller=asked.caller):
            last = middle
        else:
            first = middle + 1
    return own([requests[first]])[0]


async def rows(backend: Backend, requests: Sequence[GenerationRequest], push: PushRow) -> None:
    """Run `requests` side by side until all of them have finished, and push the events of each.

    Raises:
        MLXManagerError: one row's failure ends them all.
    """
    if len(requests) == 1:
        await backend.generate(requests[0], partial(push, 0))
        return
    running = [
        asyncio.create_task(backend.generate(request, partial(push, row)))
        for row, request in enumerate(requests)
    ]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        for task in running:
            if task.done():
                task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class StreamWriter(Protocol):
    """Writer of progress as a stream of `media_type`; `protocols` has one for each shape of answer.

    `keep_alive` is sent whenever there has been nothing to write for a while.
    """

    media_type: str
    keep_alive: bytes

    def write(self, progress: Progress) -> bytes: ...

    def end(self) -> bytes: ...

    def fail(self, error: MLXManagerError) -> bytes:
        """Return the last event of an answer that failed after its beginning, in place of `end`."""
        ...


class AnswerCollector(Protocol):
    """Collector of progress into a body; `protocols` has one for each shape of answer."""

    def add(self, progress: Progress) -> None:
        """
        Raises:
            MLXManagerError: there is no body for what the model wrote.
        """
        ...

    def body(self) -> Iterator[str]:
        """Return the body's JSON in pieces."""
        ...


async def collect(
    work: Work, answer: AnswerCollector, begun: Callable[[Started], object] = id
) -> Iterator[str]:
    """Return the body of an answer that is not streamed, in pieces: the stream, collected.

    begun: told of each row's beginning.

    Raises:
        MLXManagerError: the work's failure, or there is no body for what the model wrote.
    """
    inbox = Inbox()
    async with working(work, inbox) as task:
        async for step in inbox:
            for start in starts(step):
                begun(start)
            try:
                answer.add(step)
            except MLXManagerError as error:
                # Those who watch the call see it fail.
                inbox.refuse(error)
        await task
    return answer.body()


def starts(progress: Progress) -> list[Started]:
    """Return the beginnings of rows in some progress."""
    return [event for _, events in progress for event in events[:2] if type(event) is Started]


# ---------------------------------------------------------------------------------------------
# Doors for scripts
# ---------------------------------------------------------------------------------------------


async def generate_chat_completion(
    model_id: str | ChatCompletionRequest,
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    pool: ModelPool | None = None,
    **parameters: Any,
) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
    """Return the answer of `/v1/chat/completions`: a dict, or with `stream=True` its chunks.

    Takes a model's id and messages with the wire's parameters by name, or a whole request.

    Raises:
        pydantic.ValidationError: a parameter out of its range.
        MLXManagerError: as over HTTP; when streaming, from the iterator.
    """
    fields = {"model": model_id, "messages": list(messages), **parameters}
    body = (
        model_id
        if isinstance(model_id, ChatCompletionRequest)
        else ChatCompletionRequest.model_validate(fields)
    )
    pool = pool or _shared_pool()
    body = await _with_pictures(body, pool)
    head = chat.head(body, pool.resolve(body.model))
    generation = Inference(pool).generate(chat.requests(body, head))
    if body.stream:
        return _chunks(generation.run, chat.ChatStream(head, generation.timeline))
    return await _object(generation.run, chat.ChatAnswer(head, generation.timeline))


async def _with_pictures(body: ChatCompletionRequest, pool: ModelPool) -> ChatCompletionRequest:
    """Return a body whose pictures have been read, if it has any and the model sees."""
    fields = body.model_dump(exclude_unset=True)
    found = places(fields)
    if not found or not await pool.sees(pool.resolve(body.model)):
        return body
    put(found, await ImageReader(ImageLimits()).read(sources(found)))
    return ChatCompletionRequest.model_validate(fields)


async def generate_completion(
    model_id: str | CompletionRequest,
    prompt: str | Sequence[int] = "",
    *,
    pool: ModelPool | None = None,
    **parameters: Any,
) -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
    """Return the answer of `/v1/completions`; see `generate_chat_completion`."""
    fields = {"model": model_id, "prompt": prompt, **parameters}
    body = (
        model_id
        if isinstance(model_id, CompletionRequest)
        else CompletionRequest.model_validate(fields)
    )
    pool = pool or _shared_pool()
    head = completions.head(body, pool.resolve(body.model))
    generation = Inference(pool).generate(completions.requests(body, head))
    if body.stream:
        return _chunks(generation.run, completions.CompletionStream(head, generation.timeline))
    return await _object(generation.run, completions.CompletionAnswer(head, generation.timeline))


async def _object(work: Work, answer: AnswerCollector) -> dict[str, Any]:
    found: dict[str, Any] = json.loads("".join(await collect(work, answer)))
    return found


async def _chunks(work: Work, writer: StreamWriter) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(steps(work)) as progress:
        async for step in progress:
            for chunk in sse.parse(writer.write(step)):
                yield chunk
    for chunk in sse.parse(writer.end()):
        yield chunk


def _shared_pool() -> ModelPool:
    from mlx_manager.mlx_server.models.pool import get_model_pool

    return get_model_pool()

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
    aclosing,
    asynccontextmanager,
)
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from mlx_manager.mlx_server.config import TimeLimits
from mlx_manager.mlx_server.core import (
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
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.observability.observer import Observer, observe_all
from mlx_manager.mlx_server.protocols import chat, completions, sse
from mlx_manager.mlx_server.schemas.openai import ChatCompletionRequest, CompletionRequest
from mlx_manager.mlx_server.services.accounts import UNLIMITED, Account
from mlx_manager.mlx_server.services.calls import UNHURRIED, Call, Calls

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.status import ModelStatus, Reloaded, Unloaded

T = TypeVar("T")
L = TypeVar("L")
Question = Callable[..., Coroutine[Any, Any, T]]
"""Method of a backend, called with the backend and `key`, the name of the caller's API key."""

Report = Callable[[int, int], None]
"""Told of a download's progress: bytes there, bytes in all."""


class EverShorter(Protocol):
    """Requests of which each is shorter than the one before. There may be thousands; few are looked
    at, in a thread."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> GenerationRequest: ...


class TokenBackend(Backend, Protocol):
    """A backend that knows its model's tokens. key: the name of the caller's API key; keys take
    turns.

    The methods raise InvalidRequest: the prompt can't be rendered, or has unknown token ids.
    """

    async def tokenize(
        self, prompt: Prompt, special: bool = True, *, texts: bool = False, key: str = ""
    ) -> Tokenized:
        """Return a prompt's tokens. special: a text's begin with the model's BOS. texts: also as
        texts."""
        ...

    async def leaves_room(self, request: GenerationRequest, *, key: str = "") -> bool:
        """Return whether an answer as long as is asked for, or half the context long, can
        follow."""
        ...

    async def detokenize(self, ids: Sequence[int], *, key: str = "") -> str:
        """Return the text of tokens, special ones included."""
        ...

    async def render(self, conversation: Conversation, *, key: str = "") -> str:
        """Return a conversation as text."""
        ...

    async def tokenizer_info(self, *, key: str = "") -> TokenizerInfo:
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


NOBODY = Caller()


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
        self.observers = (*observers, *account.observers())
        self.caller = caller
        self.account = account
        self.calls = Calls() if calls is None else calls
        self.limits = limits

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Progress, None]:
        """Yield the progress of `requests`, which all name the same model, until all have finished.

        Closing the iterator cancels every row. The lease is held until the last of them has ended.

        Raises:
            RequestTimedOut: one of the limits has been reached.
            MLXManagerError: one row's failure ends them all.
        """
        own = self._own(requests)
        leasing = self.pool.lease(own[0].model, "text")
        return self.follow(own, leasing, lambda lease, _: rows(lease.backend, own))

    def generate_fitting(self, requests: EverShorter) -> AsyncGenerator[Progress, None]:
        """Yield the progress of the first of `requests` that leaves room for an answer.

        If none leaves room, the last is generated. See `generate`.
        """
        whole = self._own([requests[0]])

        def work(lease: Lease, _: Call) -> AsyncGenerator[Progress, None]:
            return fitting(lease.backend, requests, self._own)

        return self.follow(whole, self.pool.lease(whole[0].model, "text"), work)

    def _own(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Return the requests in the caller's name, with default sampling and owner's overlay."""
        model = requests[0].model
        defaults, overlay = self.pool.sampling(model), self.pool.overlay(model)
        # The answers to one prompt go on sharing it.
        prompts = {id(request.prompt): overlay.prompt(request.prompt) for request in requests}
        return [
            replace(
                overlay.request(request, prompts[id(request.prompt)]),
                caller=self.caller,
                sampling=request.sampling.filled(defaults),
                priority=self.account.priority(request.priority),
            )
            for request in requests
        ]

    async def follow(
        self,
        requests: Sequence[GenerationRequest],
        leasing: AbstractAsyncContextManager[L],
        work: Callable[[L, Call], AsyncGenerator[Progress, None]],
    ) -> AsyncGenerator[Progress, None]:
        """Yield the progress of one call's work on the model that `leasing` gives; see `generate`.

        The one path of every protocol: the key's turn, the model, the clock, the observers.
        """
        self.account.check_priority(requests)
        async with AsyncExitStack() as held:
            call = held.enter_context(self.calls.enter(requests, self.limits))
            observations = held.enter_context(observe_all(self.observers, requests))
            await call.wait(held.enter_async_context(self.account.turn()))
            call.enter("load")
            if not self.pool.is_loaded(requests[0].model):
                for observation in observations:
                    observation.loading()
            lease = await call.wait(held.enter_async_context(leasing))
            call.enter("queue")
            for observation in observations:
                observation.leased()
            progress = await held.enter_async_context(aclosing(work(lease, call)))
            async with call.letting_go(held):
                while (step := await call.wait(anext(progress, None))) is not None:
                    call.follow(step)
                    for observation in observations:
                        observation.add(step)
                    yield step

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
        async with self._asking(model, kind) as (call, backend):
            return await call.wait(question(backend, key=self.caller.key))

    async def count(self, requests: EverShorter) -> int:
        """Return the number of tokens of the prompt that `generate_fitting` would read.

        Raises:
            MLXManagerError: as `ask`.
        """
        async with self._asking(requests[0].model, "text") as (call, backend):
            fitting = await call.wait(first_fitting(backend, requests, self._own))
            asked = backend.tokenize(fitting.prompt, key=self.caller.key)
            return len((await call.wait(asked)).ids)

    @asynccontextmanager
    async def _asking(
        self, model: str, kind: Literal["text"] | None
    ) -> AsyncGenerator[tuple[Call, TokenBackend], None]:
        """Yield the call that waits for a model's tokenizer, and the backend that has it."""
        shown = self.reading(model, self.caller.request_id)
        leasing = self.pool.lease(model, kind)
        with self.calls.enter([shown], self.limits) as call:
            async with AsyncExitStack() as held:
                call.enter("load")
                lease = await call.wait(held.enter_async_context(leasing))
                call.enter("prompt")
                yield call, lease.backend

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


async def fitting(
    backend: TokenBackend,
    requests: EverShorter,
    own: Callable[[Sequence[GenerationRequest]], list[GenerationRequest]],
) -> AsyncGenerator[Progress, None]:
    """Run the first of `requests` that leaves room for an answer; see `generate_fitting`."""
    request = await first_fitting(backend, requests, own)
    async with aclosing(rows(backend, [request])) as progress:
        async for step in progress:
            yield step


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
        if await backend.leaves_room(asked, key=asked.caller.key):
            last = middle
        else:
            first = middle + 1
    return own([requests[first]])[0]


async def rows(
    backend: Backend, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[Progress, None]:
    """Run `requests` side by side and yield what comes from any of them, as it comes."""
    streams = [backend.generate(request) for request in requests]
    if len(streams) == 1:
        try:
            async for events in streams[0]:
                yield [(0, events)]
        finally:
            await close(streams)
        return
    pending = {asyncio.create_task(pull(stream)): row for row, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            step: Progress = []
            for task in sorted(done, key=pending.__getitem__):
                row = pending.pop(task)
                if (new := task.result()) is not None:
                    step.append((row, new))
                    pending[asyncio.create_task(pull(streams[row]))] = row
            if step:
                yield step
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await close(streams)


async def pull(stream: AsyncIterator[T]) -> T | None:
    """Return the next item, or None at the end."""
    return await anext(stream, None)


async def close(streams: Sequence[AsyncIterator[list[Event]]]) -> None:
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]


class Stream(Protocol):
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


class Answer(Protocol):
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
    progress: AsyncGenerator[Progress, None],
    answer: Answer,
    begun: Callable[[Started], object] = id,
) -> Iterator[str]:
    """The body of an answer that is not streamed, in pieces: the stream, collected.

    begun: told of each row's beginning.
    """
    async with aclosing(progress):
        async for step in progress:
            for _, events in step:
                if type(start := events[0]) is Started:
                    begun(start)
            try:
                answer.add(step)
            except MLXManagerError as error:
                # Those who watch the call see it fail.
                await progress.athrow(error)
                raise
    return answer.body()


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
    head = chat.head(body, pool.resolve(body.model))
    progress = Inference(pool).generate(chat.requests(body, head))
    if body.stream:
        return _chunks(progress, chat.ChatStream(head))
    return await _object(progress, chat.ChatAnswer(head))


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
    progress = Inference(pool).generate(completions.requests(body, head))
    if body.stream:
        return _chunks(progress, completions.CompletionStream(head))
    return await _object(progress, completions.CompletionAnswer(head))


async def _object(progress: AsyncGenerator[Progress, None], answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads("".join(await collect(progress, answer)))
    return found


async def _chunks(
    progress: AsyncGenerator[Progress, None], stream: Stream
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(progress):
        async for step in progress:
            for chunk in sse.parse(stream.write(step)):
                yield chunk
    for chunk in sse.parse(stream.end()):
        yield chunk


def _shared_pool() -> ModelPool:
    from mlx_manager.mlx_server.models.pool import get_model_pool

    return get_model_pool()

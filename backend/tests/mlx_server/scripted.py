"""Stand-ins for the pool and its models: answers that are written in advance, and gates in them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mlx_manager.mlx_server.core import (
    NOBODY,
    Admitted,
    Caller,
    Conversation,
    EmbeddingRequest,
    Encoded,
    Event,
    Finished,
    GenerationRequest,
    Kind,
    Overlay,
    Prompt,
    Push,
    RerankRequest,
    RowStatus,
    Started,
    Text,
    TextDelta,
    Tokenized,
    TokenizerInfo,
    Tokens,
    Usage,
)
from mlx_manager.mlx_server.errors import MLXManagerError, ModelNotFound
from mlx_manager.mlx_server.models.status import ModelStatus

Step = list[Event] | MLXManagerError | Exception | asyncio.Event | int
Script = Callable[[GenerationRequest], Iterable[Step]]

MODEL = "mlx-manager/demo"


def says(*pieces: str, reason: str = "stop", prompt_tokens: int = 3, cached: int = 0) -> list[Step]:
    """An answer of one token a piece."""
    usage = Usage(prompt_tokens, len(pieces), cached)
    return [
        [Started(prompt_tokens, cached)],
        *[[TextDelta(piece)] for piece in pieces],
        [Finished(reason, usage)],
    ]


@dataclass
class ScriptedBackend:
    """Plays a script for each request: event lists, failures to raise, gates to wait at, and numbers
    of tokens drawn so far, without which each event of text counts as one."""

    script: Script
    requests: list[GenerationRequest] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def generate(self, request: GenerationRequest, push: Push) -> None:
        self.requests.append(request)
        self.running += 1
        async with self.changed:
            self.changed.notify_all()
        complete, tokens = False, 0
        try:
            for step in self.script(request):
                match step:
                    case Exception():
                        raise step
                    case asyncio.Event():
                        await step.wait()
                    case int(drawn):
                        tokens = drawn
                    case events:
                        tokens += sum(isinstance(event, TextDelta) for event in events)
                        push(events, tokens)
                        # Readers get each step by itself.
                        await asyncio.sleep(0)
            complete = True
        finally:
            self.running -= 1
            self.cancelled += not complete
            async with self.changed:
                self.changed.notify_all()

    async def embed(self, request: EmbeddingRequest, begun: Callable[[], None]) -> Encoded:
        return await self._encode(request, len(request.inputs), begun)

    async def rank(self, request: RerankRequest, begun: Callable[[], None]) -> Encoded:
        return await self._encode(request, len(request.documents), begun)

    async def _encode(self, request: Any, rows: int, begun: Callable[[], None]) -> Encoded:
        """Row n is [n, 0.5]; the tokens are those of the script's prompt."""
        tokens = 0

        def push(events: list[Event], _: int) -> None:
            nonlocal tokens
            for event in events:
                if isinstance(event, Admitted):
                    begun()
                if isinstance(event, Finished):
                    tokens = event.usage.prompt_tokens

        await self.generate(request, push)
        return Encoded(tuple(array("f", [row, 0.5]) for row in range(rows)), tokens)

    async def tokenize(
        self, prompt: Prompt, special: bool = True, *, texts: bool = False, caller: Caller = NOBODY
    ) -> Tokenized:
        """A token for each word."""
        match prompt:
            case Conversation(messages):
                words = [word for message in messages for word in message.text.split()]
                words += [image.digest for said in messages for image in said.images]
            case Text(text):
                words = text.split()
            case Tokens(ids):
                words = [str(token) for token in ids]
        return Tokenized(list(range(len(words))), 8192, words if texts else ())

    async def leaves_room(self, request: GenerationRequest, *, caller: Caller = NOBODY) -> bool:
        prompt = await self.tokenize(request.prompt)
        return len(prompt.ids) + (request.max_tokens or 1) <= prompt.context_length

    async def tokenizer_info(self, *, caller: Caller = NOBODY) -> TokenizerInfo:
        return TokenizerInfo(None, None, None, None, 256, 8192, None)

    async def until(self, condition: Callable[[ScriptedBackend], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: condition(self))


@dataclass
class ScriptedLease:
    id: str
    backend: ScriptedBackend


@dataclass
class ScriptedPool:
    """A pool of one model. `loading` holds every lease back until it is set. down: why it is.
    seeing: it reads pictures."""

    backend: ScriptedBackend
    loading: asyncio.Event | None = None
    default: str = MODEL
    leases: int = 0
    down: str | None = None
    seeing: bool = False

    async def sees(self, model_id: str) -> bool:
        return self.seeing

    def resolve(self, model_id: str | None) -> str:
        return model_id or self.default

    def is_loaded(self, model_id: str) -> bool:
        return model_id == MODEL and self.loading is None

    def offers(self, model_id: str) -> bool:
        return model_id == MODEL

    def overlay(self, model_id: str) -> Overlay:
        return Overlay()

    def sampling(self, model_id: str) -> dict[str, float]:
        return {}

    def rows(self) -> list[RowStatus]:
        return []

    async def look(self) -> None: ...

    def workers(self) -> dict[str, int]:
        return {}

    def failure(self, model_id: str) -> str | None:
        return self.down

    def doing(self, model_id: str) -> str | None:
        return None

    async def models(self) -> list[ModelStatus]:
        state = "loading" if self.loading is not None and not self.loading.is_set() else "loaded"
        return [ModelStatus(MODEL, state, "embedded", "llama", "llama", 8192, 1000)]

    def figures(self) -> dict[str, Any]:
        engine = {"running": self.backend.running, "waiting": 0, "host_time": {}}
        ledger = {"limit": 1, "available": 1}
        return {
            "ledger": ledger,
            "mlx": {"active": 1},
            "engines": {MODEL: engine},
            "loads": {},
            "unloads": {},
            "failures": {},
            "down": {},
            "remotes": {},
        }

    @asynccontextmanager
    async def lease(self, model_id: str, kind: Kind | None = None) -> AsyncIterator[ScriptedLease]:
        if model_id != MODEL:
            raise ModelNotFound(f"There is no model {model_id!r} here.", param="model")
        if self.loading is not None:
            await self.loading.wait()
        self.leases += 1
        try:
            yield ScriptedLease(model_id, self.backend)
        finally:
            self.leases -= 1

"""A loaded model as the server sees it, a `core.Backend`: `worker` does all the asking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_manager.mlx_server.core import (
    NOBODY,
    Caller,
    Conversation,
    EmbeddingRequest,
    Encoded,
    GenerationRequest,
    Prompt,
    Push,
    RerankRequest,
    Tokenized,
    TokenizerInfo,
)
from mlx_manager.mlx_server.models.facts import ModelFacts
from mlx_manager.mlx_server.workers.messages import (
    Detokenize,
    Embed,
    LeavesRoom,
    Rank,
    Render,
    Tokenize,
)
from mlx_manager.mlx_server.workers.worker import Worker


class Proxy:
    """The backend of a model in a worker; which of the methods it has an answer to, its kind says.

    Every method raises MLXManagerError: the worker's, or that it has
    ended.
    """

    def __init__(self, worker: Worker, facts: ModelFacts) -> None:
        self._worker = worker
        self._facts = facts

    async def generate(self, request: GenerationRequest, push: Push) -> None:
        """Answer a request; see `core.Backend`."""
        await self._worker.generate(request, push)

    async def embed(self, request: EmbeddingRequest, begun: Callable[[], None]) -> Encoded:
        """Return a vector for each input; see `core.Encoder`."""
        found: Encoded = await self._worker.ask(Embed(request), request.caller.key, begun)
        return found

    async def rank(self, request: RerankRequest, begun: Callable[[], None]) -> Encoded:
        """Return a score for each document; see `core.Encoder`."""
        found: Encoded = await self._worker.ask(Rank(request), request.caller.key, begun)
        return found

    async def tokenize(
        self, prompt: Prompt, special: bool = True, *, texts: bool = False, caller: Caller = NOBODY
    ) -> Tokenized:
        """Return a prompt's tokens, even if they are too many for the model."""
        found: Tokenized = await self._worker.ask(Tokenize(prompt, special, texts), caller.key)
        return found

    async def leaves_room(self, request: GenerationRequest, *, caller: Caller = NOBODY) -> bool:
        """Return whether an answer can follow that is as long as is asked for."""
        found: bool = await self._worker.ask(LeavesRoom(request), caller.key)
        return found

    async def detokenize(self, ids: Sequence[int], *, caller: Caller = NOBODY) -> str:
        """Return the text of tokens, special ones included."""
        found: str = await self._worker.ask(Detokenize(ids), caller.key)
        return found

    async def render(self, conversation: Conversation, *, caller: Caller = NOBODY) -> str:
        """Return the text that the model gets to see."""
        found: str = await self._worker.ask(Render(conversation), caller.key)
        return found

    async def tokenizer_info(self, *, caller: Caller = NOBODY) -> TokenizerInfo:
        """Return what clients need to know of the tokenizer."""
        return self._facts.tokenizer

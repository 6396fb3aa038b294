"""A model on other machines, as a `core.Backend` that is there without being loaded."""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from pydantic_core import from_json

from mlx_manager.mlx_server.core import (
    NOBODY,
    Admitted,
    Caller,
    Conversation,
    EmbeddingRequest,
    Encoded,
    Event,
    GenerationRequest,
    Kind,
    Prompt,
    Push,
    RerankRequest,
    RowStatus,
    Started,
    Text,
    Tokenized,
    TokenizerInfo,
    Tokens,
)
from mlx_manager.mlx_server.errors import (
    MLXManagerError,
    RemoteFailed,
    RemoteUnavailable,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.remotes import requests
from mlx_manager.mlx_server.remotes.answers import Lines, Reader
from mlx_manager.mlx_server.remotes.dialects import OURS, VLLM
from mlx_manager.mlx_server.remotes.facts import Facts
from mlx_manager.mlx_server.remotes.failures import TryElsewhere, error_of
from mlx_manager.mlx_server.remotes.upstream import Health, Upstream, dumped

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
LOOK_OFTEN = 15.0
"""Seconds between two looks at a server that answers."""
UNHELD = "x-schema-not-enforced"
STRANGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""Errors over JSON of another shape than is expected, or with numbers that are none."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One of the servers of a model elsewhere.

    model: the model's name there, "" before it is known. requests: number under way there. failure:
    why it is left alone, "" if it is not.
    """

    url: str
    health: Health
    model: str
    requests: int
    failure: str


class Remote:
    """A model on other machines: a lease of it, and its backend. Belongs to the event loop.

    Each request goes to the server with the fewest under way, of those that answer; equal ones go
    in the owner's order. A server that fails before the answer's first event is followed by the
    next one.

    name: the model's name here. wanted: its name there; None: see `facts.facts_of`. stated: its
    kind, if the owner wrote one. broken: why it can't be asked, "" if it can.
    """

    def __init__(
        self,
        name: str,
        upstreams: Sequence[Upstream],
        *,
        wanted: str | None = None,
        stated: Kind | None = None,
        broken: str = "",
    ) -> None:
        self.id = name
        self.upstreams = tuple(upstreams)
        self._wanted = wanted
        self._stated = stated
        self._broken = broken
        self._rows: dict[int, tuple[GenerationRequest, Reader]] = {}
        self._learning: asyncio.Task[None] | None = None
        self._told_uncounted = False

    # -- facts ---------------------------------------------------------------------------------

    @property
    def backend(self) -> Remote:
        return self

    @property
    def facts(self) -> Facts | None:
        """Facts of the first server that has told any."""
        known = (upstream.facts for upstream in self.upstreams)
        return next((facts for facts in known if facts is not None), None)

    @property
    def kind(self) -> Kind | None:
        return self._stated or (None if self.facts is None else self.facts.kind)

    @property
    def failure(self) -> str | None:
        """Return why no server can be asked; None if one can, as far as is known."""
        if self._broken:
            return self._broken
        if any(upstream.health != "down" for upstream in self.upstreams):
            return None
        reasons = (upstream.breaker.reason.removesuffix(".") for upstream in self.upstreams)
        return "; ".join(reasons)

    @property
    def leases(self) -> int:
        return sum(upstream.waiting for upstream in self.upstreams)

    def servers(self) -> tuple[ServerStatus, ...]:
        """Return the servers, in the owner's order."""
        return tuple(
            ServerStatus(
                each.url,
                each.health,
                "" if each.facts is None else each.facts.name,
                each.waiting,
                each.breaker.reason,
            )
            for each in self.upstreams
        )

    def rows(self) -> list[RowStatus]:
        return [
            RowStatus(request.request_id, reader.prompt_tokens, reader.tokens)
            for request, reader in self._rows.values()
        ]

    async def learn(self) -> None:
        """Look at the servers unless one has told its facts; failures are noted there."""
        if self._broken or self.facts is not None:
            return
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._look_at_all(), name=f"look at {self.id}")
        # Whoever leaves does not end it for the others.
        await asyncio.shield(self._learning)

    async def _look_at_all(self) -> None:
        looks = [self._look(each) for each in self.upstreams if not each.breaker.rest]
        await asyncio.gather(*looks)

    def close(self) -> None:
        """Give up a look that is under way."""
        if self._learning is not None:
            self._learning.cancel()

    async def watch(self) -> None:
        """Look at each server again and again, until cancelled."""
        if not self._broken:
            await asyncio.gather(*map(self._watch, self.upstreams))

    async def _watch(self, upstream: Upstream) -> None:
        while True:
            was = upstream.health
            await self._look(upstream)
            if upstream.health != was:
                said = upstream.breaker.reason or "it answers"
                level = logging.WARNING if upstream.breaker.failures else logging.INFO
                log.log(level, "%s at %s is %s: %s", self.id, upstream.url, upstream.health, said)
            failing = upstream.breaker.failures
            await asyncio.sleep(max(1.0, upstream.breaker.rest) if failing else LOOK_OFTEN)

    async def _look(self, upstream: Upstream) -> None:
        with suppress(TryElsewhere):
            await upstream.look(self.id, self._wanted)

    # -- asking --------------------------------------------------------------------------------

    async def _anywhere(self, work: Callable[[Upstream, Facts], Awaitable[T]]) -> T:
        """Return the result of `work` on the first server that does it.

        Raises:
            RemoteUnavailable: no server answers.
            MLXManagerError: the failure of `work`.
        """
        if self._broken:
            raise RemoteFailed(f"{self.id} can't be asked: {self._broken}.")
        tried: list[Upstream] = []
        last: MLXManagerError | None = None
        while (upstream := self._next(tried)) is not None:
            tried.append(upstream)
            try:
                with upstream.used():
                    facts = upstream.facts or await upstream.look(self.id, self._wanted)
                    return await work(upstream, facts)
            except TryElsewhere as failure:
                log.warning("%s: %s", self.id, failure.error.message)
                last = failure.error
        if last is not None and type(last) is not RemoteFailed:
            raise last
        raise self._unavailable(last)

    def _next(self, tried: Sequence[Upstream]) -> Upstream | None:
        """Return the server to ask, of those that have not been tried; None: there is none."""
        free = [each for each in self.upstreams if each not in tried and not each.breaker.rest]
        return min(free, key=lambda each: (each.breaker.failures, each.waiting), default=None)

    def _unavailable(self, last: MLXManagerError | None) -> RemoteUnavailable:
        rest = min((each.breaker.rest for each in self.upstreams), default=0.0)
        said = self.failure or (last.message if last is not None else "all its servers fail")
        return RemoteUnavailable(
            f"No server of {self.id} answers: {said.removesuffix('.')}.",
            retry_after=max(1, round(rest)),
        )

    # -- generating ----------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest, push: Push) -> None:
        """Answer a request; see `core.Backend`. Each server's own queue is part of the prefill."""
        push([Admitted()], 0)
        await self._anywhere(lambda upstream, facts: self._ask(upstream, facts, request, push))

    async def _ask(
        self, upstream: Upstream, facts: Facts, request: GenerationRequest, push: Push
    ) -> None:
        """Answer a request at one server.

        Raises:
            TryElsewhere: nothing has been pushed, and another server may answer.
            MLXManagerError: the request has failed.
        """
        path, body = await _written(request, facts, upstream.url)
        begun, sent = False, asyncio.get_running_loop().time()

        def forward(events: list[Event], tokens: int) -> None:
            nonlocal begun
            begun = True
            push(events, tokens)

        try:
            async with upstream.answer("POST", path, body, request) as response:
                unheld = response.headers.get(UNHELD, "")
                names = tuple(name.strip() for name in unheld.split(",") if name.strip())
                reader = Reader(upstream.url, names, top=request.logprobs)
                self._rows[id(request)] = request, reader
                # Such a server tells a text's token ids at the end, and here they are told first.
                text = isinstance(request.prompt, Text) and facts.dialect is OURS
                held = request.return_ids and text
                await self._read(response, reader, request, held=held, sent=sent, push=forward)
        except TryElsewhere as failure:
            if not begun:
                raise
            upstream.breaker.failed(failure.error.message)
            raise RemoteFailed(
                f"{failure.error.message} The answer is not whole; the request can be sent again."
            ) from None
        finally:
            self._rows.pop(id(request), None)

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        reader: Reader,
        request: GenerationRequest,
        *,
        held: bool,
        sent: float,
        push: Push,
    ) -> None:
        """Push the events of an answer as they come, those of a piece of the stream together.

        held: all are pushed at the end. sent: moment of the request, by the event loop's clock.
        """
        lines, place = Lines(), f"{response.url}"
        kept: list[Event] = []
        ids: tuple[int, ...] = ()
        if isinstance(request.prompt, Tokens) and request.return_ids:
            ids = request.prompt.ids
        clock = asyncio.get_running_loop().time
        first, done = 0.0, False
        async for piece in response.content.iter_any():
            for data in _data(lines, piece, place):
                done = done or data == b"[DONE]"
                if done:
                    break
                chunk = _chunk(data, place, request)
                kept += _events(reader, chunk, place)
                first = first or clock()
                for choice in chunk.get("choices") or () if request.return_ids else ():
                    ids = tuple(choice.get("prompt_token_ids") or ids)
            if kept and not held:
                push(_opened(kept, ids, first - sent), reader.tokens)
                kept = []
            if done:
                break
        if not reader.ended:
            raise TryElsewhere(RemoteFailed(f"{place} ended the answer before it was whole."))
        self._check_counted(reader)
        push([*_opened(kept, ids, first - sent), reader.end()], reader.tokens)

    def _check_counted(self, reader: Reader) -> None:
        if not reader.counted and not self._told_uncounted:
            self._told_uncounted = True
            log.warning(
                "a server of %s tells no token counts (stream_options.include_usage): limits and "
                "metrics count the pieces of its answers, and no prompts",
                self.id,
            )

    # -- encoding ------------------------------------------------------------------------------

    async def embed(self, request: EmbeddingRequest, begun: Callable[[], None]) -> Encoded:
        """Return a vector for each input; see `core.Encoder`."""
        begun()

        async def work(upstream: Upstream, facts: Facts) -> Encoded:
            body = requests.embedding(request, facts, upstream.url)
            found = await upstream.ask("POST", "/embeddings", body, caller=request.caller)
            return _encoded(found, "data", "embedding", len(request.inputs), upstream.url)

        return await self._anywhere(work)

    async def rank(self, request: RerankRequest, begun: Callable[[], None]) -> Encoded:
        """Return a score for each document; see `core.Encoder`."""
        begun()

        async def work(upstream: Upstream, facts: Facts) -> Encoded:
            body = requests.ranking(request, facts, upstream.url)
            found = await upstream.ask("POST", "/rerank", body, caller=request.caller)
            count = len(request.documents)
            return _encoded(found, "results", "relevance_score", count, upstream.url)

        return await self._anywhere(work)

    # -- tokens --------------------------------------------------------------------------------

    async def tokenize(
        self, prompt: Prompt, special: bool = True, *, texts: bool = False, caller: Caller = NOBODY
    ) -> Tokenized:
        """Return a prompt's tokens, even if they are too many for the model."""
        if isinstance(prompt, Tokens):
            facts = self.facts
            return Tokenized(prompt.ids, 0 if facts is None else facts.context_length)

        def fields(facts: Facts, place: str) -> dict[str, Any]:
            if isinstance(prompt, Conversation):
                asked = dict(requests.rendering(prompt, facts, place))
            else:
                assert isinstance(prompt, Text)
                asked = {"prompt": prompt.text, "add_special_tokens": special}
            return asked | {"return_token_strs": texts}

        found = await self._tokens("/tokenize", fields, ("tokens", "max_model_len"), caller)
        strings = found.get("token_strs") or () if texts else ()
        return Tokenized(found["tokens"], found["max_model_len"], strings)

    async def leaves_room(self, request: GenerationRequest, *, caller: Caller = NOBODY) -> bool:
        """Return whether an answer can follow that is as long as is asked for."""
        found = await self.tokenize(request.prompt, caller=caller)
        context = found.context_length
        return len(found.ids) <= context - min(request.max_tokens or 1, context // 2)

    async def detokenize(self, ids: Sequence[int], *, caller: Caller = NOBODY) -> str:
        """Return the text of tokens, special ones included."""
        found = await self._tokens(
            "/detokenize", lambda *_: {"tokens": list(ids)}, ("prompt",), caller
        )
        return str(found["prompt"])

    async def render(self, conversation: Conversation, *, caller: Caller = NOBODY) -> str:
        """Return the text that the model gets to see."""
        found = await self._tokens(
            "/apply-template",
            lambda facts, place: dict(requests.rendering(conversation, facts, place)),
            ("prompt",),
            caller,
            ours=True,
        )
        return str(found["prompt"])

    async def tokenizer_info(self, *, caller: Caller = NOBODY) -> TokenizerInfo:
        """Return what clients need to know of the tokenizer."""
        needs = ("vocab_size", "model_max_length")
        found = await self._tokens("/tokenizer_info", None, needs, caller, ours=True)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        bos, eos, pad, unk = (found.get(name) for name in names)
        template = found.get("chat_template")
        return TokenizerInfo(
            bos, eos, pad, unk, found["vocab_size"], found["model_max_length"], template
        )

    async def _tokens(
        self,
        path: str,
        fields: Callable[[Facts, str], dict[str, Any]] | None,
        needs: Sequence[str],
        caller: Caller,
        *,
        ours: bool = False,
    ) -> dict[str, Any]:
        """Return the answer of a tokenizer's route.

        fields: makes the body; None: there is none. needs: names that the answer must have. ours:
        only a server of this program's has it.

        Raises:
            RemoteFailed: the answer is of another shape.
            UnsupportedParameter: the server has no such route.
        """

        async def work(upstream: Upstream, facts: Facts) -> dict[str, Any]:
            if facts.dialect not in ((OURS,) if ours else (OURS, VLLM)):
                raise UnsupportedParameter(
                    f"The server that has this model, {upstream.url} ({facts.dialect.name}), tells "
                    "nothing of its tokens.",
                    param="model",
                )
            root = facts.dialect.tokens == "at the root"
            if fields is None:
                named = f"{path}?model={quote(facts.name, safe='')}"
                found = await upstream.ask("GET", named, caller=caller, root=root)
            else:
                body = {**fields(facts, upstream.url), "model": facts.name}
                found = await upstream.ask("POST", path, body, caller=caller, root=root)
            if not isinstance(found, dict) or not found.keys() >= set(needs):
                raise RemoteFailed(f"{upstream.url}{path} does not answer as a model server does.")
            return found

        return await self._anywhere(work)


async def _written(request: GenerationRequest, facts: Facts, place: str) -> tuple[str, bytes]:
    """Return the path and the body for a row; pictures, which are large, are written in a thread.

    Raises:
        UnsupportedParameter: see `requests.generation`.
    """

    def write() -> tuple[str, bytes]:
        path, body = requests.generation(request, facts, place)
        return path, dumped(body)

    match request.prompt:
        case Conversation(messages) if any(message.images for message in messages):
            return await asyncio.to_thread(write)
    return write()


def _data(lines: Lines, piece: bytes, place: str) -> Iterable[bytes]:
    try:
        return list(lines.split(piece))
    except ValueError as error:
        raise RemoteFailed(f"{place} sends what is no stream of events: {error}.") from None


def _chunk(data: bytes, place: str, request: GenerationRequest) -> dict[str, Any]:
    """
    Raises:
        MLXManagerError: an error of the server's, or the data are no chunk.
    """
    try:
        chunk = from_json(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise _no_chunk(data, place)
    if chunk.get("error"):
        raise error_of(chunk, 500, place, request)
    return chunk


def _events(reader: Reader, chunk: dict[str, Any], place: str) -> list[Event]:
    try:
        return list(reader.read(chunk))
    except STRANGE:
        raise _no_chunk(repr(chunk).encode(), place) from None


def _no_chunk(data: bytes, place: str) -> RemoteFailed:
    shown = data[:200].decode(errors="replace")
    return RemoteFailed(f"{place} sends what is no chunk of an answer: {shown}")


def _opened(events: list[Event], ids: tuple[int, ...], prefill: float) -> list[Event]:
    """Return the events; in the beginning, if it is among them, with the prompt's token ids and the
    seconds that it took there."""
    match events:
        case [Started() as first, *rest]:
            return [replace(first, ids=first.ids or ids, prefill=prefill), *rest]
    return events


def _encoded(found: Any, field: str, value: str, count: int, place: str) -> Encoded:
    """Return what an encoder has made of `count` inputs, in their order.

    Raises:
        RemoteFailed: it is of another shape.
    """
    try:
        by_index = {entry["index"]: _numbers(entry[value]) for entry in found[field]}
        rows = tuple(by_index[index] for index in range(count))
        usage = found.get("usage") or {}
        return Encoded(rows, int(usage.get("prompt_tokens") or usage.get("total_tokens") or 0))
    except STRANGE:
        raise RemoteFailed(f"{place} does not answer with {field} for {count} inputs.") from None


def _numbers(given: Any) -> array[float]:
    if isinstance(given, str):
        row = array("f", b64decode(given, validate=True))
        if sys.byteorder == "big":
            row.byteswap()
        return row
    return array("f", given if isinstance(given, list) else [given])

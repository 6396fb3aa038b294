"""Streams of OpenAI's API, whichever server's, as events of `core`. Pure.

Servers leave out fields, or send null for them.
"""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_manager.mlx_server.core import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.errors import RemoteFailed

REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
NO_ID = -1
"""Token id where a server tells only the text."""
ESCAPED = re.compile(r"\\x([0-9a-f]{2})")
LONGEST_LINE = 64 * 2**20


class Lines:
    """Splitter of a stream of bytes into the data of its server-sent events, one a line."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of the events that end in `piece`.

        Raises:
            ValueError: a line has no end.
        """
        *complete, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise ValueError(f"a line has more than {LONGEST_LINE} bytes")
        for line in complete:
            if line.startswith(b"data:") and (data := line[5:].strip()):
                yield data


class Reader:
    """Reader of the chunks of one answer.

    unheld: demands that the server does not enforce. top: the most alternatives of a token; None:
    all that the server tells.

    Attributes:
        prompt_tokens, tokens: counts so far: of the prompt, 0 while they are not known, and of
            the answer.
        ended: whether the server has said why the answer ends.
    """

    def __init__(self, place: str, unheld: tuple[str, ...] = (), *, top: int | None = None) -> None:
        self.tokens = 0
        self.prompt_tokens = 0
        self.ended = False
        self._place = place
        self._unheld = unheld
        self._top = top
        self._started = False
        self._reason: FinishReason = "stop"
        self._stop: str | None = None
        self._usage: Usage | None = None
        self._pieces = 0
        self._calls: dict[object, int] = {}
        self._ids: tuple[int, ...] = ()

    def read(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of one chunk.

        Raises:
            RemoteFailed: the answer was ended by what is no end of ours.
            ValueError, TypeError, AttributeError, LookupError: it is no chunk.
        """
        if (usage := chunk.get("usage")) is not None:
            self._count(usage)
        if not self._started:
            self._started = True
            counted = self._usage or Usage(0, 0)
            ids = tuple(chunk.get("prompt_token_ids") or ())
            yield Started(counted.prompt_tokens, counted.cached_tokens, ids, self._unheld)
        for choice in chunk.get("choices") or ():
            yield from self._choice(choice)

    def end(self) -> Finished:
        """Return the last event, once the stream is over. Without counts pieces are counted."""
        usage = self._usage or Usage(self.prompt_tokens, self._pieces)
        return Finished(self._reason, usage, self._stop, self._ids)

    @property
    def counted(self) -> bool:
        """Return whether the server has told the counts of tokens."""
        return self._usage is not None

    def _count(self, usage: Mapping[str, Any]) -> None:
        prompt = usage.get("prompt_tokens_details") or {}
        answer = usage.get("completion_tokens_details") or {}
        self._usage = Usage(
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
            cached_tokens=int(prompt.get("cached_tokens") or 0),
            reasoning_tokens=int(answer.get("reasoning_tokens") or 0),
            accepted_prediction_tokens=int(answer.get("accepted_prediction_tokens") or 0),
            rejected_prediction_tokens=int(answer.get("rejected_prediction_tokens") or 0),
        )
        self.prompt_tokens, self.tokens = self._usage.prompt_tokens, self._usage.completion_tokens

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        delta = choice.get("delta") or {}
        logprobs = tuple(_logprobs(choice.get("logprobs"), self._top))
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        text = delta.get("content") or delta.get("refusal") or choice.get("text") or ""
        if reasoning:
            self._piece()
            yield ReasoningDelta(reasoning, () if text else logprobs)
        if text or (logprobs and not reasoning):
            self._piece()
            yield TextDelta(text, logprobs)
        for call in delta.get("tool_calls") or ():
            self._piece()
            yield from self._call(call)
        if ids := choice.get("token_ids"):
            self._ids += tuple(ids)
        if (reason := choice.get("finish_reason")) is not None:
            # By vLLM's name and ours, or by SGLang's.
            self._finish(reason, choice.get("stop_reason", choice.get("matched_stop")))

    def _piece(self) -> None:
        self._pieces += 1
        if self._usage is None:
            self.tokens = self._pieces

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call.get("function") or {}
        key = call.get("index", call.get("id"))
        if key not in self._calls:
            self._calls[key] = len(self._calls)
            call_id = call.get("id") or f"call_{secrets.token_hex(12)}"
            yield ToolCallStarted(self._calls[key], call_id, function["name"])
        if arguments := function.get("arguments"):
            yield ToolCallDelta(self._calls[key], arguments)

    def _finish(self, reason: str, stop: object) -> None:
        if reason not in REASONS:
            raise RemoteFailed(f"{self._place} ended the answer by {str(reason)[:100]!r}.")
        self.ended = True
        self._reason = REASONS[reason]
        if self._calls and self._reason == "stop" and not isinstance(stop, str):
            self._reason = "tool_calls"
        if isinstance(stop, str):
            self._stop = stop


def _logprobs(told: Mapping[str, Any] | None, most: int | None) -> Iterator[TokenLogprob]:
    """Yield the tokens of a chunk's `logprobs`, in the shape of chat or of completions."""
    if not told:
        return
    if "tokens" in told:
        yield from _columns(told, most)
        return
    for entry in told.get("content") or ():
        top = tuple((NO_ID, _bytes(each), each["logprob"]) for each in entry["top_logprobs"][:most])
        yield TokenLogprob(NO_ID, _bytes(entry), entry["logprob"], top)


def _columns(told: Mapping[str, Any], most: int | None) -> Iterator[TokenLogprob]:
    tokens: Sequence[str] = told["tokens"]
    best = told.get("top_logprobs") or [None] * len(tokens)
    for token, logprob, top in zip(tokens, told["token_logprobs"], best, strict=True):
        ranked = sorted((top or {}).items(), key=lambda pair: -pair[1])
        alternatives = tuple((NO_ID, _unnamed(name), value) for name, value in ranked[:most])
        yield TokenLogprob(NO_ID, _unnamed(token), logprob, alternatives)


def _bytes(entry: Mapping[str, Any]) -> bytes:
    given = entry.get("bytes")
    return entry["token"].encode() if given is None else bytes(given)


def _unnamed(name: str) -> bytes:
    """Return the bytes of a token by the name that completions give it."""
    rest = name.removeprefix("bytes:")
    if rest != name and ESCAPED.sub("", rest) == "":
        return codecs.decode("".join(ESCAPED.findall(rest)), "hex")
    return name.encode()

"""`/v1/completions`: body → requests, events → chunks, events → body. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, cast

from mlx_manager.mlx_server.core import (
    Finished,
    FinishReason,
    GenerationRequest,
    Progress,
    ReasoningDelta,
    Started,
    Text,
    TextDelta,
    TokenLogprob,
    Tokens,
)
from mlx_manager.mlx_server.errors import InvalidParameter, MLXManagerError, OutOfRange
from mlx_manager.mlx_server.protocols import sse
from mlx_manager.mlx_server.protocols.answer import (
    AnswerHead,
    counts_so_far,
    error_body,
    last_chunks,
    new_id,
    timed,
    total,
    whole_times,
)
from mlx_manager.mlx_server.protocols.constraints import constraint
from mlx_manager.mlx_server.protocols.logprobs import CompletionLogprobs
from mlx_manager.mlx_server.protocols.parameters import (
    UNSUPPORTED_IN_COMPLETIONS,
    counts_all_along,
    includes_usage,
    limited,
    prediction,
    refuse_unsupported,
    sampling,
    stop_rules,
    times,
)
from mlx_manager.mlx_server.protocols.pieces import filled, joined, whole
from mlx_manager.mlx_server.schemas.openai import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
)
from mlx_manager.mlx_server.timeline import Timeline

DEFAULT_MAX_TOKENS = 16
MAX_ROWS = 1024

_REASONS: dict[FinishReason, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "stop",
}


# ---------------------------------------------------------------------------------------------
# Body → requests
# ---------------------------------------------------------------------------------------------


def head(body: CompletionRequest, model: str) -> AnswerHead:
    """
    Raises:
        OutOfRange: too many prompts, or a `best_of` below `n`.
        InvalidParameter: `stream_options` without `stream`, or a `best_of` in a stream.
    """
    best = _best(body)
    n = body.n or 1 if best is None else body.best_of or 1
    rows = n * len(_prompts(body))
    if rows > MAX_ROWS:
        raise OutOfRange(
            f"`prompt`, `n` and `best_of` ask for {rows} completions; at most {MAX_ROWS} are "
            "possible.",
            param="prompt",
        )
    return AnswerHead(
        id=new_id("cmpl"),
        model=model,
        n=n,
        rows=rows,
        include_usage=includes_usage(body),
        counts_all_along=counts_all_along(body),
        logprobs=body.logprobs,
        best=best,
        echo=body.echo or False,
        return_ids=body.return_token_ids or False,
        times=times(body),
    )


def _best(body: CompletionRequest) -> int | None:
    """Return the number of answers returned for each prompt; None: all.

    Raises:
        OutOfRange: `best_of` below `n`.
        InvalidParameter: `best_of` above `n` in a stream.
    """
    n = body.n or 1
    if body.best_of is None or body.best_of == n:
        return None
    if body.best_of < n:
        raise OutOfRange(f"`best_of` ({body.best_of}) must be at least `n` ({n}).", param="best_of")
    if body.stream:
        raise InvalidParameter("`best_of` above `n` can't be streamed.", param="best_of")
    return n


def requests(body: CompletionRequest, head: AnswerHead) -> list[GenerationRequest]:
    """n requests for each prompt, side by side: choice p*n + i is the i-th answer to prompt p.

    Raises:
        InvalidParameter: a value that contradicts another.
        OutOfRange: `max_tokens` 0 without `echo`.
        UnsupportedParameter: a field that can't be honoured.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_COMPLETIONS)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else limited(body.max_tokens)
    echo = body.echo or False
    if max_tokens == 0 and not echo:
        raise OutOfRange(
            "`max_tokens` 0 makes sense only with `echo`; it must be at least 1.",
            param="max_tokens",
        )
    stop = stop_rules(body, max_tokens)
    content = constraint(body)
    predicted = prediction(body)
    return [
        GenerationRequest(
            model=head.model,
            prompt=prompt,
            sampling=sampling(body, draw),
            stop=stop,
            max_tokens=max_tokens,
            echo=echo,
            logprobs=0 if head.best and body.logprobs is None else body.logprobs,
            constraint=content,
            priority=body.priority or 0,
            return_ids=head.return_ids,
            prediction=predicted,
            speculation=body.speculation,
            cache_salt=body.cache_salt or "",
            request_id=head.id,
        )
        for prompt in _prompts(body)
        for draw in range(head.n)
    ]


def _prompts(body: CompletionRequest) -> list[Text | Tokens]:
    match body.prompt:
        case str():
            several: list[str | list[int]] = [body.prompt]
        case [int(), *_] as ids:
            several = [cast(list[int], ids)]
        case list():
            several = cast(list[str | list[int]], body.prompt)
    suffix = body.suffix or ""
    if suffix and not all(isinstance(prompt, str) for prompt in several):
        raise InvalidParameter("`suffix` goes with a `prompt` that is text.", param="suffix")
    return [Text(p, suffix) if isinstance(p, str) else Tokens(tuple(p)) for p in several]


# ---------------------------------------------------------------------------------------------
# Events → chunks
# ---------------------------------------------------------------------------------------------


class CompletionStream:
    """Writer of an answer's events as chunks, in OpenAI's form."""

    media_type = sse.MEDIA_TYPE
    keep_alive = sse.KEEP_ALIVE

    def __init__(self, head: AnswerHead, timeline: Timeline) -> None:
        self.head = head
        self._timeline = timeline
        self._open = (
            f'data: {{"id":{sse.quote(head.id)},"object":"text_completion",'
            f'"created":{head.created},"model":{sse.quote(head.model)},'
            f'"system_fingerprint":"{head.fingerprint}","choices":['
        )
        self._close = (',"usage":null}' if head.include_usage else "}") + "\n\n"
        self._text_open = [f'{self._open}{{"index":{row},"text":' for row in range(head.rows)]
        self._text_close = f',"logprobs":null,"finish_reason":null}}]{self._close}'
        self._finished: dict[int, Finished] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._logprobs = [CompletionLogprobs(head.logprobs or 0) for _ in range(head.rows)]

    def write(self, progress: Progress) -> bytes:
        """Return the chunks of one step, ready for the wire."""
        out, counted = "", self.head.counts_all_along or self.head.times == "always"
        for row, events in progress:
            for event in events:
                match event:
                    case TextDelta(text, ()) | ReasoningDelta(text, ()) if not counted:
                        out += self._text_open[row] + sse.quote(text) + self._text_close
                    case TextDelta(text, logprobs) | ReasoningDelta(text, logprobs):
                        scores = self._logprobs[row].write(logprobs) if logprobs else None
                        out += self._choice(row, text, scores, None)
                    case Started(ids=ids):
                        self._prompts[row] = ids
                    case Finished(reason):
                        self._finished[row] = event
                        out += self._choice(row, "", None, _REASONS[reason], event)
        return out.encode("ascii")

    def end(self) -> bytes:
        return last_chunks(self.head, self._open, self._finished)

    def fail(self, error: MLXManagerError) -> bytes:
        """Return the event of an error, which takes the place of `end`."""
        return sse.event(error_body(error)).encode("ascii")

    def _choice(
        self,
        row: int,
        text: str,
        logprobs: dict[str, Any] | None,
        reason: FinishReason | None,
        end: Finished | None = None,
    ) -> str:
        choice = {"index": row, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if end is not None and end.stop_sequence is not None:
            choice["stop_reason"] = end.stop_sequence
        if end is not None and self.head.return_ids:
            choice |= {"prompt_token_ids": self._prompts[row], "token_ids": end.ids}
        close = self._close
        if self.head.counts_all_along:
            close = counts_so_far(self._timeline.rows[row], self._finished.get(row))
        beside = timed(self.head, self._timeline, row, ended=end is not None)
        return f"{self._open}{sse.dump(choice)}]{beside}{close}"


# ---------------------------------------------------------------------------------------------
# Events → body
# ---------------------------------------------------------------------------------------------


class CompletionAnswer:
    """Collector of an answer's events into the body of a response."""

    def __init__(self, head: AnswerHead, timeline: Timeline) -> None:
        self.head = head
        self._timeline = timeline
        self._texts: list[list[str]] = [[] for _ in range(head.rows)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(head.rows)]
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, progress: Progress) -> None:
        for row, events in progress:
            for event in events:
                match event:
                    case Started(ids=ids):
                        self._prompts[row] = ids
                    case TextDelta(text, logprobs) | ReasoningDelta(text, logprobs):
                        self._texts[row].append(text)
                        self._logprobs[row] += logprobs
                    case Finished():
                        self._finished[row] = event

    def body(self) -> Iterator[str]:
        """A `CompletionResponse`, once every row has finished."""
        ends = [self._finished[row] for row in range(len(self._texts))]
        around = CompletionResponse(
            id=self.head.id,
            object="text_completion",
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=[],
            usage=total((end.usage for end in ends), self.head.n),
            **whole_times(self.head, self._timeline),
        )
        choices = (self._choice(index, row) for index, row in enumerate(self._given()))
        return filled(whole(around), "choices", joined(choices))

    def _given(self) -> list[int]:
        """Return the rows that are returned: all, or the likeliest `best` of each prompt."""
        rows = list(range(self.head.rows))
        if self.head.best is None:
            return rows
        groups = (rows[i : i + self.head.n] for i in range(0, len(rows), self.head.n))
        ranked = (sorted(group, key=self._likelihood, reverse=True) for group in groups)
        return [row for group in ranked for row in group[: self.head.best]]

    def _likelihood(self, row: int) -> float:
        """Return the mean log probability of the tokens that were drawn and are shown."""
        shown, end = self._logprobs[row], self._finished[row]
        if self.head.echo:
            # The token that ends the text has a score, too, then.
            ended = end.reason == "stop" and end.stop_sequence is None
            shown = shown[end.usage.prompt_tokens : -1 if ended else None]
        scores = [s.logprob for s in shown if s.logprob is not None]
        return sum(scores) / len(scores) if scores else -inf

    def _choice(self, index: int, row: int) -> Iterator[str]:
        asked, end = self.head.logprobs, self._finished[row]
        choice = CompletionChoice(
            index=index,
            text="".join(self._texts[row]),
            logprobs=None,
            finish_reason=_REASONS[end.reason],
        )
        if end.stop_sequence is not None:
            choice.stop_reason = end.stop_sequence
        if self.head.return_ids:
            choice.prompt_token_ids = list(self._prompts[row])
            choice.token_ids = list(end.ids)
        if asked is None:
            return iter((whole(choice),))
        scores = CompletionLogprobs(asked).pieces(self._logprobs[row])
        return filled(whole(choice), "logprobs", scores, "null")

"""Conversion of a model's tokens to the answer's events: text, thinking, tool calls, stop strings.

The same for streaming and not, and one token at a time: however the same output is cut into
tokens, the joined events are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_manager.mlx_server.core import (
    Event,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStarted,
)
from mlx_manager.mlx_server.formats import OutputFormat, Region
from mlx_manager.mlx_server.text.detokenizer import Detokenizer
from mlx_manager.mlx_server.text.markup import Markup, text_delta


class OutputParser:
    """One answer's parser.

    `stop_strings` end the content before the occurrence that is complete first (of several that
    are complete at once, the longest). Thinking and tool calls are not searched, and no
    occurrence reaches across them. One that is complete within the first `min_tokens` is text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        output: OutputFormat,
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        # Until a stop string counts.
        self._tokens_left = min_tokens
        marked = output.edges or output.calls or output.header or stop_strings
        self._markup = Markup(output, stop_strings) if marked else None
        # Nothing can follow: a stop string matched, or the only call allowed has been made.
        self.complete = False
        self._logprobs: list[TokenLogprob] = []
        # Log probabilities of a call's opener, which is text after all if no call follows.
        self._opener: list[TokenLogprob] = []
        self._reasoning_tokens = 0

    @property
    def stopped(self) -> str | None:
        """Return the stop string that ended the text, if one did."""
        return self._markup.stopped if self._markup else None

    @property
    def called(self) -> bool:
        """Return whether there are tool calls, all of them complete: an answer that stops then does
        so to make them."""
        return self._markup is not None and self._markup.called

    @property
    def region(self) -> Region:
        """Return the region that the next token will be part of, as far as is known."""
        return self._markup.region if self._markup else "content"

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of thinking tokens so far, markers excluded."""
        return self._reasoning_tokens

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> list[Event]:
        """Return the events that this token completes; once `complete`, none.

        `logprob` goes with the text or thinking that the token becomes part of.
        """
        text = self._detokenizer.add(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
        if self._markup is None:
            return self._with_logprobs([text_delta(text)]) if text else []
        before = self._markup.region
        self._markup.may_stop = self._tokens_left <= 0
        self._tokens_left -= 1
        events = self._markup.feed(text)
        self.complete = self._markup.complete
        if before == self._markup.region and not self._markup.strayed:
            self._reasoning_tokens += before == "reasoning"
        elif not events:
            # The tokens so far were a marker, and nobody sees those.
            self._opener = self._logprobs if self._markup.region == "calls" else []
            self._logprobs = []
        return self._with_logprobs(events)

    def finish(self, reason: FinishReason) -> list[Event]:
        """Return the events of all text held back. `reason` "length": the output was cut off."""
        text = self._detokenizer.finish()
        if reason == "length":
            # Half a character, whose other half was cut off, is none.
            text = text.rstrip("\ufffd")
        if self._markup is None:
            return self._with_logprobs([text_delta(text)]) if text or self._logprobs else []
        if self._markup.complete:
            return []
        events = self._markup.feed(text) + self._markup.finish(reason)
        if not events and self._logprobs and self._markup.region == "content" and not self.called:
            # An event for log probabilities of tokens without a text, after the last that had one.
            events = [text_delta("")]
        return self._with_logprobs(events)

    def _with_logprobs(self, events: list[Event]) -> list[Event]:
        if not (self._logprobs or self._opener) or not events:
            return events
        first = events[0]
        if isinstance(first, TextDelta | ReasoningDelta):
            called = any(isinstance(event, ToolCallStarted) for event in events)
            opener = [] if called else self._opener
            events[0] = replace(first, logprobs=(*opener, *self._logprobs))
        self._logprobs.clear()
        self._opener = []
        return events

"""A model's tokens to the answer's events: text, thinking, tool calls, stop strings.

The same for streaming and not, and one token at a time: however the same output is cut into
tokens, the joined events are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.generate import TextStateMachine

from mlx_manager.mlx_server.core import Event, FinishReason, TextDelta, TokenLogprob
from mlx_manager.mlx_server.engine.detokenizer import Detokenizer
from mlx_manager.mlx_server.formats import OutputFormat, Region


class OutputParser:
    """One answer's parser.

    `stop_strings` end the content before the occurrence that is complete first (of several that
    are complete at once, the longest); thinking and tool calls are not searched.
    """

    def __init__(
        self, detokenizer: Detokenizer, output: OutputFormat, stop_strings: Sequence[str] = ()
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = _StopMatcher(stop_strings) if stop_strings else None
        self._logprobs: list[TokenLogprob] = []
        self._region: Region = output.initial
        self.reasoning_tokens = 0
        self.calls = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched if self._stops else None

    @property
    def complete(self) -> bool:
        """Nothing can follow: a stop string matched, or the only call allowed has been made."""
        return self.stopped is not None

    @property
    def region(self) -> Region:
        """What the next token will be part of, as far as is known."""
        return self._region

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> list[Event]:
        """The events that this token completes. After `complete` there are none.

        `logprob` goes with the text or thinking that the token completes.
        """
        if self.complete:
            return []
        if logprob is not None:
            self._logprobs.append(logprob)
        return self._text(self._detokenizer.add(token_id))

    def finish(self, reason: FinishReason) -> list[Event]:
        """Whatever was held back. `reason` "length" means that the output was cut off.

        If calls were made (`calls` > 0), the answer's own reason is "tool_calls".
        """
        if self.complete:
            return []
        events = self._text(self._detokenizer.finish())
        if self._stops and not self.complete:
            events += self._deliver(self._stops.flush())
        return events

    def _text(self, text: str) -> list[Event]:
        return self._deliver(self._stops.feed(text) if self._stops else text)

    def _deliver(self, text: str) -> list[Event]:
        if not text:
            return []
        logprobs, self._logprobs = tuple(self._logprobs), []
        return [TextDelta(text, logprobs)]


class _StopMatcher:
    """Passes text on up to the first stop string, holding back what may be its beginning."""

    def __init__(self, strings: Sequence[str]) -> None:
        edges = [(string, number) for number, string in enumerate(strings)]
        machine = TextStateMachine({"text": edges} | {number: [] for _, number in edges})
        self._strings = strings
        self._state = machine.make_state("text")
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        self._state, segments = TextStateMachine.split(self._state, text)
        if len(segments) > 1:
            self.matched = self._strings[segments[1][0]]
        passed: str = segments[0][1]
        return passed

    def flush(self) -> str:
        held: str
        self._state, held, _ = TextStateMachine.flush(self._state)
        return held

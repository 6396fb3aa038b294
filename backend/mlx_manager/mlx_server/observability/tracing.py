"""Spans for LogFire, or any OpenTelemetry backend it is pointed at, when the owner asks for them.

Nothing here is imported from LogFire or OpenTelemetry before `start_tracing`: without the extra
nothing changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlx_manager.mlx_server.core import Finished, GenerationRequest, Progress, Started
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.observability.observer import Observation, Observer

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.trace import Span


def start_tracing(app: FastAPI) -> Observer:
    """Configure LogFire and instrument `app`. Works with no token and no network.

    Raises:
        MLXManagerError: LogFire is not installed.
    """
    try:
        import logfire
    except ImportError:
        raise MLXManagerError(
            "MLX_SERVER_LOGFIRE_ENABLED is set, but LogFire is not installed: "
            "pip install 'mlx-manager[logfire]'."
        ) from None
    logfire.configure(service_name="mlx-manager", send_to_logfire="if-token-present", console=False)
    # A span for each message sent would be one for every token.
    logfire.instrument_fastapi(app, record_send_receive=False)
    return SpanTracer()


class SpanTracer:
    """One span a call, which lives until the stream ends. Named after OpenTelemetry's GenAI rules.

    The span is never made the current one: a stream may end in another context than it began in.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        from opentelemetry import trace

        self._tracer = trace.get_tracer("mlx_manager")
        self._error = trace.StatusCode.ERROR
        self._clock = clock

    @contextmanager
    def observe(self, requests: Sequence[GenerationRequest]) -> Iterator[Observation]:
        first = requests[0]
        span = self._tracer.start_span(f"generate {first.model}", attributes=_asked(requests))
        observation = SpanObservation(span, requests, self._clock)
        try:
            yield observation
        except MLXManagerError as error:
            span.set_attribute("error.type", error.code)
            span.set_status(self._error, error.message)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            span.set_attribute("mlx_manager.cancelled", True)
            raise
        finally:
            observation.end()


def _asked(requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    first = requests[0]
    sampling = first.sampling
    asked = {
        "gen_ai.operation.name": "generate",
        "gen_ai.request.model": first.model,
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.min_p": sampling.min_p,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.repetition_penalty": sampling.repetition_penalty,
        "gen_ai.request.stop_sequences": list(first.stop.strings),
        "gen_ai.request.choice.count": len(requests),
        "gen_ai.response.id": first.request_id,
    }
    return {name: value for name, value in asked.items() if value is not None}


class SpanObservation:
    """Writes what happens to one call's rows on its span."""

    def __init__(
        self, span: Span, requests: Sequence[GenerationRequest], clock: Callable[[], float]
    ) -> None:
        self._span = span
        self._clock = clock
        self._start = clock()
        self._waits_for_first = True
        self._ends: dict[int, Finished] = {}
        # The n answers to a prompt share the very object; it is counted once.
        self._prompts = {
            row
            for row, request in enumerate(requests)
            if row == 0 or request.prompt is not requests[row - 1].prompt
        }

    def leased(self) -> None:
        self._span.add_event("leased")

    def add(self, step: Progress) -> None:
        for row, events in step:
            if self._waits_for_first and type(events[-1]) is not Started:
                self._waits_for_first = False
                waited = self._clock() - self._start
                self._span.set_attribute("gen_ai.server.time_to_first_token", waited)
            if type(end := events[-1]) is Finished:
                self._ends[row] = end

    def end(self) -> None:
        ends = [self._ends[row] for row in sorted(self._ends)]
        usages = {row: end.usage for row, end in self._ends.items()}
        prompt = sum(usages[row].prompt_tokens for row in self._prompts & usages.keys())
        cached = sum(usages[row].cached_tokens for row in self._prompts & usages.keys())
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": prompt,
                "gen_ai.usage.cache_read.input_tokens": cached,
                "gen_ai.usage.output_tokens": sum(end.usage.completion_tokens for end in ends),
                "gen_ai.response.finish_reasons": [end.reason for end in ends],
            }
        )
        self._span.end()

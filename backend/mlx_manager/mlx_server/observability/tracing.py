"""Spans of each call and its phases, for LogFire and any OpenTelemetry collector, when asked for.

Names follow OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/); what they have no name for is
under `mlx_manager.`. Nothing of LogFire or OpenTelemetry is imported before `start_tracing`:
without the extras nothing changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_manager import __version__
from mlx_manager.mlx_server.config import TraceTargets
from mlx_manager.mlx_server.core import (
    Admitted,
    Conversation,
    Finished,
    GenerationRequest,
    JsonObject,
    JsonSchema,
    Progress,
    Started,
)
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.observability.observer import Observation, Observer
from mlx_manager.mlx_server.observability.records import prompts

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer

SERVICE = "mlx-manager"
TRACES_PATH = "/v1/traces"
UNTRACED = "/health,/livez,/readyz,/metrics"
"""Paths that are not traced, since monitoring requests them every few seconds."""
TOLD = ["x-request-id"]
"""Response headers in spans: requests refused before they become calls are found by id, too."""

EXPORT_SECONDS = 5
"""Timeout of an export, and so the longest delay of the shutdown by an absent collector."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """Tracing that was started. `close` sends the remaining spans, which may take seconds."""

    observer: Observer
    close: Callable[[], object]


def start_tracing(app: FastAPI, targets: TraceTargets) -> Tracing:
    """Instrument `app`, and send its spans to `targets`. Needs no token and no network.

    A `traceparent` that comes with a request is gone on from.

    Raises:
        MLXManagerError: a package is not installed; the message says which extra has it.
    """
    processors = [] if targets.otlp is None else [otlp_processor(targets.otlp)]
    if targets.logfire:
        return _with_logfire(app, processors)
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    named = {"service.name": SERVICE, "service.version": __version__}
    provider = TracerProvider(resource=Resource.create(named))
    for processor in processors:
        provider.add_span_processor(processor)
    FastAPIInstrumentor.instrument_app(
        app,
        tracer_provider=provider,
        excluded_urls=UNTRACED,
        # A span for each message sent would be one for every token.
        exclude_spans=["receive", "send"],
        http_capture_headers_server_response=TOLD,
    )
    return Tracing(SpanTracer(provider.get_tracer("mlx_manager", __version__)), provider.shutdown)


def _with_logfire(app: FastAPI, processors: list[SpanProcessor]) -> Tracing:
    try:
        import logfire
    except ImportError:
        raise MLXManagerError(
            "MLX_SERVER_LOGFIRE_ENABLED is set, but LogFire is not installed: "
            "pip install 'mlx-manager-server[logfire]'."
        ) from None
    from opentelemetry import trace

    logfire.configure(
        service_name=SERVICE,
        service_version=__version__,
        send_to_logfire="if-token-present",
        console=False,
        distributed_tracing=True,
        additional_span_processors=processors,
    )
    logfire.instrument_fastapi(
        app,
        record_send_receive=False,
        excluded_urls=UNTRACED,
        http_capture_headers_server_response=TOLD,
    )
    return Tracing(SpanTracer(trace.get_tracer("mlx_manager", __version__)), logfire.force_flush)


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends spans to an OTLP/HTTP collector, in batches, from a thread of its own.

    endpoint: the collector's base URL; the path of traces is added unless it is there.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise MLXManagerError(
            "MLX_SERVER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed: "
            "pip install 'mlx-manager-server[otel]'."
        ) from None
    url = endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
    return BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_SECONDS))


class SpanTracer:
    """One span a call, which lives until the stream ends, with a child for each phase of a row.

    None is ever made the current one: a stream may end in another context than it began in.
    """

    def __init__(self, tracer: Tracer, clock: Callable[[], int] = time.time_ns) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._error = trace.StatusCode.ERROR
        self._inside = trace.set_span_in_context
        self._clock = clock

    @contextmanager
    def observe(self, requests: Sequence[GenerationRequest]) -> Iterator[Observation]:
        asked = _asked(requests)
        name = f"{asked['gen_ai.operation.name']} {requests[0].model}"
        start = self._clock()
        span = self._tracer.start_span(name, start_time=start, attributes=asked)
        context = self._inside(span)

        def phase(name: str, start: int, end: int, said: dict[str, Any]) -> None:
            child = self._tracer.start_span(name, context, start_time=start, attributes=said)
            child.end(end)

        observation = SpanObservation(span, phase, requests, start, self._clock)
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
    asked: dict[str, Any] = {
        "gen_ai.operation.name": _operation(first),
        "gen_ai.provider.name": "mlx_manager",
        "gen_ai.request.model": first.model,
        "mlx_manager.request.id": first.caller.request_id,
        "mlx_manager.protocol": first.caller.protocol,
        "mlx_manager.key": first.caller.key,
    }
    if _generates(first):
        asked |= _parameters(first)
        # By the conventions only if there is more than one.
        asked["gen_ai.request.choice.count"] = len(requests) if len(requests) > 1 else None
    return {name: value for name, value in asked.items() if value not in (None, "", [])}


def _parameters(request: GenerationRequest) -> dict[str, Any]:
    sampling = request.sampling
    structured = isinstance(request.constraint, JsonObject | JsonSchema)
    return {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.stop_sequences": list(request.stop.strings),
        "gen_ai.output.type": "json" if structured else "text",
        "mlx_manager.request.min_p": sampling.min_p,
        "mlx_manager.request.repetition_penalty": sampling.repetition_penalty,
    }


def _operation(request: GenerationRequest) -> str:
    if not _generates(request):
        return request.caller.protocol
    return "chat" if isinstance(request.prompt, Conversation) else "text_completion"


def _generates(request: GenerationRequest) -> bool:
    return request.caller.protocol not in ("embeddings", "rerank")


Phase = Callable[[str, int, int, dict[str, Any]], None]
"""Makes a span of a phase that is over: its name, start and end in ns since 1970, attributes."""


class SpanObservation:
    """Observation that writes the events of one call's rows to its span, and a span for each phase.

    queue and load: until a model that was not in memory is there. Then for each row: queue, until
    its prompt's turn, rendering and tokenising included; prefill, until its first token; decode,
    until its end. What is cut short ends with the call, in the phase that it was in. Vectors and
    scores have no phases of their own.

    Phases have their tokens under `mlx_manager.`: collectors add up all `gen_ai.usage` of a trace.
    """

    def __init__(
        self,
        span: Span,
        phase: Phase,
        requests: Sequence[GenerationRequest],
        start: int,
        clock: Callable[[], int],
    ) -> None:
        self._span = span
        self._phase = phase
        self._clock = clock
        self._requests = requests
        self._generates = _generates(requests[0])
        self._start = self._queued = start
        self._loading: int | None = None
        self._leased = False
        self._admitted: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._starts: dict[int, Started] = {}
        self._ends: dict[int, Finished] = {}

    def loading(self) -> None:
        self._loading = self._clock()
        self._phase("queue", self._start, self._loading, {})

    def leased(self) -> None:
        self._leased = True
        if self._loading is not None:
            self._queued = self._clock()
            self._phase("load", self._loading, self._queued, {})

    def add(self, step: Progress) -> None:
        for row, events in step:
            if row not in self._starts:
                for event in events:
                    if type(event) is Admitted:
                        self._admitted[row] = self._clock()
                    elif type(event) is Started:
                        self._begin(row, event)
            if type(end := events[-1]) is Finished:
                self._finish(row, end)

    def _begin(self, row: int, event: Started) -> None:
        now = self._clock()
        if not self._starts:
            first = self._requests[0]
            self._span.set_attributes(
                {
                    "gen_ai.response.id": first.request_id,
                    "gen_ai.response.model": first.model,
                    "gen_ai.response.time_to_first_chunk": (now - self._start) / 1e9,
                }
            )
        self._starts[row] = event
        self._begun[row] = now
        turn = max(self._queued, now - int(event.prefill * 1e9))
        self._row_phase("queue", row, self._queued, turn, {})
        tokens = {
            "mlx_manager.prompt_tokens": event.prompt_tokens,
            "mlx_manager.cached_tokens": event.cached_tokens,
        }
        self._row_phase("prefill", row, turn, now, tokens)

    def _finish(self, row: int, end: Finished) -> None:
        self._ends[row] = end
        said = {
            "mlx_manager.completion_tokens": end.usage.completion_tokens,
            "mlx_manager.finish_reason": end.reason,
        }
        self._row_phase("decode", row, self._begun[row], self._clock(), said)

    def _row_phase(self, name: str, row: int, start: int, end: int, said: dict[str, Any]) -> None:
        if self._generates:
            self._phase(name, start, end, said | {"mlx_manager.row": row})

    def end(self) -> None:
        now = self._clock()
        self._cut_short(now)
        if self._starts:
            asked = [self._starts[row] for row in prompts(self._requests) if row in self._starts]
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": sum(start.prompt_tokens for start in asked),
                    "gen_ai.usage.cache_read.input_tokens": sum(s.cached_tokens for s in asked),
                }
            )
        if self._starts and self._generates:
            drawn = sum(self._drawn(row) for row in self._starts)
            self._span.set_attribute("gen_ai.usage.output_tokens", drawn)
        if self._ends and self._generates:
            ends = [self._ends[row] for row in sorted(self._ends)]
            # How many of a row that was cut short were thinking nobody knows.
            thinking = sum(end.usage.reasoning_tokens for end in ends)
            self._span.set_attributes(
                {
                    "gen_ai.usage.reasoning.output_tokens": thinking,
                    "gen_ai.response.finish_reasons": [end.reason for end in ends],
                }
            )
        self._span.end(now)

    def _drawn(self, row: int) -> int:
        """Tokens of a row's answer, delivered or not."""
        if row in self._ends:
            return self._ends[row].usage.completion_tokens
        return self._starts[row].drawn()

    def _cut_short(self, now: int) -> None:
        if not self._leased:
            if self._loading is None:
                self._phase("queue", self._start, now, {})
            else:
                self._phase("load", self._loading, now, {})
            return
        for row in range(len(self._requests)):
            if row in self._ends:
                continue
            if row in self._starts:
                said = {"mlx_manager.completion_tokens": self._drawn(row)}
                self._row_phase("decode", row, self._begun[row], now, said)
                continue
            turn = self._admitted.get(row)
            self._row_phase("queue", row, self._queued, turn or now, {})
            if turn is not None:
                self._row_phase("prefill", row, turn, now, {})

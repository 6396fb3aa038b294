"""Spans of each call and its phases, for LogFire and any OpenTelemetry collector, when asked for.

Names follow OpenTelemetry's conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/); what they have no name for is
under `mlx_manager.`. Nothing of LogFire or OpenTelemetry is imported before `start_tracing`:
without the extras nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_manager import __version__
from mlx_manager.mlx_server.config import TraceTargets
from mlx_manager.mlx_server.core import (
    Conversation,
    GenerationRequest,
    JsonObject,
    JsonSchema,
)
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.observability.observer import Observer
from mlx_manager.mlx_server.timeline import CANCELLED, RowTimeline, Timeline

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Tracer

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

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._error = trace.StatusCode.ERROR
        self._inside = trace.set_span_in_context

    def begin(
        self, requests: Sequence[GenerationRequest], timeline: Timeline
    ) -> Callable[[], object]:
        """Start the span of a call. Return the function that writes and ends it."""
        asked = _asked(requests)
        name = f"{asked['gen_ai.operation.name']} {requests[0].model}"
        at = partial(moment, timeline)
        span = self._tracer.start_span(name, start_time=at(0.0), attributes=asked)
        context = self._inside(span)

        def phase(name: str, start: float, end: float, said: dict[str, Any]) -> None:
            child = self._tracer.start_span(name, context, start_time=at(start), attributes=said)
            child.end(at(end))

        def end() -> None:
            if timeline.failure == CANCELLED:
                span.set_attribute("mlx_manager.cancelled", True)
            elif timeline.failure:
                span.set_attribute("error.type", timeline.failure)
                span.set_status(self._error, timeline.message)
            for each in phases(timeline, generates=_generates(requests[0])):
                phase(*each)
            span.set_attributes(_told(requests[0], timeline))
            span.end(at(timeline.seconds))

        return end


def moment(timeline: Timeline, seconds: float) -> int:
    """Return nanoseconds since 1970 of a moment in seconds since the call arrived."""
    return int((timeline.arrived + seconds) * 1e9)


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


Phase = tuple[str, float, float, dict[str, Any]]
"""A phase's name, its start and end in seconds since the call arrived, and attributes."""


def phases(timeline: Timeline, *, generates: bool) -> Iterator[Phase]:
    """Yield the phases of a call that has ended.

    queue and load: until a model that was not in memory is there. Then for each row: queue, until
    its prompt's turn, rendering and tokenising included; prefill, until its first token; decode,
    until its end. What is cut short ends with the call, in the phase that it was in. Vectors and
    scores have no phases of their own.

    Phases have their tokens under `mlx_manager.`: collectors add up all `gen_ai.usage` of a trace.
    """
    queued = 0.0
    if timeline.loading is not None:
        yield "queue", 0.0, timeline.loading, {}
        queued = timeline.seconds if timeline.leased is None else timeline.leased
        yield "load", timeline.loading, queued, {}
    elif timeline.leased is None:
        yield "queue", 0.0, timeline.seconds, {}
    if timeline.leased is None or not generates:
        return
    for row, line in enumerate(timeline.rows):
        for name, start, end, said in _row_phases(line, queued, timeline.seconds):
            yield name, start, end, said | {"mlx_manager.row": row}


def _row_phases(line: RowTimeline, queued: float, end: float) -> Iterator[Phase]:
    begun = line.started
    if begun is None:
        turn = end if line.admitted is None else line.admitted
        yield "queue", queued, turn, {}
        if line.admitted is not None:
            yield "prefill", turn, end, {}
        return
    turn = max(queued, line.first - begun.prefill)
    yield "queue", queued, turn, {}
    tokens = {
        "mlx_manager.prompt_tokens": begun.prompt_tokens,
        "mlx_manager.cached_tokens": begun.cached_tokens,
    }
    yield "prefill", turn, line.first, tokens
    said: dict[str, Any] = {"mlx_manager.completion_tokens": line.usage.completion_tokens}
    if line.finished is not None:
        end = line.end
        said["mlx_manager.finish_reason"] = line.finished.reason
    yield "decode", line.first, end, said


def _told(first: GenerationRequest, timeline: Timeline) -> dict[str, Any]:
    """Return the attributes of a call that has ended."""
    begun = [line for line in timeline.rows if line.started is not None]
    if not begun:
        return {}
    usage = timeline.usage
    told: dict[str, Any] = {
        "gen_ai.response.id": first.request_id,
        "gen_ai.response.model": first.model,
        "gen_ai.response.time_to_first_chunk": min(line.first for line in begun),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
    if _generates(first):
        told["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if timeline.reasons:
            # The number of a row that was cut short is not known.
            told["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
            told["gen_ai.response.finish_reasons"] = list(timeline.reasons)
    return told

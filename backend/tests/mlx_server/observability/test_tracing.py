from __future__ import annotations

import asyncio
import builtins
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pictures import data_url, in_base64, picture
from scripted import MODEL, ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import Started
from mlx_manager.mlx_server.errors import GenerationFailed, MLXManagerError
from mlx_manager.mlx_server.main import create_app

logfire = pytest.importorskip("logfire", reason="the logfire extra is not installed")

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "max_tokens": 9}


class Spans:
    """What has been exported, by the span's name."""

    def __init__(self) -> None:
        from logfire.testing import TestExporter

        self.exporter = TestExporter()

    def named(self, name: str) -> list[dict[str, Any]]:
        spans = self.exporter.exported_spans_as_dict()
        return [span for span in spans if span["name"] == name]

    def phases(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """A call's children, in the order of their beginnings and ends."""
        inside = (
            span
            for span in self.exporter.exported_spans_as_dict()
            if span["parent"] and span["parent"]["span_id"] == call["context"]["span_id"]
        )
        return sorted(inside, key=lambda span: (span["start_time"], span["end_time"]))

    def one(self) -> dict[str, Any]:
        [span] = self.named(f"chat {MODEL}")
        return span["attributes"]


def capture() -> Spans:
    """Have everything exported to a list from now on, and nowhere else."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    spans = Spans()
    processor = SimpleSpanProcessor(spans.exporter)
    logfire.configure(send_to_logfire=False, console=False, additional_span_processors=[processor])
    return spans


@pytest.fixture(autouse=True)
def _nothing_captured_afterwards() -> Iterator[None]:
    yield
    logfire.configure(send_to_logfire=False, console=False)


def traced(*steps: Any) -> tuple[Any, ScriptedPool, Spans]:
    """An application that configures LogFire as it would for real, and then a capture."""
    pool = ScriptedPool(ScriptedBackend(lambda _: steps))
    app = create_app(MLXServerSettings(logfire_enabled=True), pool)
    return app, pool, capture()


async def post(app: Any, body: dict[str, Any]) -> httpx.Response:
    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(CHAT, json=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_span_with_its_parameters_and_counts(stream: bool):
    app, _, spans = traced(*says("Hel", "lo", prompt_tokens=7, cached=4))
    await post(app, HELLO | {"stream": stream})
    told = spans.one()
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.max_tokens"] == 9
    assert told["gen_ai.usage.input_tokens"] == 7
    assert told["gen_ai.usage.cache_read.input_tokens"] == 4
    assert told["gen_ai.usage.output_tokens"] == 2
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.response.time_to_first_chunk"] >= 0
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "mlx_manager"
    assert told["mlx_manager.protocol"] == "chat"
    [http] = spans.named(f"POST {CHAT}")
    [generation] = spans.named(f"chat {MODEL}")
    assert generation["parent"]["span_id"] == http["context"]["span_id"]
    assert http["start_time"] <= generation["start_time"] <= generation["end_time"]


async def test_no_span_is_made_for_single_tokens():
    app, _, spans = traced(*says(*"twenty tokens or more"))
    await post(app, HELLO | {"stream": True})
    # HTTP's, the call's, and its phases.
    assert len(spans.exporter.exported_spans_as_dict()) == 2 + 3


async def test_a_calls_phases_follow_each_other_from_its_start_to_its_end():
    app, _, spans = traced(*says("Hel", "lo", prompt_tokens=7, cached=4))
    await post(app, HELLO)
    [call] = spans.named(f"chat {MODEL}")
    queue, prefill, decode = spans.phases(call)
    assert [queue["name"], prefill["name"], decode["name"]] == ["queue", "prefill", "decode"]
    assert call["start_time"] == queue["start_time"]
    assert queue["end_time"] == prefill["start_time"]
    assert prefill["end_time"] == decode["start_time"]
    assert decode["end_time"] <= call["end_time"]
    assert prefill["attributes"]["mlx_manager.prompt_tokens"] == 7
    assert prefill["attributes"]["mlx_manager.cached_tokens"] == 4
    assert decode["attributes"]["mlx_manager.completion_tokens"] == 2
    assert decode["attributes"]["mlx_manager.finish_reason"] == "stop"


async def test_the_wait_for_a_model_that_is_not_in_memory_is_a_phase():
    app, pool, spans = traced(*says("Hello"))
    pool.loading = asyncio.Event()
    pool.loading.set()
    await post(app, HELLO)
    [found] = spans.named(f"chat {MODEL}")
    names = [span["name"] for span in spans.phases(found)]
    assert names == ["queue", "load", "queue", "prefill", "decode"]


async def test_a_call_for_a_model_there_is_not_has_no_response():
    app, _, spans = traced(*says("Hello"))
    await post(app, HELLO | {"model": "another"})
    [call] = spans.named("chat another")
    assert [span["name"] for span in spans.phases(call)] == ["queue", "load"]
    told = call["attributes"]
    assert told["error.type"] == "model_not_found"
    assert not any(name.startswith(("gen_ai.response.id", "gen_ai.usage")) for name in told)


def test_vectors_are_a_span_without_what_only_answers_have():
    from opentelemetry import trace

    from mlx_manager.mlx_server.core import Caller, Finished, GenerationRequest, Tokens, Usage
    from mlx_manager.mlx_server.observability.observer import observed
    from mlx_manager.mlx_server.observability.tracing import SpanTracer
    from mlx_manager.mlx_server.timeline import Timeline

    spans = capture()
    asked = GenerationRequest(MODEL, Tokens(()), max_tokens=0, caller=Caller("", "embeddings"))
    timeline = Timeline.of([asked])
    with observed([SpanTracer(trace.get_tracer("tests"))], [asked], timeline):
        timeline.leased = timeline.now()
        timeline.follow(0, [Started(5), Finished("stop", Usage(5, 0))], 0)
    [call] = spans.named(f"embeddings {MODEL}")
    assert spans.phases(call) == []
    told = call["attributes"]
    assert told["gen_ai.usage.input_tokens"] == 5
    unfit = ("gen_ai.usage.output_tokens", "gen_ai.request.temperature", "gen_ai.output.type")
    assert not set(unfit) & set(told)


async def test_an_answers_id_is_on_the_span_of_its_http_request():
    app, _, spans = traced(*says("Hello"))
    answer = await post(app, HELLO | {"temperature": -1})
    [http] = spans.named(f"POST {CHAT}")
    told = http["attributes"]["http.response.header.x_request_id"]
    assert told == (answer.headers["x-request-id"],)


async def test_several_answers_count_their_prompt_once():
    app, _, spans = traced(*says("Hello", prompt_tokens=7))
    await post(app, HELLO | {"n": 3})
    told = spans.one()
    assert told["gen_ai.request.choice.count"] == 3
    assert told["gen_ai.usage.input_tokens"] == 7
    assert told["gen_ai.usage.output_tokens"] == 3
    [call] = spans.named(f"chat {MODEL}")
    rows = [span["attributes"]["mlx_manager.row"] for span in spans.phases(call)]
    assert sorted(rows) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


async def test_only_the_call_has_usage_so_that_a_traces_sum_is_right():
    app, _, spans = traced(*says("Hello", prompt_tokens=7))
    await post(app, HELLO)
    for span in spans.exporter.exported_spans_as_dict():
        counted = any(name.startswith("gen_ai.usage") for name in span["attributes"])
        assert counted == (span["name"] == f"chat {MODEL}")


async def test_a_failure_is_on_the_span():
    app, _, spans = traced([Started(7)], GenerationFailed("the step failed"))
    await post(app, HELLO | {"stream": True})
    told = spans.one()
    assert told["error.type"] == "generation_failed"
    assert told["gen_ai.usage.input_tokens"] == 7
    assert told["gen_ai.usage.output_tokens"] == 0


def test_tokens_of_rows_that_were_cut_short_are_counted_too():
    from opentelemetry import trace

    from mlx_manager.mlx_server.core import Finished, GenerationRequest, Text, TextDelta, Usage
    from mlx_manager.mlx_server.observability.observer import observed
    from mlx_manager.mlx_server.observability.tracing import SpanTracer
    from mlx_manager.mlx_server.timeline import Timeline

    spans = capture()
    asked = [GenerationRequest(MODEL, Text("x"))] * 3
    timeline = Timeline.of(asked)
    with observed([SpanTracer(trace.get_tracer("tests"))], asked, timeline):
        timeline.leased = timeline.now()
        timeline.follow(0, [Started(7), Finished("stop", Usage(7, 2))], 2)
        timeline.follow(1, [Started(7)], 1)
        timeline.follow(1, [TextDelta("five")], 5)
    told = spans.named(f"text_completion {MODEL}")[0]["attributes"]
    assert told["gen_ai.usage.output_tokens"] == 2 + 5
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    counts = [span["attributes"]["mlx_manager.completion_tokens"] for span in spans.named("decode")]
    assert counts == [2, 5]


async def test_the_span_lives_until_the_stream_ends():
    gate = asyncio.Event()
    first, *rest = says("Hello")
    app, pool, spans = traced(first, gate, *rest)
    call = asyncio.create_task(post(app, HELLO | {"stream": True}))
    await pool.backend.until(lambda backend: backend.running == 1)
    assert spans.named(f"chat {MODEL}") == []
    gate.set()
    await call
    assert spans.one()["gen_ai.usage.output_tokens"] == 1


async def test_a_cancelled_request_says_so():
    from opentelemetry import trace

    from mlx_manager.mlx_server.core import GenerationRequest, Text
    from mlx_manager.mlx_server.engine.stream import steps
    from mlx_manager.mlx_server.observability.tracing import SpanTracer
    from mlx_manager.mlx_server.services.inference import Inference

    spans = capture()
    pool = ScriptedPool(ScriptedBackend(lambda _: [[Started(1)], asyncio.Event()]))
    tracer = SpanTracer(trace.get_tracer("tests"))
    asked = [GenerationRequest(MODEL, Text("x"))]
    progress = steps(Inference(pool, [tracer]).generate(asked).run)
    await anext(progress)
    await progress.aclose()
    [told] = spans.named(f"text_completion {MODEL}")
    assert told["attributes"]["mlx_manager.cancelled"] is True
    [cut] = spans.named("decode")
    assert cut["end_time"] == told["end_time"]


def test_asking_for_logfire_without_having_it_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "logfire":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MLXManagerError, match=r"mlx-manager-server\[logfire\]"):
        create_app(MLXServerSettings(logfire_enabled=True))


def test_nothing_of_logfire_is_needed_when_it_is_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "logfire", None)
    create_app(MLXServerSettings())


async def test_no_span_has_a_picture():
    app, pool, spans = traced(*says("Red."))
    pool.seeing = True
    image = {"type": "image_url", "image_url": {"url": data_url(picture())}}
    answer = await post(app, HELLO | {"messages": [{"role": "user", "content": [image]}]})
    assert answer.status_code == 200, answer.text
    exported = repr(spans.exporter.exported_spans_as_dict())
    assert f"chat {MODEL}" in exported
    assert in_base64(picture())[24:64] not in exported
    assert "IHDR" not in exported

"""Spans of a real server, as they arrive at a collector over OTLP/HTTP."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, live_server

pytest.importorskip("opentelemetry.proto", reason="the otel extra is not installed")

from observability.collector import Collector, attributes, collecting

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.main import create_app

CHAT = "/v1/chat/completions"
MODEL = "mlx-manager/demo"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SECRET = "the-word-nobody-else-may-read"
HELLO = {"messages": [{"role": "user", "content": f"Hello! {SECRET}"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that has been used and has ended, so that all its spans are there."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with (
        live_server(log, otlp_endpoint=collector.url) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        traced = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine-1"}
        client.post(CHAT, json=HELLO | {"stream": True}, headers=traced).raise_for_status()
        client.post(CHAT, json=HELLO | {"n": 2}).raise_for_status()
        client.get("/health").raise_for_status()
    yield running
    assert "Traceback" not in log.read_text()


def test_a_call_arrives_as_a_span_with_its_phases_in_the_callers_trace(
    collector: Collector, server: LiveServer
) -> None:
    calls = collector.named(f"chat {MODEL}")
    call = next(span for span in calls if span.trace_id.hex() == TRACE)
    [http] = [span for span in collector.spans if span.parent_span_id.hex() == PARENT]
    assert http.name == f"POST {CHAT}"
    assert call.parent_span_id == http.span_id
    told = attributes(list(call.attributes))
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "mlx_manager"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == MODEL
    assert told["gen_ai.usage.output_tokens"] == 8
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["mlx_manager.request.id"] == "mine-1"
    phases = [span for span in collector.spans if span.parent_span_id == call.span_id]
    assert [span.name for span in phases] == ["load", "queue", "prefill", "decode"]
    edges = [edge for s in phases for edge in (s.start_time_unix_nano, s.end_time_unix_nano)]
    assert edges == sorted(edges)
    assert call.start_time_unix_nano == edges[0]
    assert edges[-1] <= call.end_time_unix_nano
    decode = attributes(list(phases[-1].attributes))
    assert decode["gen_ai.usage.output_tokens"] == 8
    assert collector.resources[0]["service.name"] == "mlx-manager"


def test_each_row_has_its_own_phases(collector: Collector, server: LiveServer) -> None:
    calls = collector.named(f"chat {MODEL}")
    call = next(span for span in calls if span.trace_id.hex() != TRACE)
    phases = [span for span in collector.spans if span.parent_span_id == call.span_id]
    rows = [
        attributes(list(span.attributes))["mlx_manager.row"]
        for span in phases
        if span.name == "decode"
    ]
    assert sorted(rows) == [0, 1]


def test_nothing_that_was_said_leaves_and_probes_leave_no_spans(
    collector: Collector, server: LiveServer
) -> None:
    assert collector.spans
    assert not any(SECRET in str(span) for span in collector.spans)
    assert not any("/health" in span.name for span in collector.spans)


def test_a_collector_that_is_not_there_hinders_nobody_and_the_log_stays_readable(
    tmp_path: Path,
) -> None:
    with (
        live_server(tmp_path / "log.txt", otlp_endpoint="http://127.0.0.1:9") as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        answer = client.post(CHAT, json=HELLO, headers={"x-request-id": "mine-3"})
        assert answer.status_code == 200
    assert running.process.returncode == 0
    log = (tmp_path / "log.txt").read_text()
    [line] = [line for line in log.splitlines() if CHAT in line]
    assert " info " in line
    assert f"POST {CHAT} 200" in line
    assert MODEL in line
    assert line.endswith("mine-3")
    assert "\x1b" not in log
    assert "127.0.0.1" in log.partition("error")[2]


def test_asking_for_a_collector_without_having_opentelemetry_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MLXManagerError, match=r"mlx-manager\[otel\]"):
        create_app(MLXServerSettings(otlp_endpoint="http://127.0.0.1:9"))

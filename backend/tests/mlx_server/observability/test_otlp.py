"""How spans are sent. `clients/test_phoenix.py` has what a collector makes of them."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import live_server

pytest.importorskip("opentelemetry.proto", reason="the otel extra is not installed")

from observability.collector import Collector, collecting

from mlx_manager import __version__
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.main import create_app

CHAT = "/v1/chat/completions"
MODEL = "mlx-manager/demo"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Collector:
    """What a server has sent of a call that was traced before it, once that server has ended."""
    log = tmp_path_factory.mktemp("traced") / "log.txt"
    traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with (
        collecting() as collector,
        live_server(log, otlp_endpoint=collector.url) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        client.post(CHAT, json=HELLO, headers=traced).raise_for_status()
        for probe in ("/health", "/livez", "/readyz", "/metrics"):
            client.get(probe).raise_for_status()
    return collector


def test_spans_say_which_server_they_are_of_and_arrive_before_it_ends(collector: Collector) -> None:
    assert collector.named(f"chat {MODEL}")
    for resource in collector.resources:
        assert resource["service.name"] == "mlx-manager"
        assert resource["service.version"] == __version__


def test_a_call_is_a_span_of_the_callers_trace_and_its_phases_are_inside(
    collector: Collector,
) -> None:
    (http,), (call,) = collector.named(f"POST {CHAT}"), collector.named(f"chat {MODEL}")
    assert http.parent_span_id.hex() == PARENT
    assert call.parent_span_id == http.span_id
    phases = [span for span in collector.spans if span.parent_span_id == call.span_id]
    phases.sort(key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert {span.trace_id.hex() for span in (http, call, *phases)} == {TRACE}


def test_nothing_that_was_said_leaves_and_probes_leave_no_spans(collector: Collector) -> None:
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert b"Hello!" not in b"".join(span.SerializeToString() for span in collector.spans)


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
    with pytest.raises(MLXManagerError, match=r"mlx-manager-server\[otel\]"):
        create_app(MLXServerSettings(otlp_endpoint="http://127.0.0.1:9"))

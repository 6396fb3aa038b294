"""The spans of a real server as Phoenix has them, a collector that people look at traces with.

It runs in a process of its own and is asked over its API. It takes a minute to start, and more to
be installed: `MLX_TEST_ALL=1 make clients` gets it, and `MLX_TEST_ALL=1` has it asked. Every run has
`test_tracing` and `test_otlp`, which say what is sent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import PROGRAM, live_server
from processes import announced
from thorough import slow

from mlx_manager import demo_model

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http", reason="the otel extra is not installed"
)

pytestmark = slow

ENVIRONMENT = Path(__file__).parents[3] / ".venv-clients" / "phoenix"
READY = re.compile(r"Uvicorn running on (http://\S+)")
CHAT = "/v1/chat/completions"
MODEL = "mlx-manager/demo"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SECRET = "the-word-nobody-else-may-read"
EMITTED = 5 + 8 + 7 + 3 + 1 + 5
"""Spans of what `drive` asks for."""


@contextmanager
def phoenix(folder: Path) -> Iterator[httpx.Client]:
    """Phoenix on a free port, with its database in `folder`; it asks nobody on the network."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    own = {
        "HOME": str(folder),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": "0",
        "PHOENIX_GRPC_PORT": "0",
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
        "PHOENIX_LOG_MIGRATIONS": "false",
    }
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(
            [ENVIRONMENT / "bin" / "phoenix", "serve"],
            env=kept | own,
            cwd=folder,
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            url = announced(process, READY, "Phoenix")
            with httpx.Client(base_url=url, timeout=60) as client:
                yield client
        finally:
            process.kill()


def drive(client: httpx.Client) -> None:
    def chat(text: str = "Hello!", **fields: Any) -> dict[str, Any]:
        message = {"role": "user", "content": f"{text} {SECRET}"}
        return {"messages": [message], "max_tokens": 8, "temperature": 0, **fields}

    traced = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "streamed"}
    client.post(CHAT, json=chat(stream=True), headers=traced).raise_for_status()
    client.post(CHAT, json=chat(n=2), headers={"x-request-id": "two"}).raise_for_status()
    other = chat(model="other")
    client.post(CHAT, json=other, headers={"x-request-id": "loads"}).raise_for_status()
    refused = client.post(CHAT, json=chat("so " * 9000), headers={"x-request-id": "too-long"})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    wrong = client.post(CHAT, json=chat(temperature=-1), headers={"x-request-id": "wrong"})
    assert wrong.status_code == 422
    endless = chat("Count!", stream=True, max_tokens=4000, ignore_eos=True)
    gone = {"x-request-id": "gone"}
    with client.stream("POST", CHAT, json=endless, headers=gone) as answer:
        next(answer.iter_lines())
    # Its end is the caller's doing, and not the server's.
    while not re.search(r"num_requests_running\S* 0", client.get("/metrics").text):
        pass
    client.get("/health").raise_for_status()


@dataclass(frozen=True, slots=True)
class Traces:
    """The spans, as Phoenix's API tells of them."""

    spans: list[dict[str, Any]]

    def call(self, request_id: str) -> dict[str, Any]:
        [call] = (
            span
            for span in self.spans
            if span["attributes"].get("mlx_manager.request.id") == request_id
        )
        return call

    def http(self, request_id: str) -> dict[str, Any]:
        """The HTTP request, found by a header of its answer."""
        name = "http.response.header.x_request_id"
        [span] = (span for span in self.spans if span["attributes"].get(name) == [request_id])
        return span

    def children(self, parent: dict[str, Any]) -> list[dict[str, Any]]:
        """In the order of their beginnings and ends."""
        inside = [s for s in self.spans if s["parent_id"] == parent["context"]["span_id"]]
        return sorted(inside, key=edges)


def edges(span: dict[str, Any]) -> tuple[datetime, datetime]:
    return datetime.fromisoformat(span["start_time"]), datetime.fromisoformat(span["end_time"])


def names(spans: list[dict[str, Any]]) -> list[str]:
    return [span["name"] for span in spans]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traces]:
    if not (ENVIRONMENT / ".setup").exists():
        pytest.skip("phoenix is not installed in .venv-clients; `make clients` installs it")
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(Path(demo_model.__file__).parent, models / "other")
    log = models / "log.txt"
    with phoenix(tmp_path_factory.mktemp("phoenix")) as collector:
        # As docs/operations.md says it is given a project of its own.
        named = ("env", "OTEL_RESOURCE_ATTRIBUTES=openinference.project.name=ours")
        command = (*named, str(PROGRAM), "serve")
        with (
            live_server(log, command, models_dir=models, otlp_endpoint=collector.base_url) as ours,
            httpx.Client(base_url=ours.url, timeout=60) as client,
        ):
            drive(client)
        yield Traces(stored(collector))
    assert "Traceback" not in log.read_text()


def stored(collector: httpx.Client) -> list[dict[str, Any]]:
    """All the spans, once they are in its database: it writes them a little later."""
    deadline = time.monotonic() + 60
    while True:
        answer = collector.get("/v1/projects/ours/spans", params={"limit": 1000})
        spans = answer.json()["data"] if answer.status_code == 200 else []
        if len(spans) >= EMITTED:
            return spans
        assert time.monotonic() < deadline, names(spans)


def test_a_call_is_a_span_of_the_callers_trace_and_its_phases_follow_each_other(traces: Traces):
    http, call = traces.http("streamed"), traces.call("streamed")
    assert http["name"] == f"POST {CHAT}"
    assert http["context"]["trace_id"] == call["context"]["trace_id"] == TRACE
    assert http["parent_id"] == PARENT
    assert traces.children(http) == [call]
    assert call["name"] == f"chat {MODEL}"
    phases = traces.children(call)
    assert names(phases) == ["queue", "prefill", "decode"]
    moments = [moment for phase in phases for moment in edges(phase)]
    assert moments == sorted(moments)
    (start, end), (opened, closed) = edges(call), edges(http)
    assert opened <= start == moments[0]
    assert moments[-1] <= end <= closed


def test_phoenix_reads_the_conventions(traces: Traces):
    call = traces.call("streamed")
    assert call["span_kind"] == "LLM"
    told = call["attributes"]
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == MODEL
    # Its own names for what it understood, by which it shows, sorts and adds up.
    assert told["llm.model_name"] == MODEL
    assert told["llm.token_count.prompt"] == told["gen_ai.usage.input_tokens"] > 8
    assert told["llm.token_count.completion"] == told["gen_ai.usage.output_tokens"] == 8
    assert told["llm.finish_reason"] == "length"
    parameters = json.loads(told["llm.invocation_parameters"])
    assert (parameters["temperature"], parameters["max_tokens"]) == (0, 8)


def test_tokens_are_counted_once_a_trace(traces: Traces):
    for name in ("streamed", "two", "loads"):
        call = traces.call(name)
        within = [
            s for s in traces.spans if s["context"]["trace_id"] == call["context"]["trace_id"]
        ]
        for count in ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"):
            assert [s for s in within if count in s["attributes"]] == [call]
    assert traces.call("two")["attributes"]["gen_ai.usage.output_tokens"] == 16


def test_each_row_has_its_own_phases(traces: Traces):
    phases = traces.children(traces.call("two"))
    assert sorted((s["attributes"]["mlx_manager.row"], s["name"]) for s in phases) == [
        (row, name) for row in (0, 1) for name in ("decode", "prefill", "queue")
    ]


def test_a_model_that_has_to_be_loaded_shows_how_long_that_took(traces: Traces):
    call = traces.call("loads")
    assert call["name"] == "chat other"
    assert names(traces.children(call)) == ["queue", "load", "queue", "prefill", "decode"]


def test_a_refusal_is_an_error_where_it_was_found_out(traces: Traces):
    call = traces.call("too-long")
    assert call["status_code"] == "ERROR"
    assert "tokens" in call["status_message"]
    assert call["attributes"]["error.type"] == "context_length_exceeded"
    assert "gen_ai.response.id" not in call["attributes"]
    assert names(traces.children(call)) == ["queue"]
    # It never was a call.
    wrong = traces.http("wrong")
    assert wrong["attributes"]["http.status_code"] == 422
    assert traces.children(wrong) == []


def test_a_caller_who_leaves_is_seen_to_leave_in_the_middle(traces: Traces):
    call = traces.call("gone")
    assert call["status_code"] == "UNSET"
    assert call["attributes"]["mlx_manager.cancelled"] is True
    phases = traces.children(call)
    assert names(phases) == ["queue", "prefill", "decode"]
    assert edges(phases[-1])[1] == edges(call)[1]
    assert call["attributes"]["gen_ai.usage.input_tokens"] > 8
    assert 0 < call["attributes"]["gen_ai.usage.output_tokens"] < 4000


def test_nothing_that_was_said_leaves_and_probes_leave_no_spans(traces: Traces):
    assert len(traces.spans) == EMITTED
    told = json.dumps(traces.spans)
    assert SECRET not in told
    assert "/health" not in told
    assert "/metrics" not in told

"""`/metrics` of a real server against what was sent to it and what it answered."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from here import start_here
from live import LiveServer, live_server
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedBackend, ScriptedPool, says

from mlx_manager import demo_model
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import Caller, Finished, GenerationRequest, Started, Text, Usage
from mlx_manager.mlx_server.engine.stream import UNREAD
from mlx_manager.mlx_server.errors import ModelNotFound
from mlx_manager.mlx_server.main import create_app
from mlx_manager.mlx_server.observability.metrics import Metrics
from mlx_manager.mlx_server.observability.observer import Recorder
from mlx_manager.mlx_server.services.inference import Inference
from mlx_manager.mlx_server.timeline import RowTimeline, Timeline

GRAFANA = Path(__file__).parents[4] / "docs" / "grafana"
MODEL = "mlx-manager/demo"
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
Labels = frozenset[tuple[str, str]]


class Scrape:
    """Samples by name and labels; those that are missing are 0, as nothing was counted."""

    def __init__(self, text: str) -> None:
        self._samples: dict[tuple[str, Labels], float] = {}
        self.names: set[str] = set()
        for family in text_string_to_metric_families(text):
            self.names.add(family.name)
            for sample in family.samples:
                labels = frozenset(sample.labels.items())
                assert (sample.name, labels) not in self._samples
                self._samples[sample.name, labels] = sample.value

    def get(self, name: str, **labels: str) -> float:
        return self._samples.get((f"mlx_manager_{name}", frozenset(labels.items())), 0.0)

    def has(self, name: str, **labels: str) -> bool:
        return (f"mlx_manager_{name}", frozenset(labels.items())) in self._samples

    def values(self, label: str) -> set[str]:
        return {dict(labels)[label] for _, labels in self._samples if label in dict(labels)}

    def of_model(self, name: str, **labels: str) -> float:
        return self.get(name, model_name=MODEL, **labels)


class Change:
    """What two scrapes differ by."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._before = before
        self._after = after

    def __call__(self, name: str, **labels: str) -> float:
        return self._after.of_model(name, **labels) - self._before.of_model(name, **labels)

    def any_model(self, name: str, **labels: str) -> float:
        return self._after.get(name, **labels) - self._before.get(name, **labels)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("server") / "log.txt", max_rows=4) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


def scrape(client: httpx.Client) -> Scrape:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scrape(answer.text)


def change(client: httpx.Client, act: Callable[[], Any]) -> tuple[Change, Any]:
    before = scrape(client)
    done = act()
    return Change(before, scrape(client)), done


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = client.post(CHAT, json=HELLO | fields).raise_for_status().json()
    return body


def test_counters_begin_at_zero_before_there_is_anything_to_count(client: httpx.Client) -> None:
    """A rate is of what a counter has grown by since Prometheus saw it first."""
    found = scrape(client)
    for name, labels in (
        ("request_success_total", {"finished_reason": "stop"}),
        ("request_success_total", {"finished_reason": "abort"}),
        ("request_errors_total", {"code": "generation_failed"}),
        ("time_to_first_token_seconds_count", {}),
        ("request_generation_tokens_count", {}),
        ("model_evictions_total", {}),
    ):
        assert found.has(name, model_name=MODEL, **labels)
        assert found.of_model(name, **labels) == 0
    assert found.has("request_errors_total", model_name="", code="model_not_found")


def test_an_answer_is_counted_token_by_token(client: httpx.Client) -> None:
    counted, body = change(client, lambda: ask(client))
    tokens = body["usage"]["completion_tokens"]
    assert counted("prompt_tokens_total") == body["usage"]["prompt_tokens"]
    assert counted("generation_tokens_total") == tokens
    assert counted("inter_token_latency_seconds_count") == tokens - 1
    assert counted("request_success_total", finished_reason="stop") == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert counted(f"{name}_seconds_count") == 1
    for name in ("request_prefill_time", "request_decode_time", "request_load_time"):
        assert counted(f"{name}_seconds_count") == 1
    parts = [counted(f"request_{part}_time_seconds_sum") for part in ("prefill", "decode")]
    whole = counted("e2e_request_latency_seconds_sum")
    assert 0 < sum(parts) <= whole
    assert counted("time_to_first_token_seconds_sum") < whole
    assert counted("request_generation_tokens_sum") == tokens
    assert counted("engine_step_host_seconds_count") >= tokens
    answers = {"handler": CHAT, "method": "POST", "status": "200"}
    assert counted.any_model("http_requests_total", **answers) == 1


def test_a_stream_counts_like_any_other(client: httpx.Client) -> None:
    def stream() -> dict[str, Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        text = client.post(CHAT, json=HELLO | options).text
        chunks = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
        usage: dict[str, Any] = json.loads(chunks[-1])["usage"]
        return usage

    counted, usage = change(client, stream)
    assert counted("generation_tokens_total") == usage["completion_tokens"]
    assert counted("request_success_total", finished_reason="stop") == 1


def test_what_the_prefix_cache_had_is_counted_in_tokens(client: httpx.Client) -> None:
    question = [{"role": "user", "content": "Tell me all about pages, prefixes and caches. " * 8}]
    ask(client, messages=question, max_tokens=2)
    counted, body = change(client, lambda: ask(client, messages=question, max_tokens=2))
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert counted("prefix_cache_hits_total") == cached
    assert counted("prefix_cache_queries_total") == body["usage"]["prompt_tokens"]
    assert counted("request_success_total", finished_reason="length") == 1


def test_each_of_several_answers_is_a_row(client: httpx.Client) -> None:
    counted, body = change(client, lambda: ask(client, n=3, temperature=1, max_tokens=5))
    assert sum(
        counted("request_success_total", finished_reason=reason) for reason in ("stop", "length")
    ) == len(body["choices"])
    assert counted("generation_tokens_total") == body["usage"]["completion_tokens"]
    assert counted("prompt_tokens_total") == 3 * body["usage"]["prompt_tokens"]
    assert counted("request_params_n_sum") == 3
    assert counted("request_params_n_count") == 1
    assert counted("request_params_max_tokens_sum") == 15


def test_a_caller_who_leaves_is_an_abort(client: httpx.Client) -> None:
    def leave() -> None:
        body = HELLO | {"stream": True, "ignore_eos": True, "max_tokens": 2000}
        with client.stream("POST", CHAT, json=body) as answer:
            next(answer.iter_lines())

    before = scrape(client)
    leave()
    # The server learns of it when it next looks; then the row is gone and counted.
    while (after := scrape(client)).of_model(
        "request_success_total", finished_reason="abort"
    ) == before.of_model("request_success_total", finished_reason="abort"):
        pass
    counted = Change(before, after)
    assert counted("request_success_total", finished_reason="abort") == 1
    assert counted("e2e_request_latency_seconds_count") == 0
    assert counted("time_to_first_token_seconds_count") == 1
    assert 0 < counted("generation_tokens_total") < 2000


def test_failures_are_counted_by_code_and_answers_by_route(client: httpx.Client) -> None:
    def fail() -> list[int]:
        long = [{"role": "user", "content": "far too long " * 20_000}]
        return [
            client.post(CHAT, json=HELLO | {"messages": long}).status_code,
            client.post(CHAT, json=HELLO | {"model": "nobody/knows-it"}).status_code,
            client.post(CHAT, json=HELLO | {"temperature": -1}).status_code,
            client.get("/v1/responses/resp_that_is_not_there").status_code,
            client.get("/v1/responses/input_items/input_items").status_code,
            client.get("/some/path/or/other").status_code,
        ]

    counted, statuses = change(client, fail)
    assert statuses == [400, 404, 422, 404, 404, 404]
    assert counted("request_errors_total", code="context_length_exceeded") == 1
    assert counted("request_success_total", finished_reason="stop") == 0
    nobody = {"model_name": "", "code": "model_not_found"}
    assert counted.any_model("request_errors_total", **nobody) == 1
    for handler, method, status in (
        (CHAT, "POST", "400"),
        (CHAT, "POST", "404"),
        (CHAT, "POST", "422"),
        ("/v1/responses/{response_id}", "GET", "404"),
        ("/v1/responses/{response_id}/input_items", "GET", "404"),
        ("", "GET", "404"),
    ):
        labels = {"handler": handler, "method": method, "status": status}
        assert counted.any_model("http_requests_total", **labels) == 1


def test_no_path_makes_a_route_of_its_own(client: httpx.Client) -> None:
    paths = ("/v1/models", "/v1/models/{}", "/v1/responses/{}", "/v1/responses/{}/input_items")
    for number, path in enumerate(paths):
        for ending in ("", "%0A", "%0A%0A", "%0D", "%7B%7D"):
            client.get(path.format(f"name-{number}") + ending)
    described = client.get("/openapi.json").json()["paths"]
    assert scrape(client).values("handler") <= {"", *described, "/openapi.json", "/metrics"}


async def test_no_method_makes_a_label_of_its_own() -> None:
    """Not all servers' parsers have a list of them, as ours does."""
    app = create_app(MLXServerSettings(), ScriptedPool(ScriptedBackend(lambda _: says("Hello"))))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for method in ("GET", "PATCH", "ANYTHING", "ELSE"):
            await client.request(method, "/v1/nothing")
        found = Scrape((await client.get("/metrics")).text)
    assert found.values("method") == {"GET", "PATCH", ""}


def test_gauges_say_what_is_loaded_and_held(client: httpx.Client) -> None:
    ask(client)
    found = scrape(client)
    assert found.get("models_loaded") == 1
    assert found.of_model("model_loads_total") == 1
    assert found.of_model("num_requests_running") == found.of_model("num_requests_waiting") == 0
    assert found.of_model("kv_pages", state="held") == found.of_model("kv_cache_usage_perc") == 0
    assert found.of_model("kv_pages", state="cached") > 0
    memory = client.get("/debug/memory").json()
    for line in ("weights", "pages"):
        held = found.of_model("memory_ledger_bytes", line=line)
        assert held == memory["ledger"][f"{line}:{MODEL}"] > 0


def test_rows_in_flight_are_running_or_waiting(client: httpx.Client) -> None:
    body = HELLO | {"stream": True, "ignore_eos": True, "max_tokens": 3000, "n": 7}
    with client.stream("POST", CHAT, json=body) as answer:
        # Its end would close the connection.
        lines = answer.iter_lines()
        next(lines)
        while (found := scrape(client)).of_model("num_requests_waiting") != 3:
            pass
        assert found.of_model("num_requests_running") == 4
        assert 0 < found.of_model("kv_cache_usage_perc") < 1
    while scrape(client).of_model("num_requests_running"):
        pass


def test_dashboards_made_for_vllm_find_their_names(client: httpx.Client) -> None:
    ask(client)
    names = scrape(client).names
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
        *("generation_tokens", "request_success", "time_to_first_token_seconds"),
        *("inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_time_per_output_token_seconds", "request_prompt_tokens"),
        *("request_generation_tokens", "request_params_n", "request_params_max_tokens"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        "spec_decode_num_accepted_tokens",
    ):
        assert f"mlx_manager_{name}" in names


@pytest.mark.parametrize("file", ["mlx-manager.json", "mlx-manager.rules.yml"])
def test_dashboard_and_alerts_ask_only_for_what_there_is(client: httpx.Client, file: str) -> None:
    asked = {
        re.sub("_(total|bucket|sum|count)$", "", name)
        for name in re.findall(r"\bmlx_manager_\w+", (GRAFANA / file).read_text())
    }
    assert len(asked) > 5
    assert asked <= scrape(client).names


def test_openmetrics_is_given_to_who_asks_for_it(client: httpx.Client) -> None:
    ask(client)
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {sample.name for family in open_metrics(answer.text) for sample in family.samples}
    assert "mlx_manager_generation_tokens_total" in names
    assert names == {
        sample.name
        for family in open_metrics(answer.text)
        for sample in family.samples
        if sample.name.startswith(family.name)
    }


@pytest.mark.parametrize("version", ["abc", "1.x", "1.0.0-rc", "", "²"])
def test_a_version_that_is_no_number_is_as_good_as_none(client: httpx.Client, version: str) -> None:
    accept = f"application/openmetrics-text; version={version}".encode()
    answer = client.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert "mlx_manager_ready" in answer.text


async def test_metrics_answer_before_there_are_models() -> None:
    app = create_app(MLXServerSettings(), ScriptedPool(ScriptedBackend(lambda _: says("Hello"))))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert "mlx_manager_http_requests" in answer.text


IDLE = {
    "ledger": {"limit": 1, "available": 1},
    "mlx": {},
    "engines": {},
    "loads": {},
    "unloads": {},
    "failures": {},
    "down": {},
    "remotes": {},
}


def record(key: str = "", failure: str = "") -> Timeline:
    started, finished = Started(7, 4), Finished("stop", Usage(7, 3, 4))
    row = RowTimeline(None, started, 0.5, finished, 1.0)
    return Timeline(MODEL, Caller(key), (row,), leased=0.0, seconds=1.0, failure=failure)


@pytest.mark.parametrize("by_key", [False, True])
def test_keys_are_named_only_where_the_owner_wants_it(by_key: bool) -> None:
    metrics = Metrics(lambda: IDLE, lambda _: False, by_key=by_key)
    metrics.count_call(record(key="alice"))
    text = metrics.text("", ready=True)[0].decode()
    assert ("alice" in text) is by_key
    if by_key:
        found = Scrape(text)
        assert found.of_model("api_key_requests_total", key="alice", outcome="stop") == 1
        assert found.of_model("api_key_tokens_total", key="alice", type="generation") == 3


def test_calls_that_did_not_come_as_far_as_their_model_are_counted_as_its_own() -> None:
    metrics = Metrics(lambda: IDLE, lambda _: False)
    metrics.count_call(record())
    for model in (MODEL, "made/up"):
        waited = replace(record(failure="timeout"), model=model, leased=None, rows=())
        metrics.count_call(waited)
    found = Scrape(metrics.text("", ready=True)[0].decode())
    assert found.of_model("request_errors_total", code="timeout") == 1
    assert found.get("request_errors_total", model_name="", code="timeout") == 1


async def test_calls_that_end_while_their_model_is_loaded_for_the_first_time_name_it(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        shutil.copytree(Path(demo_model.__file__).parent, tmp_path / name)
    app = create_app(MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
    ):
        await app.state.server.started.wait()
        late = await client.post(CHAT, json=HELLO | {"model": "a", "timeout": 1e-6})
        left = asyncio.create_task(client.post(CHAT, json=HELLO | {"model": "b"}))
        while not len(app.state.server.calls):  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        nobody = await client.post(CHAT, json=HELLO | {"model": "nobody/knows-it"})
        assert (late.status_code, nobody.status_code) == (504, 404)
        found = Scrape((await client.get("/metrics")).text)
    assert found.get("request_errors_total", model_name="a", code="timeout") == 1
    assert found.get("request_success_total", model_name="b", finished_reason="abort") == 1
    assert found.get("request_errors_total", model_name="", code="model_not_found") == 1
    assert not found.has("request_errors_total", model_name="", code="timeout")


async def test_a_record_has_what_every_row_came_to() -> None:
    kept: list[Timeline] = []
    pool = ScriptedPool(ScriptedBackend(lambda _: says("Hel", "lo", prompt_tokens=7, cached=4)))
    prompt = Text("x")
    requests = [GenerationRequest(MODEL, prompt)] * 2
    caller = Caller("alice", "chat", "req-1")
    await Inference(pool, [Recorder([kept.append])], caller).generate(requests).run(UNREAD)
    [found] = kept
    assert found.caller == caller
    assert found.usage == Usage(7, 4, 4)
    assert found.outcome == "stop"
    assert [row.finished is not None for row in found.rows] == [True, True]
    assert 0 <= (found.leased or 0) <= found.rows[0].first <= found.rows[0].end <= found.seconds


async def test_a_record_of_a_call_that_never_had_a_model_says_so() -> None:
    kept: list[Timeline] = []
    pool = ScriptedPool(ScriptedBackend(lambda _: says("Hello")))
    asked = [GenerationRequest("nobody/knows-it", Text("x"))]
    with pytest.raises(ModelNotFound):
        await Inference(pool, [Recorder([kept.append])]).generate(asked).run(UNREAD)
    [found] = kept
    assert found.leased is None
    assert found.outcome == "model_not_found"
    assert found.usage == Usage(0, 0)

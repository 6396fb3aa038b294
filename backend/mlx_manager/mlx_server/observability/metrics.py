"""Metrics for Prometheus, under vLLM's names with our prefix: a dashboard made for `vllm:` reads
ours with that replaced by `mlx_manager_`. (No colon: it is kept for recording rules, and the client
library turns it into this where OpenMetrics is asked for.)

What happens in an engine is counted there, a step at a time, and read at each scrape; what a call
came to is added when it ends. A token costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from http import HTTPMethod
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mlx_manager.mlx_server.core import FinishReason
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    DownloadFailed,
    GenerationFailed,
    ModelGated,
    ModelLoadFailed,
    ModelLoadStalled,
    ModelNotFound,
    ModelNotSupported,
    ModelTooLarge,
    OutOfMemory,
    Overloaded,
    RequestTimedOut,
    ServerNotReady,
)
from mlx_manager.mlx_server.timeline import CANCELLED, RowTimeline, Timeline

PREFIX = "mlx_manager_"
MODEL = "model_name"

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
LATENCY_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_TIME_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
TOKEN_COUNT_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),
    *(200_000, 500_000),
)
CHOICES_BUCKETS = (1, 2, 5, 10, 20)
HTTP_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

LOAD_FAILURES = frozenset(
    error.code
    for error in (
        ModelLoadFailed,
        DownloadFailed,
        ModelLoadStalled,
        ModelNotSupported,
        ModelGated,
        ModelTooLarge,
        OutOfMemory,
    )
)
"""Codes of load errors, which are raised only for models that exist."""

FINISHED_REASONS = (*get_args(FinishReason), "abort")
USUAL_FAILURES = tuple(
    error.code
    for error in (ContextLengthExceeded, GenerationFailed, OutOfMemory, Overloaded, RequestTimedOut)
)
"""Codes of errors that end calls of a loaded model now and then."""

METHODS = frozenset(HTTPMethod)

Figures = Callable[[], Mapping[str, Any]]
"""The pool's figures; raises ServerNotReady while there is no pool."""


class Metrics:
    """One server's metrics, in a registry of their own. Methods may be called from any thread.

    offers: whether there is a model of that id. by_key: also count requests and tokens by the name
    of the API key.
    """

    def __init__(
        self, figures: Figures, offers: Callable[[str], bool], *, by_key: bool = False
    ) -> None:
        self._registry = CollectorRegistry()
        # Before all others, as they are read in this order: it has their counters begin.
        self._registry.register(EngineCollector(figures, self._begin))
        self._by_key = by_key
        self._offers = offers
        # Models that have been loaded: calls of theirs name them also when they are gone.
        self._served: set[str] = set()
        self._ready = Gauge(
            f"{PREFIX}ready", "1 while /readyz answers 200, 0 otherwise", registry=self._registry
        )
        self._success = self._counter(
            "request_success",
            "Answers by why they ended; abort: the caller went away",
            "finished_reason",
        )
        self._errors = self._counter("request_errors", "Calls that failed, by code", "code")
        self._first = self._times("time_to_first_token_seconds", FIRST_TOKEN_BUCKETS)
        self._whole = self._times("e2e_request_latency_seconds")
        self._load = self._times("request_load_time_seconds")
        self._queue = self._times("request_queue_time_seconds")
        self._prefill = self._times("request_prefill_time_seconds")
        self._decode = self._times("request_decode_time_seconds")
        self._inference = self._times("request_inference_time_seconds")
        self._per_token = self._times("request_time_per_output_token_seconds", TOKEN_TIME_BUCKETS)
        self._prompt = self._sizes("request_prompt_tokens", "Prompt tokens of a request")
        self._answer = self._sizes("request_generation_tokens", "Tokens generated for a request")
        self._most = self._sizes("request_params_max_tokens", "The max_tokens asked for")
        self._choices = self._sizes("request_params_n", "Answers asked for", CHOICES_BUCKETS)
        self._of_rows = (
            *(self._first, self._whole, self._load, self._queue, self._prefill, self._decode),
            *(self._inference, self._per_token, self._prompt, self._answer),
            *(self._most, self._choices),
        )
        self._errors.labels("", ModelNotFound.code)
        self._key_calls = self._counter("api_key_requests", "Calls by API key", "key", "outcome")
        self._key_tokens = self._counter("api_key_tokens", "Tokens by API key", "key", "type")
        self._http = Counter(
            f"{PREFIX}http_requests",
            "HTTP answers by route and status",
            ("handler", "method", "status"),
            registry=self._registry,
        )
        self._http_seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "Time until the last byte of an answer",
            ("handler", "method"),
            registry=self._registry,
            buckets=HTTP_BUCKETS,
        )
        self._lost = Counter(
            f"{PREFIX}audit_records_lost",
            "Calls that could not be written to the audit log",
            registry=self._registry,
        )

    def text(self, accept: str, ready: bool) -> tuple[bytes, str]:
        """All metrics, in the form of Prometheus's that `accept` prefers, and its content type.

        ready: whether /readyz says so.
        """
        self._ready.set(ready)
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # It names a version that is no number.
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def _begin(self, model: str) -> None:
        """Let the counters of a model's rows begin at 0, before its first row.

        Prometheus's rates leave out the first value of a counter that it has not seen before.
        """
        self._served.add(model)
        for reason in FINISHED_REASONS:
            self._success.labels(model, reason)
        for code in USUAL_FAILURES:
            self._errors.labels(model, code)
        for histogram in self._of_rows:
            histogram.labels(model)

    def count_call(self, timeline: Timeline) -> None:
        # A name nobody offers must not become a label: anyone could make as many as they like.
        if timeline.leased is not None or timeline.failure in LOAD_FAILURES:
            self._served.add(timeline.model)
        known = timeline.model in self._served or self._offers(timeline.model)
        model = timeline.model if known else ""
        match timeline.failure:
            case "":
                pass
            case code if code == CANCELLED:
                left = len(timeline.rows) - len(timeline.reasons)
                self._success.labels(model, "abort").inc(left)
            case code:
                self._errors.labels(model, code).inc()
        if timeline.leased is not None:
            self._load.labels(model).observe(timeline.leased)
            self._choices.labels(model).observe(len(timeline.rows))
        for row in timeline.rows:
            self._count_row(model, row, timeline.max_tokens)
        if self._by_key:
            self._count_key(model, timeline)

    def _count_row(self, model: str, row: RowTimeline, max_tokens: int | None) -> None:
        if row.started is not None:
            self._first.labels(model).observe(row.first)
            self._queue.labels(model).observe(row.started.queued)
            self._prefill.labels(model).observe(row.started.prefill)
            self._prompt.labels(model).observe(row.started.prompt_tokens)
        if row.finished is None or row.started is None:
            return
        tokens, decode = row.usage.completion_tokens, row.end - row.first
        self._success.labels(model, row.finished.reason).inc()
        self._whole.labels(model).observe(row.end)
        self._decode.labels(model).observe(decode)
        self._inference.labels(model).observe(row.started.prefill + decode)
        self._answer.labels(model).observe(tokens)
        if tokens > 1:
            self._per_token.labels(model).observe(decode / (tokens - 1))
        if max_tokens is not None:
            self._most.labels(model).observe(max_tokens)

    def _count_key(self, model: str, timeline: Timeline) -> None:
        key, usage = timeline.caller.key, timeline.usage
        self._key_calls.labels(model, key, timeline.outcome).inc()
        self._key_tokens.labels(model, key, "prompt").inc(usage.prompt_tokens)
        self._key_tokens.labels(model, key, "generation").inc(usage.completion_tokens)

    def count_response(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an answer. handler: path of the route, "" if there is none.

        The method is counted as "" if HTTP has none of that name. Both labels have few values then,
        whatever clients send.
        """
        method = method if method in METHODS else ""
        self._http.labels(handler, method, str(status)).inc()
        self._http_seconds.labels(handler, method).observe(seconds)

    def count_lost_records(self, records: int) -> None:
        self._lost.inc(records)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", text, (MODEL, *labels), registry=self._registry)

    def _times(self, name: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
        return Histogram(
            f"{PREFIX}{name}", TIMES[name], (MODEL,), registry=self._registry, buckets=buckets
        )

    def _sizes(
        self, name: str, text: str, buckets: tuple[float, ...] = TOKEN_COUNT_BUCKETS
    ) -> Histogram:
        return Histogram(
            f"{PREFIX}{name}", text, (MODEL,), registry=self._registry, buckets=buckets
        )


TIMES = {
    "time_to_first_token_seconds": "From the call's arrival to a row's first token",
    "e2e_request_latency_seconds": "From the call's arrival to the end of a row",
    "request_load_time_seconds": "From the call's arrival until its model was there",
    "request_queue_time_seconds": "A row's wait for its turn in the engine",
    "request_prefill_time_seconds": "From a row's turn to its first token",
    "request_decode_time_seconds": "From a row's first token to its last",
    "request_inference_time_seconds": "Prefill and decode together",
    "request_time_per_output_token_seconds": "A row's mean time between tokens",
}

ENGINE_GAUGES = {
    "kv_tokens": ("tokens_live", "Tokens whose keys and values are held"),
    "kv_page_bytes": ("page_bytes", "Size of a KV page, all layers together"),
    "kv_page_tokens": ("page_size", "Tokens in a KV page"),
}
ENGINE_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens, those found in the prefix cache included"),
    "generation_tokens": ("generated_tokens", "Tokens generated"),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found there"),
    "num_preemptions": ("pauses", "Rows that were paused because KV pages ran out"),
    "spec_decode_num_drafts": ("drafts", "Drafts that were tried, of several tokens each"),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Tokens of these"),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Those of them that were drawn"),
    "engine_steps": ("steps", "Steps of the engine"),
}
DRAFT_COUNTERS = {
    "drafts_by_method": ("drafts", "Drafts that were tried, by what told them"),
    "draft_tokens_by_method": ("tokens", "Tokens of these"),
    "accepted_tokens_by_method": ("accepted", "Those of them that were drawn"),
}
DISK_COUNTERS = {
    "prefix_disk_queries": ("queries", "Prompt tokens that were looked up on disk"),
    "prefix_disk_hits": ("hits", "Prompt tokens read from disk"),
    "prefix_disk_picture_queries": (
        "picture_queries",
        "Pictures whose features were looked up on disk",
    ),
    "prefix_disk_picture_hits": ("picture_hits", "Pictures whose features were read from disk"),
    "prefix_disk_read_bytes": ("read_bytes", "Bytes of prefixes and features read from disk"),
    "prefix_disk_written_bytes": (
        "written_bytes",
        "Bytes of prefixes and features written to disk",
    ),
    "prefix_disk_dropped_blocks": ("dropped", "Blocks of prefixes that were not written"),
}
DISK_GAUGES = {
    "prefix_disk_bytes": ("files_bytes", "Size of all models' prefixes on disk"),
    "prefix_disk_limit_bytes": ("budget", "Most that they may take"),
    "prefix_disk_written_today_bytes": ("written_today", "Bytes written since midnight (UTC)"),
}
ENCODER_COUNTERS = {
    "encoder_tokens": ("tokens", "Tokens that embedding models and rerankers have read"),
    "encoder_padding_tokens": ("padding", "Tokens that filled their batches up"),
    "encoder_batches": ("batches", "Batches that they have read"),
}
ENGINE_DISTRIBUTIONS = {
    "inter_token_latency_seconds": ("token_gaps", "Time between a row's tokens"),
    "engine_step_host_seconds": (
        "host_time",
        "Time of a step less the wait for its tokens; a CPU's computing is in it",
    ),
}


class EngineCollector(Collector):
    """Reads the engines, the models and the memory at each scrape. A model that is not loaded has
    no engine, so its counters end; loaded again they begin at 0, as after a restart.

    begin: told of each model that is loaded.
    """

    def __init__(self, figures: Figures, begin: Callable[[str], None]) -> None:
        self._figures = figures
        self._begin = begin

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        try:
            figures = self._figures()
        except ServerNotReady:
            return
        yield from _memory(figures["ledger"], figures["mlx"])
        yield from _models(figures)
        yield from _remotes(figures["remotes"])
        engines: Mapping[str, Any] = figures["engines"]
        for model in engines:
            self._begin(model)
        yield from _queues(engines)
        writers = {model: engine for model, engine in engines.items() if "token_gaps" in engine}
        yield from _engines(writers)
        yield from _disks(writers)
        readers = {model: engine for model, engine in engines.items() if "padding" in engine}
        yield from _counters(ENCODER_COUNTERS, readers)


def _remotes(remotes: Mapping[str, Any]) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        f"{PREFIX}remote_up",
        "1 for a server on another machine that answers for a model, 0 for one that fails",
        None,
        [MODEL, "server"],
    )
    requests = GaugeMetricFamily(
        f"{PREFIX}remote_requests", "Requests under way there", None, [MODEL, "server"]
    )
    for model, servers in remotes.items():
        for server in servers:
            up.add_metric([model, server.url], server.health == "up")
            requests.add_metric([model, server.url], server.requests)
    yield from (up, requests)


def _queues(engines: Mapping[str, Any]) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        f"{PREFIX}num_requests_running",
        "Rows being answered, prompts under way included",
        None,
        [MODEL],
    )
    waiting = GaugeMetricFamily(
        f"{PREFIX}num_requests_waiting", "Rows that wait for their turn", None, [MODEL]
    )
    for model, engine in engines.items():
        prompts = engine.get("prefilling", 0)
        running.add_metric([model], engine["running"] + prompts)
        waiting.add_metric([model], engine["waiting"])
    yield from (running, waiting)


def _counters(
    fields: Mapping[str, tuple[str, str]], engines: Mapping[str, Any]
) -> Iterator[Metric]:
    for name, (field, text) in fields.items():
        counter = CounterMetricFamily(f"{PREFIX}{name}", text, None, [MODEL])
        for model, engine in engines.items():
            counter.add_metric([model], engine[field])
        yield counter


def _engines(engines: Mapping[str, Any]) -> Iterator[Metric]:
    usage = GaugeMetricFamily(
        f"{PREFIX}kv_cache_usage_perc",
        "Share of the KV pages that rows hold, of those there could be; 1 is all",
        None,
        [MODEL],
    )
    pages = GaugeMetricFamily(f"{PREFIX}kv_pages", "KV pages by state", None, [MODEL, "state"])
    for model, engine in engines.items():
        usage.add_metric([model], engine["pages_held"] / max(1, engine["pages_attainable"]))
        for state in ("held", "cached", "free", "attainable"):
            pages.add_metric([model, state], engine[f"pages_{state}"])
    yield from (usage, pages)
    for name, (field, text) in ENGINE_GAUGES.items():
        gauge = GaugeMetricFamily(f"{PREFIX}{name}", text, None, [MODEL])
        for model, engine in engines.items():
            gauge.add_metric([model], engine[field])
        yield gauge
    yield from _counters(ENGINE_COUNTERS, engines)
    yield from _drafts(engines)
    for name, (field, text) in ENGINE_DISTRIBUTIONS.items():
        histogram = HistogramMetricFamily(f"{PREFIX}{name}", text, labels=[MODEL])
        for model, engine in engines.items():
            histogram.add_metric([model], list(_buckets(engine[field])), engine[field]["total"])
        yield histogram


def _drafts(engines: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the counts of drafts by the way in which they were found."""
    for name, (field, text) in DRAFT_COUNTERS.items():
        counter = CounterMetricFamily(f"{PREFIX}{name}", text, None, [MODEL, "method"])
        for model, engine in engines.items():
            for method, counts in engine["drafts_by_method"].items():
                counter.add_metric([model, method], counts[field])
        yield counter


def _disks(engines: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the figures of prefixes on disk, where some are kept. Gauges are of all models."""
    disks = {model: engine["disk"] for model, engine in engines.items() if engine["disk"]}
    if not disks:
        return
    yield from _counters(DISK_COUNTERS, disks)
    for name, (field, text) in DISK_GAUGES.items():
        gauge = GaugeMetricFamily(f"{PREFIX}{name}", text)
        # Each worker knows all files as of its last write.
        gauge.add_metric([], max(disk[field] for disk in disks.values()))
        yield gauge


def _buckets(distribution: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield Prometheus's buckets: each bound, and the count of all values up to the bound."""
    total = 0
    bounds = [*(str(bound) for bound in distribution["bounds"]), "+Inf"]
    for bound, count in zip(bounds, distribution["counts"], strict=True):
        total += count
        yield bound, total


def _memory(ledger: Mapping[str, int], mlx: Mapping[str, int]) -> Iterator[Metric]:
    limit = GaugeMetricFamily(f"{PREFIX}memory_limit_bytes", "What the ledger may promise")
    limit.add_metric([], ledger["limit"])
    available = GaugeMetricFamily(f"{PREFIX}memory_available_bytes", "What it may still promise")
    available.add_metric([], ledger["available"])
    promised = GaugeMetricFamily(
        f"{PREFIX}memory_ledger_bytes", "Memory by line of the ledger", None, ["line", MODEL]
    )
    for line, nbytes in ledger.items():
        if line not in ("limit", "available"):
            kind, _, model = line.partition(":")
            promised.add_metric([kind, model], nbytes)
    own = GaugeMetricFamily(f"{PREFIX}mlx_memory_bytes", "MLX's own figures", None, ["kind"])
    for kind, nbytes in mlx.items():
        own.add_metric([kind], nbytes)
    yield from (limit, available, promised, own)


def _models(figures: Mapping[str, Any]) -> Iterator[Metric]:
    loaded = GaugeMetricFamily(f"{PREFIX}models_loaded", "Models in memory")
    loaded.add_metric([], len(figures["engines"]))
    loads = CounterMetricFamily(f"{PREFIX}model_loads", "Models loaded", None, [MODEL])
    for model, times in figures["loads"].items():
        loads.add_metric([model], times)
    unloads = CounterMetricFamily(
        f"{PREFIX}model_evictions", "Models that left memory", None, [MODEL]
    )
    for model, times in (dict.fromkeys(figures["loads"], 0) | figures["unloads"]).items():
        unloads.add_metric([model], times)
    failures = CounterMetricFamily(
        f"{PREFIX}worker_failures", "Processes of models that have failed", None, [MODEL]
    )
    for model, times in (dict.fromkeys(figures["loads"], 0) | figures["failures"]).items():
        failures.add_metric([model], times)
    down = GaugeMetricFamily(
        f"{PREFIX}model_down",
        "1 for a model whose process has failed too often to be started again",
        None,
        [MODEL, "reason"],
    )
    for model, reason in figures["down"].items():
        down.add_metric([model, reason], 1)
    yield from (loaded, loads, unloads, failures, down)

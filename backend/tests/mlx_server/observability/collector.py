"""An OTLP/HTTP collector: takes what exporters send, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    found = getattr(value, kind)
    return [plain(item) for item in found.values] if kind == "array_value" else found


def attributes(pairs: list[KeyValue]) -> dict[str, object]:
    return {pair.key: plain(pair.value) for pair in pairs}


class Collector:
    """What has come in so far, and the address to send it to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.resources: list[dict[str, object]] = []
        self.spans: list[Span] = []

    def take(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            self.resources.append(attributes(list(group.resource.attributes)))
            for scope in group.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            known = self.path == "/v1/traces"
            if known:
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if known else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

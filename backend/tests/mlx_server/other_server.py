"""Somebody else's server with OpenAI's shapes, and its habits: nulls, no extras, odd endings."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

ANSWER = ["# A title\n\n", "Some *text*", ", a `word`.\n\n", "- one\n", "- two\n"]
THOUGHT = ["Let me ", "think."]
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


@dataclass
class OtherServer:
    """`bodies`: the requests so far. `left` is set when a client hangs up early.

    endless: answers go on until the client leaves. usage: whether streams end with it. status: of
    every answer to a chat request. strange: what everything is answered with instead, if anything.
    cut: streams end before their answers do. most: requests that were under way at once.
    models: the ids that are listed, each with `card`. moved: where all requests are redirected to.
    silent: streams begin, and nothing follows until the client leaves.
    """

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    endless: bool = False
    usage: bool = True
    status: int = 200
    strict: bool = False
    strange: bytes | None = None
    cut: bool = False
    models: tuple[str, ...] = ("other/one", "other/two")
    card: dict[str, Any] = field(default_factory=dict)
    moved: str = ""
    silent: bool = False
    running: int = 0
    most: int = 0


@contextmanager
def other_server() -> Iterator[OtherServer]:
    state = OtherServer()
    counting = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if state.moved:
                return self.redirect()
            if state.strange is not None:
                return self.send_bytes(200, state.strange)
            # As a proxy it is asked for a whole address.
            if urlsplit(self.path).path != "/v1/models":
                return self.send(404, {"detail": "Not Found"})
            models = [{"id": name, "object": "model", **state.card} for name in state.models]
            self.send(200, {"object": "list", "data": models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with counting:
                state.running += 1
                state.most = max(state.most, state.running)
            try:
                self.answer(body)
            finally:
                with counting:
                    state.running -= 1

        def answer(self, body: dict[str, Any]) -> None:
            state.bodies.append(body)
            state.headers.append({k.lower(): v for k, v in self.headers.items()})
            if state.moved:
                return self.redirect()
            if state.strange is not None:
                return self.send_bytes(200, state.strange)
            if state.status != 200:
                return self.send(state.status, {"error": {"message": "no such luck", "code": None}})
            if state.strict and "ignore_eos" in body:
                error = {"message": "Unrecognized request argument supplied: ignore_eos"}
                return self.send(400, {"error": error})
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                self.stream()
            except OSError:
                state.left.set()

        def redirect(self) -> None:
            self.send_response(307)
            self.send_header("location", state.moved)
            self.send_header("content-length", "0")
            self.end_headers()

        def stream(self) -> None:
            if state.silent:
                self.rfile.read(1)
                state.left.set()
                return
            self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})
            for thought in THOUGHT:
                self.event({"choices": [{"delta": {"reasoning": thought, "content": None}}]})
            for piece in ANSWER:
                self.event({"choices": [{"delta": {"content": piece}, "finish_reason": None}]})
            if state.cut:
                return
            while state.endless:
                self.event({"choices": [{"delta": {"content": "more "}}]})
            self.event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None})
            if state.usage:
                self.event({"choices": [], "usage": USAGE})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, body: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

        def send(self, status: int, body: dict[str, Any]) -> None:
            self.send_bytes(status, json.dumps(body).encode())

        def send_bytes(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield state
    finally:
        state.endless = False
        server.shutdown()
        with suppress(OSError):
            server.server_close()

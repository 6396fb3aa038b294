"""A hub of one folder, with the parts of Hugging Face's API that a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
CHUNK = 256 * 1024


@dataclass
class FakeHub:
    """`folder`'s files are the repository of every name without a word of `refusals`.

    cuts: how many more answers break off half-way. slow: set, answers stop half-way until it is
    cleared. strange: what it answers about every repository. ranges: the Range headers that came.
    sizes: what the hub claims of a file.
    """

    folder: Path
    url: str = ""
    commit: str = COMMIT
    cuts: int = 0
    held: threading.Event | None = None
    gated: bool = False
    strange: object = None
    ranges: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)

    def files(self) -> Mapping[str, int]:
        return {
            file.name: self.sizes.get(file.name, file.stat().st_size)
            for file in sorted(self.folder.iterdir())
            if file.is_file()
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        match path.strip("/").split("/"):
            case ["api", "models"]:
                self.send(self.listing())
            case ["api", "models", _, "missing", *_] | [_, "missing", *_]:
                self.refuse(401, "RepoNotFound")
            case ["api", "models", _, "broken", *_]:
                self.refuse(500, "")
            case ["api", "models", owner, name, "tree", *_]:
                self.send([self.leaf(n, s) for n, s in self.hub.files().items()])
            case ["api", "models", *_] if self.hub.strange is not None:
                self.send(self.hub.strange)
            case ["api", "models", owner, name, *_]:
                self.send(self.description(f"{owner}/{name}"))
            case [_, _, "resolve", _, *_] if self.hub.gated:
                self.refuse(403, "GatedRepo")
            case [_, _, "resolve", _, file]:
                self.file(file)
            case _:
                self.refuse(404, "")

    def listing(self) -> list[dict[str, object]]:
        """Return two models for every search."""
        words = parse_qs(urlsplit(self.path).query)["search"][0].replace(" ", "-")
        about = {"tags": ["mlx", "license:apache-2.0"], "likes": 3, "gated": False}
        dates = {"lastModified": "2026-01-02T03:04:05.000Z", "downloads": 1234}
        return [{"id": f"{owner}/{words}", **about, **dates} for owner in ("one", "other")]

    def description(self, name: str) -> dict[str, object]:
        config = json.loads((self.hub.folder / "config.json").read_text())
        files = self.hub.files().items()
        return {
            "id": name,
            "sha": self.hub.commit,
            "tags": ["mlx", "license:apache-2.0"],
            "gated": "manual" if self.hub.gated else False,
            "config": {"model_type": config["model_type"]},
            "siblings": [self.sibling(n, s) for n, s in files],
        }

    def leaf(self, name: str, size: int) -> dict[str, object]:
        described = {"type": "file", "path": name, "size": size, "oid": self.oid(name)}
        lfs = {"size": size, "oid": self.etag(name), "pointerSize": 134}
        return described | ({"lfs": lfs} if is_large(name) else {})

    def sibling(self, name: str, size: int) -> dict[str, object]:
        described = {"rfilename": name, "size": size, "blobId": self.oid(name)}
        lfs = {"size": size, "sha256": self.etag(name), "pointerSize": 134}
        return described | ({"lfs": lfs} if is_large(name) else {})

    def oid(self, name: str) -> str:
        return hashlib.sha1((self.hub.folder / name).read_bytes()).hexdigest()

    def etag(self, name: str) -> str:
        """What clients call the file's content by in their caches."""
        if is_large(name):
            return hashlib.sha256((self.hub.folder / name).read_bytes()).hexdigest()
        return self.oid(name)

    def file(self, name: str) -> None:
        content = (self.hub.folder / name).read_bytes()
        start = 0
        if given := self.headers.get("Range"):
            self.hub.ranges.append(given)
            start = int(given.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{self.etag(name)}"')
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            self.hub.fetched.append(name)
            with suppress(OSError):
                self.write(content[start:])

    def write(self, content: bytes) -> None:
        half = len(content) // 2
        if len(content) > CHUNK and self.hub.cuts:
            self.hub.cuts -= 1
            self.wfile.write(content[:half])
            self.close_connection = True
            return
        if len(content) > CHUNK and self.hub.held is not None:
            self.wfile.write(content[:half])
            self.wfile.flush()
            self.hub.held.wait(60)
            content = content[half:]
        self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send({"error": "refused"}, status, {"X-Error-Code": code} if code else {})

    def send(
        self, body: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def is_large(name: str) -> bool:
    """Whether the hub keeps it beside git, as git-lfs does."""
    return name.endswith(".safetensors")


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(folder)
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub, "__module__": __name__})
    )
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        if hub.held is not None:
            hub.held.set()
        server.shutdown()
        server.server_close()

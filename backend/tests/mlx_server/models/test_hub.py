from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlx_manager.mlx_server.models import hub

ANSWERS = {
    "gated": (403, "GatedRepo"),
    "missing": (401, "RepoNotFound"),
    "broken": (500, ""),
}
FETCH = """
import sys
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.models.hub import fetch
try:
    fetch(sys.argv[1])
except MLXManagerError as error:
    print(type(error).__name__, error.status, error)
"""


class Hub(BaseHTTPRequestHandler):
    """A hub that refuses `owner/<key of ANSWERS>`."""

    def do_GET(self) -> None:
        status, code = next(answer for name, answer in ANSWERS.items() if name in self.path)
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("repository", "outcome"),
    [
        ("owner/gated", "ModelGated 403 owner/gated is gated: accept its terms at"),
        ("owner/missing", "ModelNotFound 404 owner/missing is no repository"),
        ("owner/broken", "DownloadFailed 503 owner/broken could not be downloaded"),
        ("../etc/passwd", "ModelNotFound 404 ../etc/passwd is no repository"),
    ],
)
def test_refusals_of_the_hub_are_told_apart(
    endpoint: str, repository: str, outcome: str, tmp_path: Path
):
    process = subprocess.run(
        [sys.executable, "-c", FETCH, repository],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.startswith(outcome), process.stdout + process.stderr


def snapshot(cache: Path, repository: str, commit: str, *, main: bool = True) -> Path:
    root = cache / f"models--{repository.replace('/', '--')}"
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if main:
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / "main").write_text(commit)
    return folder


def test_only_complete_snapshots_count(tmp_path: Path):
    whole = snapshot(tmp_path, "owner/whole", "1")
    (whole / "model.safetensors").touch()
    sharded = snapshot(tmp_path, "owner/sharded", "1", main=False)
    (sharded / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    (sharded / "model-1.safetensors").touch()
    snapshot(tmp_path, "owner/config-only", "1")
    dangling = snapshot(tmp_path, "owner/dangling", "1")
    (dangling / "model.safetensors").symlink_to(tmp_path / "blobs" / "absent")
    (tmp_path / "models--owner--empty").mkdir()
    (tmp_path / "datasets--owner--data").mkdir()
    assert list(hub.cached_models(tmp_path)) == [("owner/whole", whole)]
    (sharded / "model-2.safetensors").touch()
    assert dict(hub.cached_models(tmp_path)) == {"owner/whole": whole, "owner/sharded": sharded}


def test_main_decides_between_snapshots(tmp_path: Path):
    for commit in ("old", "new"):
        (snapshot(tmp_path, "owner/m", commit) / "model.safetensors").touch()
    (tmp_path / "models--owner--m" / "refs" / "main").write_text("old")
    assert [folder.name for _, folder in hub.cached_models(tmp_path)] == ["old"]


@pytest.mark.parametrize("said", [b"\xff\xfe\x00", b"", b"gone", b"../../../..", b"1\n2", None])
def test_a_complete_snapshot_is_found_whatever_main_says(tmp_path: Path, said: bytes | None):
    folder = snapshot(tmp_path, "owner/m", "1", main=False)
    (folder / "model.safetensors").touch()
    if said is not None:
        references = tmp_path / "models--owner--m" / "refs"
        references.mkdir()
        (references / "main").write_bytes(said)
    assert list(hub.cached_models(tmp_path)) == [("owner/m", folder)]


def test_a_snapshot_that_broke_off_does_not_hide_a_whole_one(tmp_path: Path):
    whole = snapshot(tmp_path, "owner/m", "old")
    (whole / "model.safetensors").touch()
    begun = snapshot(tmp_path, "owner/m", "new")
    assert list(hub.cached_models(tmp_path)) == [("owner/m", whole)]
    (begun / "model.safetensors").touch()
    assert list(hub.cached_models(tmp_path)) == [("owner/m", begun)]


def test_no_cache_no_models(tmp_path: Path):
    assert list(hub.cached_models(tmp_path / "absent")) == []

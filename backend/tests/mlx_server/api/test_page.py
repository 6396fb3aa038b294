"""The page's files: who gets them, with which headers, and that they are what `frontend/` builds."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from scripted import ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.api.page import WEB, page_files
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app

FRONTEND = Path(__file__).parents[4] / "frontend"
MOST_PACKED = 350_000
"""Bytes of the whole page as gzip."""
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}

needs_node = pytest.mark.skipif(
    shutil.which("npm") is None or not (FRONTEND / "node_modules").is_dir(),
    reason="the page is built with npm and frontend/node_modules (scripts/page.sh)",
)


def client_of(address: str = "http://127.0.0.1:8000", **settings: object) -> TestClient:
    app = create_app(
        MLXServerSettings(**settings), ScriptedPool(ScriptedBackend(lambda _: says("Hi")))
    )
    return TestClient(app, base_url=address, follow_redirects=False)


def script_of(html: str) -> str:
    found = re.search(r'src="\./(ui/assets/[^"]+\.js)"', html)
    assert found is not None
    return f"/{found[1]}"


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_a_browser_gets_the_page(path: str) -> None:
    answer = client_of().get(path, headers=BROWSER)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert '<div id="app">' in answer.text


def test_ollamas_clients_still_get_their_sentence() -> None:
    assert client_of().get("/").text == "Ollama is running"


def test_links_of_the_page_lead_into_its_folder_from_both_places() -> None:
    client = client_of()
    for path in ("/ui/", "/ui/index.html"):
        assert client.get(path).headers["location"] == "../ui"
    assert client.get(script_of(client.get("/ui").text)).status_code == 200


def test_the_page_may_run_its_own_scripts_alone_and_may_not_be_framed() -> None:
    headers = client_of().get("/", headers=BROWSER).headers
    rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["img-src"] == "'self' data: blob:"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "set-cookie" not in headers


def test_no_text_of_the_page_is_code() -> None:
    html = page_files()["index.html"].content.decode()
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on\w+=", html)
    assert not re.search(r'(?:src|href)="(?!\./ui/)', html)


def test_files_named_by_their_content_are_kept_for_good() -> None:
    client = client_of()
    answer = client.get(script_of(client.get("/ui").text))
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-type"].startswith("text/javascript")


def test_a_page_that_has_not_changed_is_not_sent_again() -> None:
    client = client_of()
    tag = client.get("/ui").headers["etag"]
    again = client.get("/ui", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/ui", headers={"if-none-match": '"another"'}).status_code == 200


def test_files_are_packed_for_those_who_unpack_them() -> None:
    client = client_of()
    path = script_of(client.get("/ui").text)
    packed = client.get(path, headers={"accept-encoding": "gzip"})
    plain = client.get(path, headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content


def test_head_tells_what_get_sends() -> None:
    assert client_of().head("/ui").headers["etag"] == client_of().get("/ui").headers["etag"]


@pytest.mark.parametrize("path", ["/ui/nothing", "/ui/../index.html", "/ui/%2e%2e/__init__.py"])
def test_nothing_else_is_there(path: str) -> None:
    assert client_of().get(path).status_code == 404


def test_no_ui_leaves_no_page() -> None:
    client = client_of(ui=False)
    assert client.get("/", headers=BROWSER).text == "Ollama is running"
    assert client.get("/ui", headers=BROWSER).status_code == 404


def test_the_page_needs_no_key_and_what_it_shows_does() -> None:
    client = client_of(api_key="a key")
    assert client.get("/", headers=BROWSER).status_code == 200
    assert client.get(script_of(client.get("/ui").text)).status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert client.get("/").status_code == 401
    assert client.post("/ui").status_code == 401
    assert client_of(api_key="a key", ui=False).get("/ui").status_code == 401


def test_a_name_that_was_rebound_to_this_address_gets_no_page() -> None:
    client = client_of("http://rebound.example.org:8000")
    assert client.get("/", headers=BROWSER).status_code == 403
    assert client.get("/ui").status_code == 403


def test_the_page_is_small() -> None:
    files = page_files()
    assert sum(len(file.packed) for file in files.values()) <= MOST_PACKED
    assert all(gzip.decompress(file.packed) == file.content for file in files.values())


def test_nothing_is_fetched_from_elsewhere() -> None:
    """Addresses in what is bundled are names of namespaces, or of pages to read."""
    known = (
        *(
            "http://www.w3.org/",
            "https://www.w3.org/",
            "https://svelte.dev/",
            "https://github.com/",
        ),
        *("https://marked.js.org/", "https://katex.org/", "https://huggingface.co/"),
    )
    for name, file in page_files().items():
        if name.endswith((".js", ".css", ".html")):
            found = set(re.findall(rb"https?://[\w.-]+[\w./-]*", file.content))
            assert not [url for url in found if not url.decode().startswith(known)], name


def test_licences_of_what_is_bundled_are_within() -> None:
    text = (WEB / "licences.md").read_text()
    for name in json.loads((FRONTEND / "package.json").read_text())["dependencies"]:
        assert re.search(rf"^## {re.escape(name)} ", text, re.MULTILINE), name
    terms = set(re.findall(r"^## \S+ - [\d.]+ \(+(.*?)\)+$", text, re.MULTILINE))
    assert terms <= {"MIT", "ISC", "BSD-3-Clause", "Apache-2.0", "MPL-2.0 OR Apache-2.0"}


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (FRONTEND / "package-lock.json").read_text()


def run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=FRONTEND, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@needs_node
def test_the_files_are_what_is_built(tmp_path: Path) -> None:
    run("npm", "run", "build", "--", "--outDir", tmp_path / "web", "--logLevel", "warn")
    built = contents(tmp_path / "web")
    committed = contents(WEB)
    assert built.keys() == committed.keys(), "run: make page"
    assert not [name for name in built if built[name] != committed[name]], "run: make page"


@needs_node
def test_the_page_knows_the_api_as_it_is(tmp_path: Path) -> None:
    described: dict[str, Any] = create_app(MLXServerSettings()).openapi()
    (FRONTEND / "openapi.json").write_text(json.dumps(described))
    run("npm", "run", "types")
    run("npm", "run", "check")

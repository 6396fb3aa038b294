"""A real server among people who mean it harm: what it keeps to itself, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live import LiveServer, live_server
from observability.collector import Collector, attributes, collecting

from mlx_manager.demo_model import demo_model_path
from mlx_manager.mlx_server.config import CatalogSources
from mlx_manager.mlx_server.errors import ModelNotFound
from mlx_manager.mlx_server.models.catalog import Catalog
from mlx_manager.mlx_server.services.keys import add_key

CHAT = "/v1/chat/completions"
WRONG = "sk-mlx-a-key-that-was-mistyped-or-belongs-elsewhere"
ADMIN = "the-admin-token-of-this-test"
PROMPT = "a-prompt-that-is-nobody-elses-business"
MARKER = "repository-code-ran"
CODE = f"from pathlib import Path\nPath(__file__).with_name({MARKER!r}).touch()\n"


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@dataclass(frozen=True, slots=True)
class House:
    """A server whose log shows all there is, whose spans are collected, and its owner's files."""

    server: LiveServer
    collector: Collector
    folder: Path
    alice: str

    def told(self) -> str:
        """All that the log and the spans say."""
        return (self.folder / "log").read_text() + "".join(
            f"{span} {attributes(list(span.attributes))}" for span in self.collector.spans
        )

    @property
    def keys(self) -> Path:
        return self.folder / "keys.toml"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    alice = add_key(folder / "keys.toml", "alice", {})
    (folder / "outside").mkdir()
    (folder / "outside" / "config.json").write_text('{"model_type": "llama"}')
    poisoned = folder / "models" / "poisoned"
    shutil.copytree(demo_model_path(), poisoned, ignore=shutil.ignore_patterns("*.py", "*pycache*"))
    (poisoned / "code.py").write_text(CODE)
    for file in ("config.json", "tokenizer_config.json"):
        content = json.loads((poisoned / file).read_text())
        content["auto_map"] = {"AutoConfig": "code.C", "AutoTokenizer": ["code.T", "code.T"]}
        (poisoned / file).write_text(json.dumps(content))
    with collecting() as collector:
        with live_server(
            folder / "log",
            api_keys_file=folder / "keys.toml",
            admin_token=ADMIN,
            models_dir=folder / "models",
            log_level="debug",
            otlp_endpoint=collector.url,
        ) as server:
            house = House(server, collector, folder, alice)
            yield house
        # Of all the tests, now that the last span has come.
        told = house.told()
        assert all(secret not in told for secret in (alice, WRONG, ADMIN, PROMPT))


@pytest.fixture
def client(house: House) -> Iterator[httpx.Client]:
    headers = bearer(house.alice)
    with httpx.Client(base_url=house.server.url, headers=headers, timeout=60) as client:
        yield client


def ask(client: httpx.Client, text: str = "hi", **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **fields}
    return client.post(CHAT, json=body)


def test_a_repositorys_code_does_not_run(house: House, client: httpx.Client) -> None:
    ask(client, model="poisoned")
    assert not list(house.folder.rglob(MARKER))
    # The server has outlived it.
    assert ask(client).status_code == 200


def test_a_key_made_while_the_server_runs_works_from_sighup_on(
    house: House, client: httpx.Client
) -> None:
    bob = bearer(add_key(house.keys, "bob", {}))
    assert client.get("/v1/models", headers=bob).status_code == 401
    house.server.process.send_signal(signal.SIGHUP)
    while client.get("/v1/models", headers=bob).status_code == 401:
        pass
    assert ask(client).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "models/../../outside",
        "..%2Foutside",
        "/etc",
        "file:///etc/passwd",
        "~",
        "poisoned/../../outside",
        "poisoned\0",
        "./poisoned",
        "C:\\windows",
    ],
)
def test_a_model_name_is_no_path(client: httpx.Client, name: str) -> None:
    assert ask(client, model=name).status_code == 404
    assert client.get(f"/v1/models/{quote(name, safe='')}").status_code == 404


@given(
    st.one_of(
        st.text(max_size=40),
        st.lists(
            st.sampled_from(["..", ".", "", "~", "models", "outside", "poisoned", "%2e%2e", "\\"]),
            max_size=6,
        ).map("/".join),
    )
)
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
def test_no_name_finds_what_is_not_offered(tmp_path_factory: pytest.TempPathFactory, name: str):
    catalog = Catalog(CatalogSources(hf_cache=False))
    offered = {source.id for source in catalog.models()}
    if name not in offered:
        with pytest.raises(ModelNotFound):
            catalog.find(name)


def raw(server: LiveServer, data: bytes) -> bytes:
    """What comes back for `data` until the server hangs up."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=30) as connection:
        received = b""
        try:
            connection.sendall(data)
            while piece := connection.recv(65536):
                received += piece
        except ConnectionError:
            # It hung up on what it had not read.
            pass
        return received


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 40_000 + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        # Lines that never end.
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 300_000,
        b"GET /" + b"a" * 300_000,
    ],
)
def test_headers_beyond_the_limit_are_refused(house: House, client: httpx.Client, head: bytes):
    answer = raw(house.server, head)
    if answer:
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert client.get("/health").status_code == 200


def test_headers_up_to_the_limit_are_taken(client: httpx.Client) -> None:
    assert client.get("/health", headers={"x": "y" * 60_000}).status_code == 200
    assert client.get("/health", headers={"x": "y" * 60_000}).status_code == 200


def test_secrets_and_prompts_are_in_no_log_and_no_span(house: House, client: httpx.Client) -> None:
    ask(client, PROMPT).raise_for_status()
    ask(client, PROMPT, stream=True).raise_for_status()
    for headers in (bearer(WRONG), {"x-api-key": WRONG}, {"authorization": f"Basic {WRONG}"}):
        with httpx.Client(base_url=house.server.url, headers=headers) as stranger:
            assert ask(stranger, PROMPT).status_code == 401
    assert ask(client, PROMPT, temperature=PROMPT).status_code == 400
    assert ask(client, PROMPT, max_tokens=-2).status_code == 422
    assert ask(client, PROMPT * 5000).status_code == 400
    broken = f'{{"messages": "{PROMPT}'
    json_type = {"content-type": "application/json"}
    assert client.post(CHAT, content=broken, headers=json_type).status_code == 400
    kept = client.post("/v1/responses", json={"input": PROMPT, "max_output_tokens": 3})
    client.get(f"/v1/responses/{kept.json()['id']}").raise_for_status()
    message = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
    client.post("/v1/messages", json=message, headers={"x-api-key": house.alice})
    client.post("/v1/tokenize", json={"prompt": PROMPT})
    client.get("/health", params={"api_key": house.alice, "q": PROMPT})
    assert client.get("/v1/admin/requests", headers=bearer(ADMIN)).status_code == 200
    assert client.get("/v1/admin/requests", headers=bearer(WRONG)).status_code == 401
    # That nothing else is said is looked at when the server has ended.
    assert "key alice" in house.told()

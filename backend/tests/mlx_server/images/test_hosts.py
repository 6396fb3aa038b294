from __future__ import annotations

import asyncio
import ipaddress
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pictures import picture

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.errors import InvalidParameter, RequestTooLarge, UnsupportedParameter
from mlx_manager.mlx_server.images.hosts import Hosts, _tls, is_public

PLACE = "messages[0].content[0].image_url.url"
MOST = 10**6
DATA = picture()
Page = Callable[[str], bytes]


def ok(body: bytes, *headers: str) -> bytes:
    said = "".join(f"{header}\r\n" for header in headers)
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{said}\r\n".encode() + body


def moved(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


@asynccontextmanager
async def host(
    page: Page, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[str]]]:
    """A host on this machine: its port, and the heads of the requests that it got."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        if (answer := page(head.split(" ")[1])) == b"silence":
            await reader.read()
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1], heads
    finally:
        server.close()


def to(*addresses: str) -> Callable[[str, int], Awaitable[list[str]]]:
    async def resolve(name: str, port: int) -> list[str]:
        return list(addresses)

    return resolve


def local(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """As tests on this machine need it; the server's own is `is_public`."""
    return address == ipaddress.ip_address("127.0.0.1") or is_public(address)


def hosts(*allowed: str, seconds: float = 10.0, at: tuple[str, ...] = ("127.0.0.1",)) -> Hosts:
    return Hosts(allowed, seconds, to(*at), local)


async def test_a_picture_is_fetched_from_an_allowed_host():
    async with host(lambda path: ok(DATA, "Content-Type: text/html")) as (port, heads):
        url = f"http://pics.example:{port}/a/b.png?size=1"
        assert await hosts(f"pics.example:{port}").fetch(url, MOST, PLACE) == DATA
    assert heads[0].startswith("GET /a/b.png?size=1 HTTP/1.1\r\n")
    assert f"host: pics.example:{port}\r\n" in heads[0].lower()
    assert "accept-encoding: identity" in heads[0].lower()


@pytest.mark.parametrize(
    ("rule", "url", "allowed"),
    [
        ("example.com", "https://example.com/a", True),
        ("example.com", "https://EXAMPLE.com./a", True),
        ("example.com", "https://a.example.com/a", False),
        ("example.com", "https://badexample.com/a", False),
        ("example.com", "https://example.com.evil.org/a", False),
        ("example.com", "https://evil.org/example.com", False),
        ("example.com", "https://example.com:8443/a", False),
        ("example.com:8443", "https://example.com:8443/a", True),
        ("example.com:443", "https://example.com/a", True),
        ("*.example.com", "https://a.b.example.com/a", True),
        ("*.example.com", "https://example.com/a", False),
        ("*.example.com", "https://badexample.com/a", False),
        ("*", "https://anything.org/a", True),
        ("*", "http://anything.org:22/a", False),
        ("*:22", "http://anything.org:22/a", True),
        ("bücher.example", "https://xn--bcher-kva.example/a", True),
        ("", "https://example.com/a", False),
    ],
)
async def test_only_allowed_hosts_are_asked(rule: str, url: str, allowed: bool):
    asked: list[str] = []

    async def resolve(name: str, port: int) -> list[str]:
        asked.append(name)
        return []

    rules = MLXServerSettings(image_hosts=rule).images.hosts
    with pytest.raises((UnsupportedParameter, InvalidParameter)) as got:
        await Hosts(rules, resolve=resolve).fetch(url, MOST, PLACE)
    assert got.value.param == PLACE
    assert bool(asked) == allowed
    assert ("MLX_SERVER_IMAGE_HOSTS" in got.value.message) == (not allowed)


PRIVATE = [
    *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254"),
    *("0.0.0.0", "100.64.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
    *("192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fc00::1", "fd12:3456::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "2001:db8::1"),
    *("fe80::1%lo", "fec0::1", "64:ff9b:1::7f00:1"),
]


@pytest.mark.parametrize("address", PRIVATE)
async def test_addresses_that_are_not_public_are_refused(address: str):
    found = Hosts(("*",), resolve=to(address))
    with pytest.raises((UnsupportedParameter, InvalidParameter)) as got:
        await found.fetch("http://name.example/a.png", MOST, PLACE)
    assert "not public" in got.value.message


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "2606:4700:4700::1111"])
def test_public_addresses_are_permitted(address: str):
    assert is_public(ipaddress.ip_address(address))


async def test_one_private_address_among_public_ones_is_enough_to_refuse():
    with pytest.raises(UnsupportedParameter, match="not public"):
        await Hosts(("*",), resolve=to("1.1.1.1", "10.0.0.1")).fetch("http://a.example/", 9, PLACE)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/", "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/"),
        *("http://127.1/", "http://0/", "http://[::1]/", "http://[::ffff:127.0.0.1]/"),
        *("http://localhost/", "http://0x7f.1/"),
    ],
)
async def test_other_spellings_of_this_machine_are_refused(url: str):
    """With the system's own look-up."""
    with pytest.raises((UnsupportedParameter, InvalidParameter)) as got:
        await Hosts(("*",)).fetch(url, MOST, PLACE)
    assert got.value.param == PLACE
    assert "not public" in got.value.message or "can't be found" in got.value.message


async def test_a_name_is_looked_up_once():
    """One that is public at first and private afterwards (DNS rebinding) gains nothing."""
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])

    async def resolve(name: str, port: int) -> list[str]:
        return next(answers)

    async with host(lambda path: ok(DATA)) as (port, heads):
        found = Hosts((f"a.example:{port}",), resolve=resolve, permits=local)
        assert await found.fetch(f"http://a.example:{port}/", MOST, PLACE) == DATA
    assert len(heads) == 1
    assert next(answers) == ["10.0.0.1"]


async def test_redirects_are_followed_and_each_is_looked_at():
    def page(path: str) -> bytes:
        number = int(path[1:])
        return ok(DATA) if number == 0 else moved(f"/{number - 1}")

    async with host(page) as (port, heads):
        found = hosts(f"a.example:{port}")
        assert await found.fetch(f"http://a.example:{port}/3", MOST, PLACE) == DATA
        with pytest.raises(InvalidParameter, match="redirects more than 3 times"):
            await found.fetch(f"http://a.example:{port}/4", MOST, PLACE)
    assert len(heads) == 8


@pytest.mark.parametrize(
    "place",
    ["http://other.example/", "https://a.example:1/", "//other.example/a", "ftp://a/", "data:,"],
)
async def test_a_redirect_to_what_is_not_allowed_is_refused(place: str):
    async with host(lambda path: moved(place)) as (port, heads):
        with pytest.raises((UnsupportedParameter, InvalidParameter)) as got:
            await hosts(f"a.example:{port}").fetch(f"http://a.example:{port}/", MOST, PLACE)
    assert got.value.param == PLACE
    assert len(heads) == 1


async def test_a_redirect_to_a_private_address_is_refused():
    async def resolve(name: str, port: int) -> list[str]:
        return ["127.0.0.1" if name == "a.example" else "169.254.169.254"]

    async with host(lambda path: moved("http://meta.example/latest")) as (port, _):
        found = Hosts((f"a.example:{port}", "*"), resolve=resolve, permits=local)
        with pytest.raises(UnsupportedParameter, match=r"meta\.example has an address"):
            await found.fetch(f"http://a.example:{port}/", MOST, PLACE)


async def test_more_bytes_than_allowed_are_not_read():
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(3000)
    for answer in (ok(bytes(3000)), endless):
        async with host(lambda path, answer=answer: answer) as (port, _):
            with pytest.raises(RequestTooLarge, match="MLX_SERVER_MAX_IMAGE_MB"):
                await hosts(f"a.example:{port}").fetch(f"http://a.example:{port}/", 2000, PLACE)


async def test_a_host_that_says_nothing_is_given_up():
    async with host(lambda path: b"silence") as (port, _):
        found = hosts(f"a.example:{port}", seconds=0.2)
        with pytest.raises(InvalidParameter, match="MLX_SERVER_IMAGE_FETCH_SECONDS"):
            await found.fetch(f"http://a.example:{port}/", MOST, PLACE)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (ok(b""), "is empty"),
        (ok(b"abc", "Content-Encoding: gzip"), "compressed"),
        (b"no HTTP at all\r\n\r\n", "can't be fetched"),
        (b"", "can't be fetched"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "can't be fetched"),
    ],
)
async def test_a_host_without_the_picture_is_named_with_the_reason(answer: bytes, said: str):
    async with host(lambda path: answer) as (port, _):
        with pytest.raises(InvalidParameter, match=said) as got:
            await hosts(f"a.example:{port}").fetch(f"http://a.example:{port}/", MOST, PLACE)
    assert got.value.param == PLACE


async def test_a_host_that_is_not_there_is_an_error_of_the_request():
    async with host(lambda path: ok(DATA)) as (port, _):
        pass
    with pytest.raises(InvalidParameter, match="can't be fetched"):
        await hosts(f"a.example:{port}").fetch(f"http://a.example:{port}/", MOST, PLACE)


@pytest.mark.parametrize(
    "url",
    [
        *("http:///a", "http://", "http://a b/", "http://a.example:99999/", "http://[::1/"),
        *(
            "http://user:word@a.example/",
            "http://a.example\\@evil.example/",
            "http://*/",
            "http://a..b/",
        ),
    ],
)
async def test_broken_addresses_are_refused(url: str):
    with pytest.raises(InvalidParameter) as got:
        await hosts("*").fetch(url, MOST, PLACE)
    assert got.value.param == PLACE


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ssl.SSLContext]:
    """That of a host with a certificate for pics.example, which is trusted meanwhile."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl here")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = [
        *(openssl, "req", "-x509", "-nodes", "-newkey", "ec"),
        *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", key, "-out", certificate),
        *("-subj", "/CN=pics.example", "-addext", "subjectAltName=DNS:pics.example"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    _tls.cache_clear()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    yield context
    _tls.cache_clear()


async def test_a_host_must_prove_the_name_that_was_asked_for(tls: ssl.SSLContext):
    async with host(lambda path: ok(DATA), tls) as (port, _):
        found = hosts(f"*:{port}")
        assert await found.fetch(f"https://pics.example:{port}/", MOST, PLACE) == DATA
        with pytest.raises(InvalidParameter, match="can't be fetched"):
            await found.fetch(f"https://other.example:{port}/", MOST, PLACE)


@pytest.mark.parametrize("rule", ["a b", "https://example.com", "*.", "**", "a.*", "*example.com"])
def test_a_rule_that_is_none_is_refused_at_the_start(rule: str):
    with pytest.raises(ValueError, match="is no name of a host"):
        MLXServerSettings(image_hosts=rule)

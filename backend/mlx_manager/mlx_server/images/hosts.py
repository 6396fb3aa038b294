"""Pictures at addresses, fetched from the hosts that the server's owner allows.

A name is looked up once. Each of its addresses must be public, and the connection goes to one of
those that were looked at: a name that changes its address meanwhile (DNS rebinding) gains nothing.
Redirects are looked at in the same way.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit

from mlx_manager.mlx_server.address import as_browsers_say
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.images.sources import check_bytes, too_large

if TYPE_CHECKING:
    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Permits = Callable[[Address], bool]

PORTS = {"http": 80, "https": 443}
MOST_REDIRECTS = 3
MOVED = (301, 302, 303, 307, 308)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses whose last 32 bits are an IPv4 address (RFC 6052)."""
LOCAL = (ipaddress.IPv6Network("fec0::/10"), ipaddress.IPv6Network("64:ff9b:1::/48"))
"""Networks within a site (RFC 3879, RFC 8215), which Python takes for global ones."""


async def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host, as the system knows them.

    Raises:
        OSError: it has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_public(address: Address) -> bool:
    """Return whether an address is one of the internet's, and so are those that are written in it.

    Private, loopback, link-local, reserved and multicast addresses are not.
    """
    return all(
        each.is_global and not each.is_multicast and not any(each in net for net in LOCAL)
        for each in _in(address)
    )


def _in(address: Address) -> Iterator[Address]:
    """Yield the address, or the IPv4 addresses that it stands for or goes through."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
        return
    if (mapped := address.ipv4_mapped) is not None:
        yield mapped
        return
    yield address
    if (inner := address.sixtofour) is not None:
        yield inner
    if address.teredo is not None:
        yield from address.teredo
    low = int(address) & 0xFFFFFFFF
    if address in NAT64 or int(address) == low:
        yield ipaddress.IPv4Address(low)


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts from which pictures may be fetched.

    allowed: names, such as `example.com`, `*.example.com` for all names below it, or `*` for all;
    with a port if it is not the scheme's own. seconds: time for one picture, redirects included.
    resolve, permits: look a name up, and decide on an address.
    """

    allowed: tuple[str, ...] = ()
    seconds: float = 10.0
    resolve: Resolve = look_up
    permits: Permits = is_public

    async def fetch(self, url: str, most: int, param: str) -> bytes:
        """Return the bytes at an address; the content type is not looked at.

        most: the most bytes that a picture may have.

        Raises:
            UnsupportedParameter: the address, or one that it redirects to, is not allowed.
            InvalidParameter: the picture can't be fetched.
            RequestTooLarge: it has more bytes than allowed.
        """
        import httpx

        try:
            async with asyncio.timeout(self.seconds):
                # A proxy would look the name up once more, and a netrc has passwords. A connection
                # is kept by its address, though its host was checked for one name: no client is
                # used twice.
                tls = await asyncio.to_thread(_tls)
                async with httpx.AsyncClient(verify=tls, trust_env=False, timeout=None) as client:
                    return await self._follow(client, url, most, param)
        except TimeoutError:
            raise InvalidParameter(
                f"`{param}`: the picture did not come within {self.seconds:g} s "
                "(MLX_SERVER_IMAGE_FETCH_SECONDS).",
                param=param,
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise InvalidParameter(
                f"`{param}`: the picture can't be fetched ({type(error).__name__}).", param=param
            ) from None

    async def _follow(self, client: httpx.AsyncClient, url: str, most: int, param: str) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            found = await self._get(client, url, most, param)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise InvalidParameter(
            f"`{param}` redirects more than {MOST_REDIRECTS} times.", param=param
        )

    async def _get(self, client: httpx.AsyncClient, url: str, most: int, param: str) -> bytes | str:
        """Return the bytes at an address, or the address that it redirects to."""
        parts, host, port = self._checked(url, param)
        address = await self._address(host, port, param)
        shown = f"[{host}]" if ":" in host else host
        place = f"[{address}]" if address.version == 6 else str(address)
        query = f"?{parts.query}" if parts.query else ""
        request = client.build_request(
            "GET",
            f"{parts.scheme}://{place}:{port}{parts.path or '/'}{query}",
            headers={
                "Host": shown if port == PORTS[parts.scheme] else f"{shown}:{port}",
                "Accept": "image/png, image/jpeg, image/webp, image/gif",
                "Accept-Encoding": "identity",
            },
            extensions={"sni_hostname": host},
        )
        response = await client.send(request, stream=True)
        try:
            if response.status_code in MOVED and (moved := response.headers.get("location")):
                return str(moved)
            return await _body(response, most, param)
        finally:
            await response.aclose()

    def _checked(self, url: str, param: str) -> tuple[SplitResult, str, int]:
        """Return an address in parts, the host and the port.

        Raises:
            InvalidParameter: it is no address.
            UnsupportedParameter: it is not allowed.
        """
        try:
            if any(sign <= " " or sign in {"\x7f", "\\"} for sign in url):
                raise ValueError
            parts = urlsplit(url)
            host = as_browsers_say(parts.hostname or "")
            port = parts.port or PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise InvalidParameter(
                f"`{param}` is, or redirects to, no http(s) address.", param=param
            ) from None
        if parts.username is not None or parts.password is not None:
            raise InvalidParameter(
                f"`{param}`: an address with a user or a password is not fetched.", param=param
            )
        if not self._allows(host, port, port == PORTS[parts.scheme]):
            raise UnsupportedParameter(
                f"`{param}` is at, or redirects to, {host[:100]} (port {port}), from which this "
                "server fetches no pictures. Send a data URL, or have its owner allow the host "
                "(MLX_SERVER_IMAGE_HOSTS).",
                param=param,
            )
        return parts, host, port

    def _allows(self, host: str, port: int, usual: bool) -> bool:
        for rule in self.allowed:
            name, _, number = rule.partition(":") if rule.count(":") == 1 else (rule, "", "")
            if number != str(port) and (number or not usual):
                continue
            if name in ("*", host) or (name[:2] == "*." and host.endswith(name[1:])):
                return True
        return False

    async def _address(self, host: str, port: int, param: str) -> Address:
        """Return an address of the host.

        Raises:
            InvalidParameter: the host is unknown.
            UnsupportedParameter: one of its addresses is not permitted.
        """
        try:
            found = [ipaddress.ip_address(each) for each in await self.resolve(host, port)]
        except (OSError, UnicodeError, ValueError):
            found = []
        if not found:
            raise InvalidParameter(f"`{param}`: {host[:100]} can't be found.", param=param)
        if not all(map(self.permits, found)):
            raise UnsupportedParameter(
                f"`{param}`: {host[:100]} has an address that is not public (private, loopback, "
                "link-local or reserved), from which no pictures are fetched.",
                param=param,
            )
        return found[0]


@cache
def _tls() -> ssl.SSLContext:
    """Return what hosts are known by; to read the certificates takes a while."""
    import httpx

    return httpx.create_ssl_context()


async def _body(response: httpx.Response, most: int, param: str) -> bytes:
    status = response.status_code
    if status != HTTPStatus.OK:
        raise InvalidParameter(
            f"`{param}`: the picture's host answers with status {status}.", param=param
        )
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise InvalidParameter(
            f"`{param}`: the picture's host sends it compressed, which was not asked for.",
            param=param,
        )
    announced = response.headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 19 and int(announced) > most:
        raise too_large(most, param)
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > most:
            raise too_large(most, param)
    check_bytes(len(data), most, param)
    return bytes(data)

"""Addresses that a server listens on."""

from __future__ import annotations

import ipaddress
import re

USUAL_PORTS = {"http": ":80", "https": ":443"}
NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def is_loopback(host: str) -> bool:
    """Whether programs on this machine alone can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_host(name: str) -> bool:
    """Whether it can be looked up: the resolver is asked for it in the DNS's own letters."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def as_browsers_say(name: str) -> str:
    """The name of a host in the DNS's own letters, which are small, or an address.

    Raises:
        ValueError: it is neither; no port, scheme or pattern is a part of one.
    """
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        said = name.encode("idna").decode().lower().rstrip(".") if is_host(name) else ""
    if NAME.fullmatch(said) is None:
        raise ValueError(f"{name!r} is no name of a host, such as llm.example.com")
    return said


def origin_as_browsers_say(origin: str) -> str:
    """A site's origin in small letters, and without the port that its scheme has anyway.

    Others' than sites' (an extension's, say) stay as they are.
    """
    scheme, _, host = origin.partition("://")
    usual = USUAL_PORTS.get(scheme.lower())
    if usual is None or not is_host(host):
        return origin
    said = host.encode("idna").decode()
    return f"{scheme}://{said.removesuffix(usual)}".lower()


def url_of(host: str, port: int | str) -> str:
    """Where programs on this machine find a server that listens there."""
    host = host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

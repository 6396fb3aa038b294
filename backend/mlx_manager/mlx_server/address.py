"""Addresses that a server listens on."""

from __future__ import annotations

import ipaddress
import re

USUAL_PORTS = {"http": ":80", "https": ":443"}
NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can reach a host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_host(name: str) -> bool:
    """Return whether a name can be looked up: the resolver needs it in ASCII (IDNA)."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def as_browsers_say(name: str) -> str:
    """Return the name of a host in lower-case ASCII (IDNA), or an address in its short form.

    Raises:
        ValueError: `name` is neither; ports, schemes and patterns are no parts of one.
    """
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        said = name.encode("idna").decode().lower().rstrip(".") if is_host(name) else ""
    if NAME.fullmatch(said) is None:
        raise ValueError(f"{name!r} is no name of a host, such as llm.example.com")
    return said


def origin_as_browsers_say(origin: str) -> str:
    """Return a site's origin in lower-case ASCII, without its scheme's usual port.

    Other origins, such as an extension's, stay as they are.
    """
    scheme, _, host = origin.partition("://")
    usual = USUAL_PORTS.get(scheme.lower())
    if usual is None or not is_host(host):
        return origin
    said = host.encode("idna").decode()
    return f"{scheme}://{said.removesuffix(usual)}".lower()


def url_of(host: str, port: int | str) -> str:
    """Return the URL at which programs on this machine find a server that listens there."""
    host = host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

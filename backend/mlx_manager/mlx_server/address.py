"""Addresses that a server listens on."""

from __future__ import annotations

import ipaddress


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


def url_of(host: str, port: int | str) -> str:
    """Where programs on this machine find a server that listens there."""
    host = host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

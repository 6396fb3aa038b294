"""Notices to the service manager that started this process: `sd_notify(3)`."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)

READY = "READY=1"


def notify(*states: str) -> None:
    """Send states to systemd, or whoever else set `NOTIFY_SOCKET`; do nothing without it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # An abstract socket's name begins with a zero byte.
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.sendto("\n".join(states).encode(), name)
    except OSError as error:
        log.warning("the service manager could not be told %s: %s", states[0], error)

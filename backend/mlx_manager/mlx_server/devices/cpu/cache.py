"""Sizes of a CPU's caches, as the system reports them."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SYSFS = Path("/sys/devices/system/cpu/cpu0/cache")
SYSCTL = "/usr/sbin/sysctl"
SYSCTL_NAMES = ("hw.l3cachesize", "hw.l2cachesize", "hw.perflevel0.l2cachesize")
"""Names of cache sizes in sysctl(8). The last is for the fast cores of Apple silicon: a cluster of
cores shares that cache."""
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
ASSUMED = 2**25
"""Bytes assumed if the system does not say: a usual size for a core or a cluster of a server."""


@cache
def last_level_cache() -> int:
    """Return the bytes of the largest cache that a core has, alone or shared with other cores."""
    if sys.platform == "darwin":
        sizes = sysctl_sizes(_sysctl())
    else:
        sizes = sysfs_sizes(SYSFS)
    if not sizes:
        log.debug("the system does not say how large the CPU's caches are")
    return max(sizes, default=ASSUMED)


def sysfs_sizes(folder: Path) -> list[int]:
    """Return the bytes of each cache for data that Linux describes in `folder`, one core's.

    Source: Documentation/ABI/testing/sysfs-devices-system-cpu of Linux. Virtual machines and some
    ARM boards have no such folder, or no sizes in it.
    """
    sizes = []
    for described in sorted(folder.glob("index*")):
        kind, size = (described / name for name in ("type", "size"))
        if size.is_file() and not (kind.is_file() and kind.read_text().strip() == "Instruction"):
            sizes.append(size_in_bytes(size.read_text()))
    return [size for size in sizes if size]


def size_in_bytes(text: str) -> int:
    """Return a size such as `32768K` in bytes; 0 for other text."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(found[1]) * UNITS[found[2]] if found else 0


def sysctl_sizes(said: str) -> list[int]:
    """Return the bytes of each cache that a line of sysctl(8) names: `hw.l2cachesize: 4194304`."""
    found = re.findall(rf"^(?:{'|'.join(map(re.escape, SYSCTL_NAMES))}): (\d+)$", said, re.M)
    return [int(size) for size in found if int(size)]


def _sysctl() -> str:
    """Return sysctl's output for `SYSCTL_NAMES`, though sysctl fails for names that a Mac lacks."""
    try:
        done = subprocess.run(
            [SYSCTL, *SYSCTL_NAMES], capture_output=True, text=True, check=False, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.debug("sysctl says nothing of caches: %s", error)
        return ""
    return done.stdout

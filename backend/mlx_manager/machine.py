"""Facts of a machine for a report that is made public: hardware and releases, nothing personal."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlx_manager import __version__

PACKAGES = ("mlx", "mlx-lm", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-cpu")
DEVICE_FACTS = (
    "architecture",
    "compute_capability_major",
    "compute_capability_minor",
    "max_buffer_length",
    "max_recommended_working_set_size",
    "memory_size",
    "resource_limit",
    "total_memory",
)
"""Facts that MLX tells of a device. They are the same for all devices of a kind."""
VARIABLES = (
    "MLX_MAX_MB_PER_BUFFER",
    "MLX_MAX_OPS_PER_BUFFER",
    "MTL_DEBUG_LAYER",
    "MTL_SHADER_VALIDATION",
)
"""Variables of MLX and Metal whose numbers change what is measured."""
PRESSURE = Path("/proc/pressure/memory")
_HOMES = re.compile(r"(?:/Users|/home)/[^/\s'\":]+")


def described() -> dict[str, Any]:
    """The machine and what is installed, as JSON has it. Sizes are in bytes.

    Raises:
        ImportError: MLX can't be imported.
    """
    from mlx_manager.mlx_server.utils import memory

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "mlx_manager": __version__,
        "packages": {name: found for name in PACKAGES if (found := release_of(name))},
        "python": platform.python_version(),
        "system": system(),
        "device": {"name": memory.device_name(), **device_facts()},
        "cores": os.cpu_count(),
        "memory": {
            "total": memory.device_memory(),
            "others": memory.taken_by_others(),
            "pressure": memory_pressure(),
        },
        "variables": {
            name: value for name in VARIABLES if (value := os.environ.get(name, "")).isdigit()
        },
    }


def release_of(package: str) -> str | None:
    """The version that is installed; None where the package is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def system() -> dict[str, str]:
    """The operating system's name and release, and the kind of processor."""
    found = {"name": platform.system(), "release": platform.release()}
    if macos := platform.mac_ver()[0]:
        found |= {"name": "macOS", "release": macos}
    return found | {"machine": platform.machine()}


def device_facts() -> dict[str, Any]:
    """The facts of MLX's default device that `DEVICE_FACTS` names."""
    import mlx.core as mx

    info = mx.device_info()
    return {name: info[name] for name in DEVICE_FACTS if name in info}


def memory_pressure() -> dict[str, Any]:
    """Return how short of memory the system says it is.

    That is macOS's level, or Linux's stalls in percent of the last 10, 60 and 300 s (PSI). The
    answer is empty where the system says nothing.
    """
    from mlx_manager.mlx_server.utils.pressure import is_told, pressure_level

    if is_told():
        return {"level": pressure_level().name.lower()}
    try:
        return stalls(PRESSURE.read_text())
    except OSError:
        # A kernel without PSI, or a container that hides it.
        return {}


def stalls(text: str) -> dict[str, dict[str, float]]:
    """`/proc/pressure/memory` as numbers."""
    found = {}
    for line in text.splitlines():
        kind, *fields = line.split()
        pairs = (field.split("=") for field in fields)
        found[kind] = {name: float(value) for name, value in pairs}
    return found


def impersonal(text: str) -> str:
    """`text` without this person's home, user name and host name."""
    text = text.replace(str(Path.home()), "~")
    text = _HOMES.sub("~", text)
    for mark, name in (("USER", user_name()), ("HOST", socket.gethostname())):
        if len(name) > 1:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", mark, text)
    return text


def user_name() -> str:
    """The person's name on this machine; "" where there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""


def written(report: dict[str, Any]) -> str:
    """A report as the text of its file."""
    return json.dumps(report, indent=2) + "\n"

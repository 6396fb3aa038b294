"""Facts that tie blocks to a machine: its programs and its device, on which the last bits of keys
and values depend. A block is of use where all of them are the same."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlx_manager import __version__
from mlx_manager.mlx_server.utils.memory import device_name

PROGRAMS = ("mlx-manager", "mlx", "mlx-lm")
SEEING = ("mlx-vlm", "transformers", "pillow")


def machine_facts() -> dict[str, Any]:
    """Return the facts of this machine, for a `Space`."""
    return {
        "programs": [__version__, *(version(name) for name in PROGRAMS[1:])],
        "device": device_name(),
    }


def vision_programs() -> list[str]:
    """Return the versions of the programs that features of pictures depend on; "" of one that is
    not there."""
    return [_version(name) for name in SEEING]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def difference(facts: Mapping[str, Any]) -> str | None:
    """Return why blocks with these facts are of no use on this machine; None where they are."""
    here = machine_facts()
    if facts.get("device") != here["device"]:
        return (
            f"they were computed on {facts.get('device')}, and this machine has {here['device']}: "
            "the device must be the same"
        )
    if facts.get("programs") != here["programs"]:
        return (
            f"they were computed by {_named(facts.get('programs'))}, and here is "
            f"{_named(here['programs'])}: the versions must be the same"
        )
    return None


def _named(versions: object) -> str:
    match versions:
        case [_, _, _]:
            named = zip(PROGRAMS, versions, strict=True)
            return ", ".join(f"{name} {version}" for name, version in named)
    return "other programs"

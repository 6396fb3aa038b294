"""NVIDIA's compiler and its library for fat binaries, without a GPU: from the wheels that `make clients` installs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from linux import skip_without_linux

from mlx_manager.mlx_server.devices.cuda.compiler.fatbin import Fatbin
from mlx_manager.mlx_server.devices.cuda.compiler.nvrtc import NVRTC

ENVIRONMENT = Path(__file__).parents[3] / ".venv-clients" / "nvrtc"
HOPPER = "sm_90a"


@cache
def installed_nvrtc() -> NVRTC:
    """Return the compiler. Skips where it is not installed."""
    folder = _installed("libnvrtc.so.13")
    include = folder / "include"
    return NVRTC(folder / "lib" / "libnvrtc.so.13", (include / "cccl", include))


@cache
def installed_fatbin() -> Fatbin:
    """Return the library. Skips where it is not installed."""
    return Fatbin(str(_installed("libnvfatbin.so.13") / "lib" / "libnvfatbin.so.13"))


def _installed(library: str) -> Path:
    """Return the folder of NVIDIA's files. Skips where the library is not among them."""
    skip_without_linux("NVIDIA's compiler")
    found = list(ENVIRONMENT.glob(f"lib/python*/site-packages/nvidia/cu13/lib/{library}"))
    if not found:
        pytest.skip(f"{library} is not installed in .venv-clients; `make clients` installs it")
    return found[0].parents[1]

"""NVIDIA's compiler without a GPU: from the wheels that `make clients` installs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from linux import skip_without_linux

from mlx_manager.mlx_server.devices.cuda.compiler.nvrtc import NVRTC

ENVIRONMENT = Path(__file__).parents[3] / ".venv-clients" / "nvrtc"
HOPPER = "sm_90a"


@cache
def installed_nvrtc() -> NVRTC:
    """Return the compiler. Skips where it is not installed."""
    skip_without_linux("NVIDIA's compiler")
    found = list(ENVIRONMENT.glob("lib/python*/site-packages/nvidia/cu13"))
    if not found:
        pytest.skip("NVRTC is not installed in .venv-clients; `make clients` installs it")
    include = found[0] / "include"
    return NVRTC(found[0] / "lib" / "libnvrtc.so.13", (include / "cccl", include))

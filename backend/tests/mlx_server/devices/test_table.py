from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.table import CPU, CUDA, METAL


@pytest.mark.parametrize(
    ("default", "metal", "device"),
    [(mx.cpu, True, CPU), (mx.gpu, True, METAL), (mx.gpu, False, CUDA)],
    ids=["a Mac's CPU", "a Mac's GPU", "another GPU"],
)
def test_a_device_is_known_by_what_drives_it(monkeypatch, default, metal, device):
    monkeypatch.setattr(mx, "default_device", lambda: default)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    assert devices.current() is device

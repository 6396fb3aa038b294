from __future__ import annotations

import os
from importlib.metadata import version

import pytest

from mlx_manager.mlx_server.utils import driver, graphs
from mlx_manager.mlx_server.utils.graphs import KERNELS, SETTINGS, keep_kernels, record_whole_steps


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    """An environment in which nothing is set; what is set is undone."""
    for name in (*SETTINGS, KERNELS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(graphs, "architecture", lambda: "sm_90")


def test_what_the_owner_has_set_stays(monkeypatch, hopper):
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    monkeypatch.setenv(KERNELS, "/somewhere")
    record_whole_steps()
    keep_kernels()
    assert os.environ["MLX_MAX_OPS_PER_BUFFER"] == "7"
    assert os.environ["MLX_CUDA_GRAPH_CACHE_SIZE"] == "4000"
    assert os.environ[KERNELS] == "/somewhere"


def test_kernels_are_kept_for_each_release_and_kind_of_gpu_and_the_user_alone(hopper, tmp_path):
    keep_kernels()
    folder = tmp_path / "mlx-manager" / "kernels" / f"{version('mlx')}-sm_90"
    assert os.environ[KERNELS] == str(folder)
    assert folder.stat().st_mode & 0o077 == 0


def test_without_a_place_of_its_own_mlx_uses_its(hopper, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_kernels()
    assert KERNELS not in os.environ


def test_without_an_nvidia_gpu_nothing_is_set(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-is-not-here.so.1")
    keep_kernels()
    assert KERNELS not in os.environ
    assert not list(tmp_path.iterdir())

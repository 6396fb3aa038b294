from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.devices.cuda import driver, graphs
from mlx_manager.mlx_server.devices.cuda.graphs import (
    KERNELS,
    SETTINGS,
    TEMPORARY,
    keep_cpu_kernels,
    keep_kernels,
    record_whole_steps,
)


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    """An environment in which nothing is set; what is set is undone."""
    for name in (*SETTINGS, KERNELS, TEMPORARY):
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


def test_a_cpus_kernels_are_kept_for_the_user_alone_and_python_s_files_stay(tmp_path):
    before = tempfile.gettempdir()
    keep_cpu_kernels()
    folder = tmp_path / "mlx-manager" / "kernels" / "cpu"
    assert os.environ[TEMPORARY] == str(folder)
    assert folder.stat().st_mode & 0o077 == 0
    assert tempfile.gettempdir() == before


HELD = """
import os, sys
from mlx_manager.mlx_server.devices.cuda.graphs import keep_cpu_kernels
keep_cpu_kernels()
print(os.environ["TMPDIR"], flush=True)
sys.stdin.read()
"""


def test_two_servers_at_once_compile_into_folders_of_their_own_which_the_next_have_again(tmp_path):
    def start() -> tuple[subprocess.Popen, str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", HELD], **pipes)
        return process, process.stdout.readline().strip()

    folder = tmp_path / "mlx-manager" / "kernels"
    first, second = start(), start()
    assert [first[1], second[1]] == [str(folder / "cpu"), str(folder / "cpu-2")]
    first[0].communicate()
    again = start()
    assert again[1] == str(folder / "cpu")
    for process in (second[0], again[0]):
        process.communicate()


def test_where_the_owner_puts_temporary_files_a_cpus_kernels_go_too(tmp_path, monkeypatch):
    monkeypatch.setenv(TEMPORARY, "/somewhere")
    keep_cpu_kernels()
    assert os.environ[TEMPORARY] == "/somewhere"
    assert not list(tmp_path.iterdir())


NO_PLACE = """
import os
from mlx_manager.mlx_server.devices.cuda.graphs import keep_cpu_kernels
keep_cpu_kernels()
print(os.environ["TMPDIR"], os.path.isdir(os.environ["TMPDIR"]))
"""


def test_without_a_home_a_cpus_kernels_are_a_process_s_own_and_go_with_it(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    ran = subprocess.run(
        [sys.executable, "-c", NO_PLACE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    folder, was_there = ran.stdout.split()
    assert was_there == "True"
    assert Path(folder).name.startswith("mlx-manager-")
    assert not Path(folder).exists()


SERVED = """
import mlx.core as mx
from mlx_manager.mlx_server.engine.thread import MLXThread
thread = MLXThread()
thread.start()
if mx.default_device() == mx.cpu:
    mx.eval(mx.compile(lambda x: mx.exp(x) + 2 * x)(mx.ones((3,))))
thread.close()
"""


def test_a_server_compiles_nothing_into_a_folder_that_others_may_have_made(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SERVED], env=environment, check=True)
    kernels = tmp_path / "mlx-manager" / "kernels" / "cpu"
    if mx.default_device() == mx.cpu and shutil.which("g++"):
        assert list(kernels.rglob("*.so"))

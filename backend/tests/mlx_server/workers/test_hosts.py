"""Hostfiles, and a model over two hosts that are two network namespaces of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from here import start_here
from linux import descendants, needs_linux, running
from spread import asking, drawn, spread_pool
from thorough import slow
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.devices.group import RankHost, RankHosts, members, unrecorded
from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.workers.hosts import cards, command, read_hostfile
from mlx_manager.mlx_server.workers.process import NO_LOG
from mlx_manager.mlx_server.workers.ranks import Ranks

ONE = {"ssh": "one", "ips": ["10.0.0.1"]}
TWO = {"ssh": "two.local", "ips": ["10.0.0.2"]}
RDMA = [ONE | {"rdma": [None, "rdma_en5"]}, TWO | {"rdma": ["rdma_en5", None]}]


def written(path: Path, content: Any) -> Path:
    file = path / "hosts.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_list_of_hosts_is_a_ring_on_a_cpu_and_rank_0_is_here(tmp_path: Path) -> None:
    hosts = read_hostfile(written(tmp_path, [ONE, TWO]))
    assert hosts.backend == "ring"
    assert [host.ssh for host in hosts.hosts] == [None, "two.local"]
    first, second = members(hosts)
    assert json.loads(second.files["MLX_HOSTFILE"]) == [["10.0.0.1:32323"], ["10.0.0.2:32324"]]
    assert (first.environment["MLX_RANK"], second.environment["MLX_RANK"]) == ("0", "1")


def test_jaccl_is_told_as_mlx_launch_tells_it(tmp_path: Path) -> None:
    content = {"envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": RDMA}
    hosts = read_hostfile(written(tmp_path, content))
    member = members(hosts)[1]
    assert member.backend == "jaccl"
    assert member.environment == {
        "MLX_METAL_FAST_SYNCH": "1",
        "MLX_JACCL_COORDINATOR": "10.0.0.1:32323",
        "MLX_RANK": "1",
    }
    assert json.loads(member.files["MLX_IBV_DEVICES"]) == [[None, "rdma_en5"], ["rdma_en5", None]]


def test_ranks_by_nccl_record_no_launches_unless_the_owner_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLX_USE_CUDA_GRAPHS", raising=False)
    assert unrecorded("nccl") == {"MLX_USE_CUDA_GRAPHS": "0"}
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "1")
    assert unrecorded("nccl") == {"MLX_USE_CUDA_GRAPHS": "1"}
    assert unrecorded("ring") == {}


def test_mpi_joins_no_other_machines(tmp_path: Path) -> None:
    here = {"ssh": "localhost", "ips": ["127.0.0.1"]}
    file = written(tmp_path, {"backend": "mpi", "hosts": [here, here]})
    assert read_hostfile(file).backend == "mpi"
    # mpirun knows where its ranks meet.
    file = written(tmp_path, {"backend": "mpi", "hosts": [{"ssh": "localhost"}] * 2})
    assert read_hostfile(file).backend == "mpi"
    file = written(tmp_path, {"backend": "mpi", "hosts": [ONE, TWO]})
    with pytest.raises(ModelLoadFailed, match="can't have other machines with the backend 'mpi'"):
        read_hostfile(file)


def test_hosts_by_jaccl_need_no_addresses_but_the_firsts(tmp_path: Path) -> None:
    """MLX's documentation writes such a file for `mlx.launch`."""
    one, two = RDMA
    hosts = read_hostfile(written(tmp_path, [one, two | {"ips": []}]))
    assert [host.ips for host in hosts.hosts] == [("10.0.0.1",), ()]
    assert members(hosts)[1].environment["MLX_JACCL_COORDINATOR"] == "10.0.0.1:32323"


def test_ranks_of_one_host_have_a_gpu_each() -> None:
    hosts = RankHosts("nccl", (RankHost(), RankHost(), RankHost("far"), RankHost("far")))
    numbers = [each["CUDA_VISIBLE_DEVICES"] for each in cards(hosts)]
    assert numbers == ["0", "1", "0", "1"]


def test_another_host_is_asked_by_ssh_for_its_python() -> None:
    host = RankHost("far", ("10.0.0.2",), python="/opt/my env/python")
    asked = command(host, "a.program", "a model's rank 1", NO_LOG, {"CUDA_VISIBLE_DEVICES": "1"})
    assert asked[:2] == ["ssh", "-T"]
    assert asked[-2] == "far"
    assert asked[-1].startswith("exec env CUDA_VISIBLE_DEVICES=1 '/opt/my env/python' -P -m a.prog")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[", "can't be read"),
        ("7", "must be a list of hosts"),
        ([ONE], "must have two hosts or more"),
        ([ONE, {"ips": ["10.0.0.2"]}], r"hosts\[1\].ssh"),
        ([ONE, TWO | {"ssh": "-oProxyCommand=x"}], r"hosts\[1\].ssh"),
        ([ONE, {"ssh": "two"}], r"hosts\[1\].ips"),
        ([ONE, TWO | {"user": "me"}], r"'user' in hosts\[1\]; allowed are ips, python, rdma, ssh"),
        ({"backend": "gloo", "hosts": [ONE, TWO]}, "'gloo'; allowed are ring, nccl, jaccl"),
        ({"backend": "jaccl", "hosts": [ONE, TWO]}, "`rdma`"),
        ({"envs": ["A"], "hosts": [ONE, TWO]}, "`envs`"),
        ({"envs": ["=1"], "hosts": [ONE, TWO]}, "`envs`"),
        ({"env": ["A=1"], "hosts": [ONE, TWO]}, "'env' in the table; allowed are backend, envs"),
        ({"backend": "jaccl", "hosts": [RDMA[0] | {"ips": []}, RDMA[1]]}, r"hosts\[0\].ips"),
        ([ONE | {"ips": [""]}, TWO], r"hosts\[0\].ips"),
        ([ONE | {"python": "/elsewhere"}, TWO], r"hosts\[0\].python"),
        ([ONE, TWO | {"ssh": "localhost", "python": "/elsewhere"}], r"hosts\[1\].python"),
        ([ONE, TWO | {"python": ""}], r"hosts\[1\].python"),
    ],
)
def test_a_hostfile_that_is_none_is_refused(tmp_path: Path, content: Any, reason: str) -> None:
    with pytest.raises(ModelLoadFailed, match=reason) as refusal:
        read_hostfile(written(tmp_path, content))
    assert "hosts.json" in refusal.value.message


@needs_linux("/proc, for the processes of ranks")
def test_a_rank_that_can_not_be_started_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descendants(os.getpid())
    monkeypatch.setenv("PATH", str(tmp_path))
    hosts = RankHosts("ring", (RankHost(), RankHost(), RankHost("far")))
    with pytest.raises(OSError, match="ssh"):
        Ranks("m", hosts, NO_LOG, None)
    left = descendants(os.getpid()) - before
    give_up = time.monotonic() + 10
    while running(left) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not running(left)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A network namespace that stands for another host, and an `ssh` that runs commands there."""
    name = f"far{os.getpid()}"
    inside = f"ip -n {name}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs the right to make network namespaces")
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nfor last; do :; done\nexec ip netns exec {name} sh -c "$last"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    try:
        for line in (
            f"ip link add {name}a type veth peer name {name}b netns {name}",
            f"ip addr add 10.213.7.1/24 dev {name}a",
            f"ip link set {name}a up",
            f"{inside} addr add 10.213.7.2/24 dev {name}b",
            f"{inside} link set {name}b up",
            f"{inside} link set lo up",
        ):
            subprocess.run(line.split(), check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@slow
@needs_linux("network namespaces")
async def test_two_hosts_draw_the_tokens_of_one(tmp_path: Path, far: str) -> None:
    make_tiny_model(tmp_path / "m", "llama")
    hosts = [{"ssh": "me", "ips": ["10.213.7.1"]}, {"ssh": far, "ips": ["10.213.7.2"]}]
    written(tmp_path, hosts)
    models = tmp_path / "models.toml"
    models.write_text('[models.m]\nhostfile = "hosts.json"\n')
    asked = [asking([1, 2, 3]), asking([9] * 40)]
    async with spread_pool(tmp_path, 1, start=start_here) as one:
        wanted = await drawn(one, "m", asked)
    async with spread_pool(tmp_path, 1, models_file=models) as two:
        assert await drawn(two, "m", asked) == wanted
        assert (await two.status("m")).devices == 2

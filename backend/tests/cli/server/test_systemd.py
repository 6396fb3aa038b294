"""The service under a real systemd, where root may start one that is not the machine's own."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from linux import skip_without_linux
from live import PROGRAM
from thorough import slow

HERE = Path(__file__).parent
SYSTEMD = Path("/lib/systemd/systemd")
NAMESPACES = ("--pid", "--mount", "--cgroup", "--uts", "--ipc")
UNIT = "mlx-manager.service"


@dataclass(frozen=True)
class Machine:
    """What runs under the systemd whose process is `leader`."""

    leader: int

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        into = ["nsenter", f"--target={self.leader}", *NAMESPACES]
        environment = {"PATH": os.environ["PATH"], "HOME": "/root", **variables}
        given = [f"{name}={value}" for name, value in environment.items()]
        return subprocess.run(
            [*into, "env", "-i", *given, *command],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def service(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(PROGRAM), "service", *arguments)

    def shown(self, what: str) -> str:
        return self.run("systemctl", "show", f"--property={what}", "--value", UNIT).stdout.strip()

    def state(self) -> str:
        return self.run("systemctl", "is-active", UNIT).stdout.strip()


def systemd_is_here() -> bool:
    """Not on a machine that systemd runs: it might think the other one's units its own."""
    return (
        os.geteuid() == 0
        and SYSTEMD.exists()
        and not Path("/run/systemd/system").exists()
        and all(shutil.which(tool) for tool in ("unshare", "nsenter", "pivot_root"))
    )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    skip_without_linux("systemd")
    if not systemd_is_here():
        pytest.skip("needs root, systemd's program and a machine that it does not run")
    command = ["unshare", "--fork", *NAMESPACES, "sh", str(HERE / "systemd.sh")]
    booting = subprocess.Popen(
        [*command, str(tmp_path_factory.mktemp("systemd"))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        machine = Machine(leader_of(booting))
        patience = time.monotonic() + 30
        while "running" not in (said := machine.run("systemctl", "is-system-running").stdout):
            if time.monotonic() > patience or booting.poll() is not None:
                pytest.skip(f"no systemd could be started here: {said}")
            time.sleep(0.2)
        if PROGRAM.is_relative_to("/tmp") or PROGRAM.is_relative_to("/var/tmp"):
            # A service of the machine has its own of these: it would not find the program.
            extend(machine, "tmp.conf", "[Service]\nPrivateTmp=no")
        yield machine
    finally:
        # Its first process takes all others along.
        for child in children_of(booting.pid):
            os.kill(child, 9)
        booting.wait(timeout=30)


def extend(machine: Machine, name: str, lines: str) -> None:
    """The unit by a file of its own, from when systemd reads its units again."""
    folder = f"/etc/systemd/system/{UNIT}.d"
    machine.run("mkdir", "-p", folder)
    machine.run("sh", "-c", f"printf '{lines}\n' >{folder}/{name}")


def leader_of(booting: subprocess.Popen[str]) -> int:
    """The process that is the first of its namespace."""
    patience = time.monotonic() + 10
    while not (children := children_of(booting.pid)):
        if booting.poll() is not None or time.monotonic() > patience:
            assert booting.stderr is not None
            pytest.skip(f"no systemd can be started here: {booting.stderr.read()}")
        time.sleep(0.05)
    return children[0]


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


@pytest.fixture
def port() -> int:
    """A free one that the system gives to nobody who asks it for any."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first // 2, first), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def test_a_service_is_ready_when_install_says_so_and_comes_back_when_it_was_killed(machine, port):
    # It comes back after 5 s by our unit.
    extend(machine, "at-once.conf", "[Service]\nRestartSec=100ms")
    installed = machine.service("install", "--system", "--run-as", "root", "--port", str(port))
    assert installed.returncode == 0, installed.stderr
    url = f"http://127.0.0.1:{port}/v1"
    assert f"The service runs. Ready: {url}\n" in installed.stdout
    assert httpx.get(f"{url}/models").status_code == 200
    assert machine.service("status", "--system").returncode == 0
    machine.run("systemctl", "kill", "--signal=KILL", UNIT)
    patience = time.monotonic() + 60
    while machine.state() != "active" or machine.shown("NRestarts") != "1":
        assert time.monotonic() < patience
        time.sleep(0.2)
    assert httpx.get(f"{url}/models").status_code == 200
    assert machine.service("uninstall", "--system").returncode == 0
    assert machine.state() == "inactive"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models")
    machine.run("rm", f"/etc/systemd/system/{UNIT}.d/at-once.conf")


def test_a_wrong_setting_is_not_tried_again(machine, port):
    machine.service("install", "--system", "--run-as", "root", "--port", str(port), "--no-start")
    machine.run("sh", "-c", "echo MLX_SERVER_MAX_ROWS=0 >>/etc/mlx-manager/service.env")
    machine.run("systemctl", "daemon-reload")
    assert machine.run("systemctl", "start", UNIT).returncode != 0
    assert (machine.state(), machine.shown("ExecMainStatus")) == ("failed", "2")
    assert machine.service("uninstall", "--system").returncode == 0


@slow
def test_a_service_that_can_not_start_says_why_and_starts_when_that_is_mended(machine, port):
    arguments = ("install", "--system", "--run-as", "root", "--port", str(port))
    # Gives up sooner than by our unit, which says 5 and 5 s.
    extend(machine, "soon.conf", "[Unit]\nStartLimitBurst=1\n[Service]\nRestartSec=100ms")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        failed = machine.service(*arguments)
        assert failed.returncode == 1
        assert "another program listens there" in failed.stderr
        assert "The service runs" not in failed.stdout
    mended = machine.service(*arguments)
    assert mended.returncode == 0, mended.stderr
    assert machine.service("uninstall", "--system").returncode == 0

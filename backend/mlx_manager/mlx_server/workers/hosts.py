"""Machines that a model is spread over: the owner's hostfile, and ranks that ssh starts there.

The file has the form of `mlx.launch`'s (mlx/_distributed_utils/common.py): a list of hosts, or a
table with `backend`, `envs` and `hosts`. A host has `ssh`, `ips`, for JACCL `rdma`, and here also
`python`, where that is another path than on this machine. Rank 0 is this machine, the first host.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

from mlx_manager.mlx_server.devices.group import (
    CARDS,
    BackendName,
    RankHost,
    RankHosts,
    backend_here,
    card_of,
)
from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.workers.process import LogSettings, arguments
from mlx_manager.mlx_server.workers.program import STDIO

HERE = ("localhost", "127.0.0.1", "::1")
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5")
"""The command that starts a rank elsewhere. It asks for no password, and ends where the other
machine has not answered three times."""
KEYS = frozenset({"ssh", "ips", "rdma", "python"})
TABLE_KEYS = frozenset({"backend", "envs", "hosts"})


def read_hostfile(path: Path) -> RankHosts:
    """Return the machines of a hostfile.

    Raises:
        ModelLoadFailed: it can't be read, or is none; the message names what is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadFailed(f"The hostfile {path} can't be read: {error}.") from error
    table = {"hosts": content} if isinstance(content, list) else content
    if not isinstance(table, dict) or not _is_list(table.get("hosts"), dict):
        raise _wrong(path, "must be a list of hosts, or a table that has one as `hosts`")
    _check_keys(path, table, TABLE_KEYS, "the table")
    hosts = tuple(_host(path, number, each) for number, each in enumerate(table["hosts"]))
    if len(hosts) < 2:
        raise _wrong(path, "must have two hosts or more; the first is this machine")
    if hosts[0].ssh is not None:
        # By whatever name it has elsewhere: rank 0 is the worker itself.
        hosts = (RankHost(None, hosts[0].ips, hosts[0].rdma), *hosts[1:])
    backend = table.get("backend") or _backend(hosts)
    if backend not in get_args(BackendName):
        allowed = ", ".join(get_args(BackendName))
        raise _wrong(path, f"has the backend {backend!r}; allowed are {allowed}")
    if backend == "mpi" and any(host.ssh is not None for host in hosts):
        raise _wrong(path, "can't have other machines with the backend 'mpi'; `ring` joins them")
    for number, host in enumerate(hosts):
        # The others meet at the first one's; MLX writes them so for JACCL. mpirun finds its own.
        if not host.ips and backend != "mpi" and (backend == "ring" or number == 0):
            raise _wrong(
                path, f"must have addresses in hosts[{number}].ips, by which other hosts reach it"
            )
    if "jaccl" in backend and not all(len(host.rdma) == len(hosts) for host in hosts):
        raise _wrong(path, "must name each host's `rdma` device to every host, null for itself")
    variables = table.get("envs", [])
    if not _is_list(variables, str) or not all("=" in each[1:] for each in variables):
        raise _wrong(path, "must have NAME=VALUE texts as `envs`")
    return RankHosts(backend, hosts, dict(each.split("=", 1) for each in variables))


def _host(path: Path, number: int, given: dict[str, Any]) -> RankHost:
    where = f"hosts[{number}]"
    _check_keys(path, given, KEYS, where)
    name, ips, python = given.get("ssh"), given.get("ips", []), given.get("python")
    if not isinstance(name, str) or not name or name.startswith("-"):
        raise _wrong(path, f"must name the machine in {where}.ssh, as ssh knows it")
    if not _is_list(ips, str) or not all(ips):
        raise _wrong(path, f"must have a list of addresses in {where}.ips")
    if not isinstance(python, str | None) or python == "":
        raise _wrong(path, f"must have a path in {where}.python")
    here = number == 0 or name in HERE
    if here and python not in (None, sys.executable):
        raise _wrong(
            path,
            f"can't have {where}.python: that host is this machine, and its ranks run by this "
            f"server's own Python, {sys.executable}",
        )
    rdma = given.get("rdma", [])
    if not isinstance(rdma, list):
        raise _wrong(path, f"must have a list in {where}.rdma")
    return RankHost(None if name in HERE else name, tuple(ips), tuple(rdma), python)


def _check_keys(path: Path, given: dict[str, Any], known: frozenset[str], where: str) -> None:
    """
    Raises:
        ModelLoadFailed: there is a key that is not known.
    """
    if unknown := sorted(given.keys() - known):
        allowed = ", ".join(sorted(known))
        raise _wrong(path, f"has {unknown[0]!r} in {where}; allowed are {allowed}")


def _backend(hosts: tuple[RankHost, ...]) -> BackendName:
    return "jaccl" if all(host.rdma for host in hosts) else backend_here()


def _is_list(given: object, kind: type) -> bool:
    return isinstance(given, list) and all(isinstance(each, kind) for each in given)


def _wrong(path: Path, rule: str) -> ModelLoadFailed:
    return ModelLoadFailed(f"The hostfile {path} {rule}.")


def cards(hosts: RankHosts) -> list[dict[str, str]]:
    """Return the variables by which each rank sees a GPU of its own; none without NVIDIA's."""
    if "nccl" not in (hosts.backend, backend_here()):
        return [{} for _ in hosts.hosts]
    before = Counter[str | None]()
    found = []
    for host in hosts.hosts:
        visible = os.environ.get(CARDS) if host.ssh is None else None
        found.append(card_of(before[host.ssh], visible))
        before[host.ssh] += 1
    return found


def command(
    host: RankHost, program: str, name: str, log: LogSettings, environment: dict[str, str]
) -> list[str]:
    """Return the command that starts a rank's program on another machine. It has no secrets: what
    the rank must know comes by its standard input."""
    assert host.ssh is not None
    python = [host.python or sys.executable, *arguments(program, STDIO, name, log)]
    variables = [f"{key}={value}" for key, value in environment.items()]
    return [*SSH, host.ssh, shlex.join(["exec", "env", *variables, *python])]

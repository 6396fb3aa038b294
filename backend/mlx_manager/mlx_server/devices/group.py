"""Groups of devices on MLX's own distributed engine: one process, a rank, for each device.

Backends are MLX's: NCCL on NVIDIA GPUs, the ring over sockets elsewhere, Open MPI where the owner
says so. All read their settings from environment variables when a group is made. Sources:
mlx/distributed/ring/ring.cpp, mlx/distributed/nccl/nccl.cpp, mlx/distributed/mpi/mpi.cpp, and
mlx/_distributed_utils/launch.py for what `mlx.launch` sets.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import mlx.core as mx

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.settings import Distributed

BackendName = Literal["ring", "nccl", "jaccl", "jaccl-ring", "mpi"]
LOOPBACK = "127.0.0.1"
CARDS = "CUDA_VISIBLE_DEVICES"
"""Name of CUDA's environment variable with the cards that a process may use."""
FIRST_PORT = 32323
"""Number of the first port that `mlx.launch` takes."""
FREED = 2**28
"""Bytes of freed buffers that a rank other than 0 keeps, in memory that others use, too."""
RECORDING = "MLX_USE_CUDA_GRAPHS"
"""Name of MLX's variable that says whether launches are recorded as CUDA graphs."""
MPI_LIBRARY = "MLX_MPI_LIBNAME"
"""Name of MLX's variable with the name of MPI's library."""
OPEN_MPI = "libmpi.so.40"
"""The library's name on Linux without the packages to build programs with: Open MPI 2 to 5."""
FAILED = (RuntimeError, ValueError)
"""Errors of MLX's over a group that can't be made."""


@dataclass(frozen=True, slots=True)
class RankHost:
    """A rank's machine. ssh: the name by which ssh knows it; None: this machine. ips: addresses by
    which the others reach it. rdma: its RDMA device to each other rank, for JACCL. python: the
    Python there; None: at the same path as here."""

    ssh: str | None = None
    ips: tuple[str, ...] = (LOOPBACK,)
    rdma: tuple[Any, ...] = ()
    python: str | None = None


@dataclass(frozen=True, slots=True)
class RankHosts:
    """The machines of all ranks, rank 0's first. variables: more of the environment."""

    backend: BackendName
    hosts: tuple[RankHost, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def are_one(self) -> bool:
        """Return whether all ranks run on this machine."""
        return all(host.ssh is None for host in self.hosts)

    def ports(self) -> Iterator[int]:
        """Yield ports for the ranks' connections: free ones of this machine, or those that
        `mlx.launch` takes.

        Raises:
            OSError: there are no free ports.
        """
        if self.are_one:
            return iter(free_ports(sum(len(host.ips) for host in self.hosts)))
        return count(FIRST_PORT)


@dataclass(frozen=True, slots=True)
class Membership:
    """One rank's place in a group. environment: the variables that MLX's backend reads.

    files: variables whose values are to be names of files with these texts.
    """

    rank: int
    size: int
    backend: BackendName
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)


def backend_here() -> BackendName:
    """Return the backend for several devices of this machine."""
    return "nccl" if devices.current().kind == "cuda" else "ring"


def share_memory() -> bool:
    """Return whether the devices of this machine have one memory together."""
    return devices.current().kind != "cuda"


def here(size: int, distributed: Distributed = "auto") -> RankHosts:
    """Return so many devices of this machine, which meet on the loopback address."""
    backend = backend_here() if distributed == "auto" else distributed
    return RankHosts(backend, tuple(RankHost() for _ in range(size)))


def members(hosts: RankHosts, places: Sequence[Mapping[str, str]] = ()) -> list[Membership]:
    """Return the places of a group. places: the environment of each, where mpirun has made them.

    Raises:
        OSError: there are no free ports.
    """
    size, first = len(hosts.hosts), hosts.hosts[0]
    files: dict[str, str] = {}
    environment = dict(hosts.variables)
    ports = hosts.ports()
    match hosts.backend:
        case "nccl":
            environment |= {"NCCL_HOST_IP": first.ips[0], "NCCL_PORT": str(next(ports))}
            environment |= {"MLX_WORLD_SIZE": str(size)}
        case "ring":
            ends = [[f"{ip}:{next(ports)}" for ip in host.ips] for host in hosts.hosts]
            files = {"MLX_HOSTFILE": json.dumps(ends)}
        case "jaccl" | "jaccl-ring":
            environment |= {"MLX_JACCL_COORDINATOR": f"{first.ips[0]}:{next(ports)}"}
            if hosts.backend == "jaccl-ring":
                environment |= {"MLX_JACCL_RING": "1"}
            files = {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in hosts.hosts])}
        case "mpi":
            assert len(places) == size, "mpirun has made a place for each"
            if sys.platform == "linux":
                environment.setdefault(MPI_LIBRARY, os.environ.get(MPI_LIBRARY, OPEN_MPI))
    owns = places or [{"MLX_RANK": str(rank)} for rank in range(size)]
    return [
        Membership(rank, size, hosts.backend, {**environment, **own}, files)
        for rank, own in enumerate(owns)
    ]


def card_of(rank: int, visible: str | None) -> dict[str, str]:
    """Return the environment in which a rank's process sees its own NVIDIA GPU only.

    visible: the GPUs that this program may use, as `CUDA_VISIBLE_DEVICES` says; None: all.

    >>> card_of(1, "4,6"), card_of(1, None)
    ({'CUDA_VISIBLE_DEVICES': '6'}, {'CUDA_VISIBLE_DEVICES': '1'})
    """
    cards = [] if visible is None else [card.strip() for card in visible.split(",")]
    return {CARDS: cards[rank] if rank < len(cards) else str(rank)}


def unrecorded(backend: BackendName) -> dict[str, str]:
    """Return the environment of ranks, which record no launches on NVIDIA GPUs unless the owner has
    said so: an all-reduce of 8 kB takes 20 us by itself and 45 us in a graph (two H200). It must be
    there before MLX computes anything."""
    return {RECORDING: os.environ.get(RECORDING, "0")} if backend == "nccl" else {}


def check_devices(model_id: str, size: int) -> None:
    """Check that there are so many devices here.

    Raises:
        ModelLoadFailed: there are fewer NVIDIA GPUs.
    """
    if backend_here() == "nccl" and (have := mx.device_count(mx.gpu)) < size:
        raise ModelLoadFailed(
            f"{model_id} is to run on {size} devices (`devices`), and this machine offers {have} "
            f"NVIDIA {'GPU' if have == 1 else 'GPUs'} ({CARDS} may name fewer than there are)."
        )


def join(member: Membership) -> mx.distributed.Group:
    """Enter the group, which waits for all its ranks.

    Raises:
        ModelLoadFailed: no group of the size asked for comes about.
    """
    with TemporaryDirectory() as folder:
        named = {}
        for name, text in member.files.items():
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            named[name] = str(path)
        os.environ.update({**member.environment, **named})
        try:
            # JACCL's ring is told by a variable.
            name = member.backend.removesuffix("-ring")
            group = mx.distributed.init(backend=name, strict=True)
        except FAILED as error:
            raise ModelLoadFailed(
                f"MLX makes no group of {member.size} devices by {member.backend}: {error}"
                f"{_hint(member)}"
            ) from error
    # Without its library, a backend may make a group of one and say nothing.
    if (group.size(), group.rank()) != (member.size, member.rank):
        raise ModelLoadFailed(
            f"MLX has made a group of {group.size()} by {member.backend}, in which this is rank "
            f"{group.rank()}; rank {member.rank} of {member.size} was asked for.{_hint(member)}"
        )
    if member.rank and share_memory():
        # Rank 0's ledger does not see these.
        mx.set_cache_limit(FREED)
    return group


def _hint(member: Membership) -> str:
    """Return what an error over the group is told besides."""
    if member.backend != "mpi":
        return ""
    library = os.environ.get(MPI_LIBRARY, "its own name for it")
    return f" (MLX looks for Open MPI's library by {library}; {MPI_LIBRARY} names another.)"


def from_first(group: mx.distributed.Group, array: mx.array) -> mx.array:
    """Return rank 0's `array` on all ranks; those of the others must be zeros of its shape and
    type. NCCL in MLX neither sends nor broadcasts, so it is a sum."""
    return mx.distributed.all_sum(array, group=group)


def free_ports(count: int) -> Sequence[int]:
    """Return ports of the loopback address that nobody listens on.

    Raises:
        OSError: there are none.
    """
    with ExitStack() as opened:
        ends = [opened.enter_context(socket.socket()) for _ in range(count)]
        for end in ends:
            end.bind((LOOPBACK, 0))
        return [end.getsockname()[1] for end in ends]

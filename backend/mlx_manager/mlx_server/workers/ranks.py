"""The processes of a model on several devices, as rank 0 has them: started, told, watched.

Rank 0 is the worker itself. It tells the others what to do over a socket pair each, and hears from
them that they live. A rank that ends or falls silent ends the worker, and with it all ranks: the
group's operations wait for all of them, and MLX can't take a rank back in.
"""

from __future__ import annotations

import logging
import os
from functools import cached_property
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from mlx_manager.mlx_server.devices import group as groups
from mlx_manager.mlx_server.errors import WorkerFailed
from mlx_manager.mlx_server.execution.group.plan import Order
from mlx_manager.mlx_server.models.loading.shards import ReadShare
from mlx_manager.mlx_server.workers.channel import Channel
from mlx_manager.mlx_server.workers.hosts import cards, command
from mlx_manager.mlx_server.workers.messages import Prepare
from mlx_manager.mlx_server.workers.mpirun import Mpirun
from mlx_manager.mlx_server.workers.process import LogSettings, start_by, start_process
from mlx_manager.mlx_server.workers.rank_messages import (
    Asked,
    Beat,
    Cannot,
    Done,
    Enlist,
    Join,
    Ready,
)

if TYPE_CHECKING:
    import mlx.core as mx

log = logging.getLogger(__name__)
PROGRAM = "mlx_manager.mlx_server.workers.rank"


class FollowerProcess:
    """Another rank's process, seen from rank 0."""

    def __init__(
        self,
        rank: int,
        host: groups.RankHost,
        name: str,
        log_settings: LogSettings,
        environment: dict[str, str],
    ) -> None:
        self.rank = rank
        self.asked = 0
        self.answers: SimpleQueue[Done | Ready | None] = SimpleQueue()
        self.heard = monotonic()
        self.reason: str | None = None
        title = f"{name} rank {rank}"
        if host.ssh is None:
            end, self.process = start_process(
                title, log_settings, program=PROGRAM, environment=environment, apart=False
            )
        else:
            end, self.process = start_by(command(host, PROGRAM, title, log_settings, environment))
        self.channel = Channel(end, self._hear, self._ended, title)
        self.channel.start()

    def _hear(self, message: object) -> None:
        self.heard = monotonic()
        match message:
            case Beat():
                pass
            case Cannot(why):
                self.reason = why
            case Done() | Ready():
                self.answers.put(message)

    def _ended(self) -> None:
        """Note the end of the process, which has closed its connection."""
        self.process.kill()
        how = self.process.wait()
        self.reason = self.reason or how
        # Whoever waits for an answer gets none.
        self.answers.put(None)

    def ask(self, order: Order | ReadShare) -> None:
        """Have the rank do something and answer; does not wait."""
        self.asked += 1
        self.channel.send(Asked(order, self.asked))

    def answer(self) -> Any:
        """Wait for the answer to the last question, or until the rank is ready, if there was none.

        Raises:
            WorkerFailed: the process has ended.
        """
        while (answer := self.answers.get()) is not None:
            match answer:
                case Ready() if self.asked == 0:
                    return None
                case Done(result, number) if number == self.asked:
                    return result
            # Nobody has waited for it: a load has failed.
        raise WorkerFailed(f"Rank {self.rank} of the model's processes has failed.")


class Ranks:
    """All ranks but this one, which is rank 0; an `execution.group.crew.Crew` and a
    `models.loading.shards.Spread`.

    Args:
        hosts: the machines of all ranks, this one first.
        silence: seconds without a sign of life after which a rank is taken to hang, once the model
            is loaded; None: no limit.

    Raises:
        OSError: the system starts no more processes.
    """

    def __init__(
        self, name: str, hosts: groups.RankHosts, log_settings: LogSettings, silence: float | None
    ) -> None:
        self.size = len(hosts.hosts)
        here = sum(host.ssh is None for host in hosts.hosts)
        self.copies = here if groups.share_memory() else 1
        self.lost: str | None = None
        self._limit = silence
        # None while a load goes on: what that is at is watched by the server.
        self._silence: float | None = None
        self._hosts = hosts
        self._mpirun: Mpirun | None = None
        seats = list(enumerate(zip(hosts.hosts, cards(hosts), strict=True)))
        own = groups.unrecorded(hosts.backend)
        os.environ.update(own)
        self._followers: list[FollowerProcess] = []
        try:
            for rank, (host, variables) in seats[1:]:
                process = FollowerProcess(rank, host, name, log_settings, variables | own)
                self._followers.append(process)
        except OSError:
            self.close()
            raise

    def enlist(self, asked: Prepare) -> None:
        """Have the others make the model's modules."""
        self._send(Enlist(asked.source, asked.recipe, asked.limits))

    @cached_property
    def group(self) -> mx.distributed.Group:
        """Return the group, once all ranks have entered it.

        Raises:
            ModelLoadFailed: no group of that size comes about.
            WorkerFailed: a rank has ended.
        """
        # To enter a group holds Python up until all are there: nobody goes before all can.
        for follower in self._followers:
            follower.answer()
        if self._hosts.backend == "mpi":
            self._mpirun = Mpirun(self.size)
        places = () if self._mpirun is None else self._mpirun.places
        own, *others = groups.members(self._hosts, places)
        for follower, member in zip(self._followers, others, strict=True):
            follower.channel.send(Join(member))
        return groups.join(own)

    @property
    def broken(self) -> str | None:
        """Return why the ranks can't go on; None while they can. Safe on any thread."""
        for follower in self._followers:
            if follower.reason is not None:
                return f"rank {follower.rank} of {self.size} has ended: {follower.reason}"
            quiet = monotonic() - follower.heard
            if self._silence is not None and quiet > self._silence:
                return (
                    f"rank {follower.rank} of {self.size} has given no sign of life for "
                    f"{quiet:.0f} s (half of MLX_SERVER_WATCHDOG_SECONDS)"
                )
        return self.lost

    def watch(self) -> None:
        """Take ranks that fall silent to hang, from now on."""
        for follower in self._followers:
            follower.heard = monotonic()
        self._silence = self._limit

    def close(self) -> None:
        """End the other processes."""
        for follower in self._followers:
            follower.process.kill()
            follower.channel.close()
        if self._mpirun is not None:
            self._mpirun.close()

    # -- as a `Spread`, on the MLX thread ------------------------------------------------------

    def begin(self, share: ReadShare) -> None:
        _ = self.group
        for follower in self._followers:
            follower.ask(share)

    def wait(self) -> None:
        for follower in self._followers:
            follower.answer()

    # -- as a `Crew`, on the MLX thread --------------------------------------------------------

    def tell(self, order: Order) -> None:
        self._send(order)

    def ask(self, order: Order) -> list[str | None]:
        for follower in self._followers:
            follower.ask(order)
        return [follower.answer() for follower in self._followers]

    def lose(self, why: str) -> None:
        log.error("the ranks can't go on: %s", why)
        self.lost = self.lost or why

    def _send(self, message: object) -> None:
        for follower in self._followers:
            follower.channel.send(message)

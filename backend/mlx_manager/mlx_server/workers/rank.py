"""The program of a rank of a model on several devices, other than rank 0.

Run by `workers.ranks` as `python -m mlx_manager.mlx_server.workers.rank` with the number of an
inherited socket. It does what rank 0 says, in that order, and ends with the connection.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from mlx_manager.mlx_server.workers.channel import Channel
from mlx_manager.mlx_server.workers.program import begin

if TYPE_CHECKING:
    from mlx_manager.mlx_server.workers.share import ModelShare

log = logging.getLogger(__name__)
BEAT = 0.5
"""Seconds between two signs of life."""


class RankProgram:
    """A rank's end of the connection. make: makes the model's share; imports MLX."""

    def __init__(self, end: socket.socket, make: Callable[[], ModelShare]) -> None:
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._channel = Channel(end, self._inbox.put, leave, "rank")
        self._make = make

    def serve(self) -> None:
        """Do what rank 0 says, until the process ends or something can't be done."""
        from mlx_manager.mlx_server.workers.rank_messages import Beat, Cannot

        self._channel.start()
        threading.Thread(target=self._beat, args=(Beat(),), name="beat", daemon=True).start()
        share = self._make()
        while True:
            try:
                answer = share.take(self._inbox.get())
            except share.errors as error:
                # Rank 0 ends then: it may be waiting for this rank within an operation.
                log.exception("this rank can't go on")
                self._channel.send(Cannot(f"{type(error).__name__}: {error}"))
                raise
            if answer is not None:
                self._channel.send(answer)

    def _beat(self, sign: object) -> None:
        pause = threading.Event()
        while not pause.wait(BEAT):
            self._channel.send(sign)


def leave() -> None:
    """End the process with its connection, whatever it is doing."""
    logging.shutdown()
    os._exit(0)


def make_share() -> ModelShare:
    """Import MLX and all that a model needs."""
    from mlx_manager.mlx_server.workers.share import ModelShare

    return ModelShare()


def main(arguments: list[str]) -> None:
    """Serve until rank 0 ends the connection, or ends."""
    RankProgram(begin(arguments), make_share).serve()


if __name__ == "__main__":
    main(sys.argv[1:])

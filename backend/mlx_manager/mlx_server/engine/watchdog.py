"""Notices that the MLX thread has died, that it takes for ever over something, or that its GPU
takes no more work.

A thread that is in Python can be interrupted: its step raises, the engine fails its rows and
starts over. One that hangs in native code can't be ended from within the process, nor can what it
holds be freed.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from mlx_manager.mlx_server.engine.thread import MLXThread

MOST_OFTEN = 0.05
LEAST_OFTEN = 1.0
"""Seconds between two looks."""

SECOND_CHANCE = 30.0
"""Most seconds that an interrupted thread gets to come back."""


class Fault(Enum):
    DEAD = auto()
    STALLED = auto()
    LOST_GPU = auto()


async def find_fault(thread: MLXThread, limit: float) -> Fault:
    """Wait until something is wrong.

    limit: seconds without progress, while there is work, that are too many; 0: none are.
    """
    while thread.alive:
        if thread.lost_gpu is not None:
            return Fault.LOST_GPU
        if 0 < limit < thread.silence:
            return Fault.STALLED
        await asyncio.sleep(pause(limit))
    return Fault.DEAD


async def revive(thread: MLXThread, limit: float) -> bool:
    """Interrupt a stalled thread; whether it works again, or is dead at least."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + min(limit, SECOND_CHANCE)
    thread.interrupt()
    while loop.time() < give_up:
        if not thread.alive or thread.silence < limit:
            return True
        await asyncio.sleep(pause(limit))
    return False


def pause(limit: float) -> float:
    return max(MOST_OFTEN, min(limit / 10, LEAST_OFTEN)) if limit else LEAST_OFTEN

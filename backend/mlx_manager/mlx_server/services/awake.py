"""A Mac that does not fall asleep while calls are under way: `caffeinate(8)`."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from asyncio.subprocess import DEVNULL
from contextlib import suppress

from mlx_manager.mlx_server.services.calls import Calls

log = logging.getLogger(__name__)

PROGRAM = "caffeinate"
LINGER = 30.0
"""Seconds without a call before the machine may sleep: an agent's next call comes sooner."""


async def keep_awake(calls: Calls, linger: float = LINGER) -> None:
    """Run caffeinate whenever calls are under way, until cancelled.

    It prevents idle sleep alone: a lid that is closed, or a person, still puts the machine to
    sleep. It ends with this process, however that ends (`-w`).
    """
    program = shutil.which(PROGRAM)
    if program is None:
        log.warning("MLX_SERVER_KEEP_AWAKE has no effect: only macOS has `%s`", PROGRAM)
        return
    while True:
        await calls.begun()
        try:
            holder = await asyncio.create_subprocess_exec(
                *(program, "-i", "-w", str(os.getpid())),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("the machine may fall asleep: %s can't be started: %s", program, error)
            return
        try:
            await _idle(calls, linger)
        finally:
            with suppress(ProcessLookupError):
                holder.terminate()
            await holder.wait()


async def _idle(calls: Calls, seconds: float) -> None:
    """Return once no call has been under way for so long."""
    while True:
        await calls.ended()
        try:
            async with asyncio.timeout(seconds):
                await calls.begun()
        except TimeoutError:
            return

"""Program that has engines with one folder of prefixes killed at random moments, and has each of
them compare its answers with those that are given without a disk.

    killed_engines.py MODEL FOLDER KILLS

Prints how many tokens of prompts the last engine, which is not killed, has read from disk.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.rig import Rig, prompt

from mlx_manager.mlx_server.config import PrefixDisk

PROMPTS = [prompt(540 + 20 * i, i + 1) for i in range(12)]
LIMIT = 4
BUDGET = 1_500_000
"""Bytes of files, less than all prompts have."""
WRONG = 3

Answers = list[list[int]]


async def answers(rig: Rig, numbers: list[int]) -> Answers:
    found = []
    for number in numbers:
        row = rig.submit(PROMPTS[number], LIMIT)
        await row.finished()
        found.append(row.tokens)
    return found


async def expected_of(model: Path) -> Answers:
    async with Rig(model) as rig:
        return await answers(rig, list(range(len(PROMPTS))))


async def answer_for_ever(
    model: Path, disk: PrefixDisk, expected: Answers, seed: int, begun: int
) -> None:
    """Answer until killed, and write to `begun` after each answer. Memory has room for few prompts,
    so that pages come and go."""
    random_ = random.Random(seed)
    while True:
        async with Rig(model, disk=disk, memory=4_000_000) as rig:
            for _ in range(random_.randrange(3, 12)):
                number = random_.randrange(len(PROMPTS))
                if await answers(rig, [number]) != [expected[number]]:
                    os._exit(WRONG)
                os.write(begun, b".")


async def read_back(model: Path, disk: PrefixDisk, expected: Answers) -> int:
    async with Rig(model, disk=disk) as rig:
        if await answers(rig, list(range(len(PROMPTS)))) != expected:
            os._exit(WRONG)
        stats = rig.engine.stats().disk
        assert stats is not None
        return stats.hits


def in_a_child(work: Callable[[], str]) -> str:
    """Return what `work` returns, in a process whose threads are its own."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, work().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"a process ended with {status}"
    return found


def main(model: Path, folder: Path, kills: int) -> None:
    disk = PrefixDisk(folder, BUDGET)
    said = in_a_child(lambda: repr(asyncio.run(expected_of(model))))
    expected = [[int(n) for n in row.split(",")] for row in said.strip("[]").split("], [")]
    for number in range(kills):
        reading, writing = os.pipe()
        if not (child := os.fork()):
            asyncio.run(answer_for_ever(model, disk, expected, number, writing))
        os.close(writing)
        # One in some is killed while its engine is made, perhaps.
        if number % 8:
            os.read(reading, 1)
        time.sleep(0.5 * random.Random(number).random())
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"engine {number} ended by itself: {status}"
        files = [file.stat().st_size for file in folder.rglob("*.safetensors")]
        assert sum(files) <= BUDGET + max(files, default=0), f"{sum(files)} bytes"
    print(in_a_child(lambda: str(asyncio.run(read_back(model, disk, expected)))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

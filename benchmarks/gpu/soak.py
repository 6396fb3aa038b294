"""Many steps with rows that join, leave and hang up at random: nothing grows, nothing aborts.

    python benchmarks/gpu/soak.py [--shape tiny] [--steps 20000] [--folder /tmp/race]

MLX's CUDA build keeps a graph for each distinct step and is reported to abort after too many; the
steps here are as distinct as a server's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from contextlib import aclosing
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent.parent / "backend")]

import mlx.core as mx  # noqa: E402
from folders import written  # noqa: E402
from side import prompts_of  # noqa: E402

from engines import OurEngine, events_of  # noqa: E402
from mlx_manager.mlx_server.config import PoolLimits  # noqa: E402
from mlx_manager.mlx_server.core import GenerationRequest, Sampling, StopRules, Tokens  # noqa: E402

CALLERS = 48


async def caller(engine: OurEngine, number: int, steps: int) -> int:
    """One request after the other until there have been `steps`; returns how many."""
    dice = random.Random(number)
    done = 0
    while engine.backend.stats().steps < steps:
        length = dice.choice([dice.randint(1, 60), dice.randint(60, 400), dice.randint(400, 3000)])
        (prompt,) = prompts_of([length], dice.randrange(1 << 30))
        temperature = dice.choice([0.0, 0.0, 0.7, 1.0])
        request = GenerationRequest(
            model="",
            prompt=Tokens(prompt),
            sampling=Sampling(temperature=temperature, top_p=dice.choice([1.0, 0.9])),
            stop=StopRules(ignore_eos=True),
            max_tokens=dice.randint(1, 300),
        )
        hangs_up_after = dice.choice([None, None, None, dice.randint(0, 40)])
        pieces = 0
        async with aclosing(events_of(engine.backend, request)) as events:
            async for _ in events:
                pieces += 1
                if pieces == hangs_up_after:
                    break
        done += 1
    return done


async def watch(engine: OurEngine, steps: int) -> None:
    begin, every = time.perf_counter(), max(steps // 10, 1)
    following = every
    while (now := engine.backend.stats().steps) < steps:
        if now >= following:
            following += every
            print(describe(engine, now, time.perf_counter() - begin), flush=True)
        await asyncio.sleep(0.05)


def describe(engine: OurEngine, steps: int, seconds: float) -> str:
    stats = engine.backend.stats()
    return (
        f"{steps:6} steps {seconds:6.1f} s, {stats.running} running, {stats.waiting} waiting, "
        f"pages {stats.pages_held} held {stats.pages_cached} cached {stats.pages_free} free, "
        f"{mx.get_active_memory() / 1e9:.2f} GB active, {mx.get_cache_memory() / 1e9:.2f} GB cached"
    )


async def soak(engine: OurEngine, steps: int) -> int:
    _, *done = await asyncio.gather(
        watch(engine, steps), *(caller(engine, number, steps) for number in range(CALLERS))
    )
    return sum(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/race"))
    parser.add_argument("--memory-gb", type=float, default=20)
    options = parser.parse_args()
    folder = written(options.shape, options.folder / options.shape)
    engine = OurEngine(folder, PoolLimits(memory_limit=int(options.memory_gb * 1e9)))
    print(f"{mx.device_info()['device_name']}, forward {engine.backend.stats().forward}")
    requests = engine.run(soak(engine, options.steps))
    stats = engine.backend.stats()
    print(f"{requests} requests; afterwards {describe(engine, stats.steps, 0.0)}")
    if stats.running or stats.waiting or stats.pages_held:
        sys.exit("rows or pages are left")
    engine.close()


if __name__ == "__main__":
    main()

"""What running streams notice when a second model is loaded beside theirs, and asked for JSON.

Streams of one model generate in a pool as the server has it; then a model is asked for that is not
loaded, and, once it is, for an answer in JSON. The gaps are those between the pieces of text that a
stream's reader gets: before the load, from its first moment to its last, and while the answer in
JSON comes. A gap that spans a border counts as the load's. Each round has a
process of its own.

    python benchmarks/load_pause.py
    python benchmarks/load_pause.py --shapes 1b 8b --rounds 3      (on a GPU; tiny tiny anywhere)

With `--shapes` both models are synthetic (gpu/synthetic.py). The first round then begins with no
kernel compiled, as on a new machine, and the others find them on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, islice, pairwise, product
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.append(str(Path(__file__).resolve().parent / "gpu"))

from folders import written
from synthetic import SHAPES

from checks import check_engine
from engines import events_of
from harness import apart, find_model, parser, percentile, print_report, ratio, write_random_model
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import (
    GenerationRequest,
    JsonObject,
    Sampling,
    StopRules,
    Text,
    TextDelta,
)
from mlx_manager.mlx_server.main import open_pool
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.services.inference import ModelPool

LAYERS = 16
WARM, REST = 0.5, 1.0
"""Seconds until the streams have settled, and for which they are watched undisturbed."""
ANSWER = 8
"""Tokens of the answer in JSON."""


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds: the streams' gaps before and during the load and the answer in JSON, and how long
    the load took.

    forwards: how the two models are run.
    """

    idle: list[float]
    during: list[float]
    answering: list[float]
    load: float
    forwards: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Models:
    """What streams and what arrives, in words and as folders."""

    title: str
    streaming: Path
    arriving: Path


# --- The models ---------------------------------------------------------------------------------


def bundled(chosen: argparse.Namespace, folder: Path) -> Models:
    """The embedded model, or what `--model` says, and a llama under its special tokens."""
    arriving = arriving_model(folder, chosen.form, chosen.parameters, chosen.vocabulary)
    nbytes = (arriving / "model.safetensors").stat().st_size
    title = (
        f"{chosen.streams} streams of {chosen.model} while a model of {nbytes / 1e6:,.0f} MB "
        f"({chosen.form}, {chosen.vocabulary:,} tokens) is loaded"
    )
    return Models(title, find_model(chosen.model, folder), arriving)


def synthetic(chosen: argparse.Namespace, folder: Path) -> Models:
    first, second = chosen.shapes
    streaming, arriving = written(first, folder / first), folder / f"arriving-{second}"
    shutil.copytree(written(second, folder / second), arriving, copy_function=os.link)
    title = f"{chosen.streams} streams of {first} while {second} is loaded"
    return Models(title, streaming, arriving)


def arriving_model(folder: Path, form: str, parameters: float, vocabulary: int) -> Path:
    """A llama of random weights, about `parameters` of them, with as many tokens as asked for."""
    target = folder / f"arriving-{form}"
    hidden = hidden_size(parameters, vocabulary)
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "vocab_size": vocabulary,
    }
    write_random_model(target, form, sizes)
    write_tokenizer(target / "tokenizer.json", vocabulary)
    return target


def hidden_size(parameters: float, vocabulary: int) -> int:
    """A multiple of 64: `parameters` are those of the embedding and of 16 hidden² a layer."""
    wide = 64
    while vocabulary * wide + LAYERS * 16 * wide**2 < parameters:
        wide += 64
    return wide


def write_tokenizer(file: Path, vocabulary: int) -> None:
    """The embedded model's special tokens over a byte-level BPE of that many tokens in all."""
    special = json.loads(file.read_text())["added_tokens"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a, b in product(alphabet, alphabet)]
    triples = ((a + b, c) for (a, b), c in product(pairs, alphabet))
    merges = [*pairs, *islice(triples, max(0, vocabulary - 256 - len(pairs) - len(special)))]
    merges = merges[: vocabulary - 256 - len(special)]
    tokens = [*alphabet, *(a + b for a, b in merges)]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token["content"] for token in special])
    tokenizer.save(str(file))


# --- Streams and the load -----------------------------------------------------------------------


async def stream(pool: ModelPool, model: str, number: int, moments: list[float]) -> None:
    """Generates until it is cancelled, and notes when each piece comes."""
    request = GenerationRequest(
        model,
        Text(f"Stream {number} tells a story."),
        Sampling(temperature=0.0),
        StopRules(ignore_eos=True),
    )
    async with pool.lease(model) as lease:
        async for events in events_of(lease.backend, request):
            if any(isinstance(event, TextDelta) for event in events):
                moments.append(time.perf_counter())


@asynccontextmanager
async def streaming(pool: ModelPool, model: str, count: int) -> AsyncIterator[list[list[float]]]:
    """As many streams, and the moments of each one's pieces; they end with the block."""
    moments: list[list[float]] = [[] for _ in range(count)]
    running = [
        asyncio.create_task(stream(pool, model, number, times))
        for number, times in enumerate(moments)
    ]
    yield moments
    for task in running:
        if task.done():
            task.result()
            raise SystemExit("no figures: a stream ended before what it was to be beside")
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def gaps(moments: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """Of all streams, those that any part of the time from `begin` to `end` lies in."""
    return [b - a for times in moments for a, b in pairwise(times) if b > begin and a < end]


async def answer_in_json(pool: ModelPool, model: str) -> None:
    request = GenerationRequest(
        model,
        Text("In JSON:"),
        Sampling(temperature=0.0),
        max_tokens=ANSWER,
        constraint=JsonObject(),
    )
    async with pool.lease(model) as lease:
        await lease.backend.generate(request, lambda events, tokens: None)


async def loaded_beside(settings: MLXServerSettings, arriving: str, streams: int) -> Run:
    async with open_pool(settings) as opened:
        pool = cast(ModelPoolManager, opened)
        async with pool.lease(settings.model):
            pass
        async with streaming(pool, settings.model, streams) as moments:
            await asyncio.sleep(WARM)
            rested = time.perf_counter()
            await asyncio.sleep(REST)
            begin = time.perf_counter()
            async with pool.lease(arriving):
                end = time.perf_counter()
            await pool.look()
            engines = pool.figures()["engines"]
            forwards = engines[settings.model]["forward"], engines[arriving]["forward"]
            await asyncio.sleep(WARM)
            asked = time.perf_counter()
            await answer_in_json(pool, arriving)
            answered = time.perf_counter()
            await asyncio.sleep(WARM)
    return Run(
        gaps(moments, rested, begin - 1e-9),
        gaps(moments, begin, end),
        gaps(moments, asked, answered),
        end - begin,
        forwards,
    )


def one_round(models: Models, streams: int) -> Run:
    settings = MLXServerSettings(
        model=str(models.streaming), available_models=(str(models.arriving),), hf_cache=False
    )
    return asyncio.run(loaded_beside(settings, str(models.arriving), streams))


def rounds_of(models: Models, streams: int, count: int) -> list[Run]:
    runs: list[Run] = []
    for number in range(1, count + 1):
        run = apart(one_round, models, streams)
        runs.append(run)
        print(
            f"round {number} of {count}: a load of {run.load:.1f} s, the longest gaps "
            f"{1e3 * max(run.during):.0f} and {1e3 * max(run.answering):.0f} ms, "
            f"a step {1e3 * statistics.median(run.idle):.1f} ms",
            file=sys.stderr,
            flush=True,
        )
    return runs


# --- The report ---------------------------------------------------------------------------------


def line(name: str, runs: Sequence[Run], values: Sequence[Sequence[float]]) -> list[str]:
    def shown(figures: list[float]) -> str:
        return f"{1e3 * statistics.median(figures):.1f} ({1e3 * max(figures):.1f})"

    return [
        name,
        str(sum(map(len, values)) // len(runs)),
        shown([statistics.median(gaps) for gaps in values]),
        shown([percentile(gaps, 0.99) for gaps in values]),
        shown([max(gaps) for gaps in values]),
    ]


def during(what: str, runs: Sequence[Run]) -> list[list[str]]:
    took = statistics.median(run.load for run in runs)
    return [
        line(f"during the load of {took:.1f} s, {what}", runs, [run.during for run in runs]),
        line(f"during its answer in JSON, {what}", runs, [run.answering for run in runs]),
    ]


def main() -> None:
    arguments = parser(__doc__, rounds=3)
    arguments.add_argument("--streams", type=int, default=4, help="streams that are running")
    arguments.add_argument("--form", default="bf16", help="of the model that arrives: f32, 4bit")
    arguments.add_argument("--parameters", type=float, default=4e8, help="it has about so many")
    arguments.add_argument("--vocabulary", type=int, default=128_000, help="tokens that it knows")
    arguments.add_argument(
        "--shapes",
        nargs=2,
        choices=SHAPES,
        metavar=("STREAMING", "ARRIVING"),
        help=f"synthetic models instead: {', '.join(SHAPES)}",
    )
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if chosen.shapes is None:
            check_engine()
            models = bundled(chosen, folder)
        else:
            # What is compiled for an NVIDIA GPU is kept here.
            os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
            os.environ.pop("MLX_PTX_CACHE_DIR", None)
            models = synthetic(chosen, folder)
        runs = rounds_of(models, chosen.streams, chosen.rounds)
    loads = [during("all rounds", runs)]
    if chosen.shapes is not None and chosen.rounds > 1:
        # What is new to the machine is compiled in the very first.
        first, *others = runs
        loads = [during("first round", [first]), during("the others", others)]
    print_report(
        models.title,
        ["gaps, ms: median of the rounds (largest)", "gaps a round", "median", "p99", "max"],
        [line("before", runs, [run.idle for run in runs]), *chain.from_iterable(loads)],
    )
    print()
    steps = [statistics.median(run.idle) for run in runs]
    worst = ratio([max(run.during) for run in runs], steps)
    print(f"The longest gap of a load is {worst} a step.")
    print(f"The models are run so: {' and '.join(runs[0].forwards)}.")


if __name__ == "__main__":
    main()

"""What running streams notice when a second, bigger model is loaded beside theirs.

Streams of one model generate in a pool as the server has it; then a model is asked for that is not
loaded. The gaps are those between the pieces of text that a stream's reader gets: before the load,
and from its first moment to its last. A gap that spans a border counts as the load's.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checks import check_engine
from harness import find_model, parser, percentile, print_report, ratio, write_random_llama
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import GenerationRequest, Sampling, StopRules, Text, TextDelta
from mlx_manager.mlx_server.main import open_pool
from mlx_manager.mlx_server.services.inference import ModelPool

LAYERS = 16
WARM, REST = 0.5, 1.0
"""Seconds until the streams have settled, and for which they are watched undisturbed."""


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds: the streams' gaps before and during the load, and how long it took."""

    idle: list[float]
    during: list[float]
    load: float


# --- The model that arrives ---------------------------------------------------------------------


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
    write_random_llama(target, form, sizes)
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
        async for events in lease.backend.generate(request):
            if any(isinstance(event, TextDelta) for event in events):
                moments.append(time.perf_counter())


def gaps(moments: Sequence[Sequence[float]], begin: float, end: float) -> list[float]:
    """Of all streams, those that any part of the time from `begin` to `end` lies in."""
    return [b - a for times in moments for a, b in pairwise(times) if b > begin and a < end]


async def one_run(settings: MLXServerSettings, arriving: str, streams: int) -> Run:
    async with open_pool(settings) as pool:
        async with pool.lease(settings.model):
            pass
        moments: list[list[float]] = [[] for _ in range(streams)]
        running = [
            asyncio.create_task(stream(pool, settings.model, number, times))
            for number, times in enumerate(moments)
        ]
        await asyncio.sleep(WARM)
        rested = time.perf_counter()
        await asyncio.sleep(REST)
        begin = time.perf_counter()
        async with pool.lease(arriving):
            end = time.perf_counter()
        await asyncio.sleep(WARM)
        for task in running:
            if task.done():
                task.result()
                raise SystemExit("no figures: a stream ended before the load did")
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return Run(gaps(moments, rested, begin - 1e-9), gaps(moments, begin, end), end - begin)


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


def main() -> None:
    arguments = parser(__doc__, rounds=3)
    arguments.add_argument("--streams", type=int, default=4, help="streams that are running")
    arguments.add_argument("--form", default="bf16", help="of the model that arrives: f32, 4bit")
    arguments.add_argument("--parameters", type=float, default=4e8, help="it has about so many")
    arguments.add_argument("--vocabulary", type=int, default=128_000, help="tokens that it knows")
    chosen = arguments.parse_args()
    check_engine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = find_model(chosen.model, folder)
        arriving = arriving_model(folder, chosen.form, chosen.parameters, chosen.vocabulary)
        nbytes = (arriving / "model.safetensors").stat().st_size
        settings = MLXServerSettings(
            model=str(model), available_models=(str(arriving),), hf_cache=False
        )
        runs = [
            asyncio.run(one_run(settings, str(arriving), chosen.streams))
            for _ in range(chosen.rounds)
        ]
        print_report(
            f"{chosen.streams} streams of {chosen.model} while a model of {nbytes / 1e6:,.0f} MB "
            f"({chosen.form}, {chosen.vocabulary:,} tokens) is loaded",
            ["gaps, ms: median of the rounds (largest)", "gaps a round", "median", "p99", "max"],
            [
                line("before", runs, [run.idle for run in runs]),
                line(
                    f"during the load of {statistics.median(run.load for run in runs):.1f} s",
                    runs,
                    [run.during for run in runs],
                ),
            ],
        )
        worst = ratio(
            [max(run.during) for run in runs], [statistics.median(run.idle) for run in runs]
        )
        print(f"\nThe longest gap of a load is {worst} a step.")


if __name__ == "__main__":
    main()

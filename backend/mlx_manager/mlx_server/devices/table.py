"""The devices that MLX computes on, and by how much the engine is tuned for each.

What was measured on an NVIDIA GPU holds for no Mac, and the other way round: what differs stands
here, in one row a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import mlx.core as mx

Kind = Literal["cpu", "cuda", "metal"]


@dataclass(frozen=True, slots=True)
class Device:
    """One row of the table.

    in_order: launches of one stream run in the order in which they are queued. MLX on Metal orders
    them by the arrays that they bind alone, and a write into an input is none.
    records_steps: a step is recorded as one graph, which long recordings make cheaper.
    frees_at_once: buffers can be freed without waiting for all that is under way.

    chunk: most prompt tokens of a step. ample: most where such a step is short. first_chunk: most
    before it is known what a prompt token costs. least_chunk: fewest beside running rows.
    least_by_host: fewer than that, as many as take the device no longer than a step takes the host.
    buffer_seconds: longest that one recording of launches may take, as the system ends those that
    take seconds. buffer_ops: launches that it may have, unless the environment says otherwise.

    halves_failed: a step that failed may have taken too long: later ones have half its prompts'
    tokens.

    growth: KV pages that are added at a time, at least and at most. growth_part: at least this part
    of what memory is left, where steps are compiled for each number of pages. cache_part: most of
    the memory limit that MLX keeps in freed buffers; None: MLX's own default.
    scores: most scores of attention at once, where MLX holds them all; None: as many as there are.
    scores_by_chunk: chunks of prompts are cut by that, too, where modules attend by themselves.
    flash_dims: head sizes for which MLX's attention of many queries holds no scores.

    warm_rows, warm_chunk: the most rows, and the tokens of a prompt, that a load has compiled.
    """

    kind: Kind
    in_order: bool = True
    records_steps: bool = False
    frees_at_once: bool = True
    chunk: int = 2048
    ample: int = 2048
    first_chunk: int | None = None
    least_chunk: int = 1
    least_by_host: bool = False
    buffer_seconds: float = inf
    buffer_ops: int = 1
    halves_failed: bool = False
    growth: tuple[int, float] = (64, inf)
    growth_part: float = 0.0
    cache_part: float | None = None
    scores: int | None = None
    scores_by_chunk: bool = False
    flash_dims: frozenset[int] = frozenset()
    warm_rows: int = 128
    warm_chunk: int = 512


CPU = Device(
    "cpu",
    chunk=512,
    ample=512,
    # After 4 000 tokens, eight of them take a CPU twice as long as eight rows.
    least_chunk=4,
    # MLX's CPU backend holds a block's scores all at once, and 512 queries of 32 heads over 32 000
    # keys would be 2 GB.
    scores=1 << 21,
)
CUDA = Device(
    "cuda",
    records_steps=True,
    # To free buffers waits for all that is under way, 20 ms.
    frees_at_once=False,
    # An H200 is busy to 0.9 with 2 048 tokens of an 8B, and to 0.6 with 512.
    chunk=2048,
    # Keeps an H100 busy if a token takes little work: of 64 experts, 4 a token, each multiplies
    # only 128 rows with 2 048 tokens.
    ample=8192,
    # A step with prompts costs the host some 10 ms whatever they are (an 8B's 32 layers).
    least_chunk=256,
    # Each new number of pages costs a compilation.
    growth=(1024, inf),
    growth_part=0.8,
)
METAL = Device(
    "metal",
    in_order=False,
    chunk=2048,
    ample=2048,
    # 1.7 s of an 8B on an M1.
    first_chunk=256,
    least_chunk=256,
    least_by_host=True,
    # macOS ends a command buffer after about five seconds, and sooner where the screen stutters.
    buffer_seconds=0.3,
    # MLX's own limit is 40 on most of Apple's GPUs, and 50 on the largest ones.
    buffer_ops=50,
    halves_failed=True,
    # Memory belongs to other programs, too: 128 pages of Qwen3 8B are 300 MB.
    growth=(64, 128),
    cache_part=1 / 8,
    # Some 200 MB. Four times as many queries at once are hardly faster.
    scores=1 << 25,
    scores_by_chunk=True,
    # Head sizes of MLX 0.32 (scaled_dot_product_attention.cpp), for more queries than eight.
    flash_dims=frozenset({64, 80, 128}),
    # 128 rows and 512 tokens take an M1 seconds, and compile nothing that fewer do not.
    warm_rows=1,
    warm_chunk=64,
)


def current() -> Device:
    """Return the default device's row."""
    if mx.default_device() == mx.cpu:
        return CPU
    return METAL if mx.metal.is_available() else CUDA

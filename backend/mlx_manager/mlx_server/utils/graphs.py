"""How MLX's CUDA build records steps, which it reads from the environment at its first use."""

from __future__ import annotations

import os

SETTINGS = {
    # Graphs kept for steps of different shapes. By default 400; beyond twice as many misses in its
    # life the process is reported to abort.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4000",
    # A decode step is one graph. By default it is cut after 100 operations, or 1 000 million
    # elements of inputs, which a few layers of an 8B reach: 5.87 ms a step of 64 rows, not 5.59.
    "MLX_MAX_OPS_PER_BUFFER": "1000",
    "MLX_MAX_MB_PER_BUFFER": "1000000",
}


def record_whole_steps() -> None:
    """Set what the owner has not set. Before MLX computes anything; without effect elsewhere."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)

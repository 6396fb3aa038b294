"""The program of a worker that runs steps as on a GPU, by kernels that any device has: a step is
queued before the last one's tokens are read."""

from __future__ import annotations

import sys
from functools import partial

from devices.portable import Traceable, TraceableWriter, plainly

from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.workers import host, model, ranks

if __name__ == "__main__":
    ranks.PROGRAM = "portable_rank"
    by_kernels = partial(choose, kernels=Traceable, writers=TraceableWriter, compile=plainly)
    model.choose = by_kernels  # type: ignore[assignment]
    host.main(sys.argv[1:])

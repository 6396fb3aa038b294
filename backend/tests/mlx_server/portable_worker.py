"""The program of a worker that runs steps as on a GPU, by kernels that any device has: a step is
queued before the last one's tokens are read."""

from __future__ import annotations

import sys
from functools import partial

from devices.portable import Traceable
from portable_rank import KERNELS, prepare

from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.workers import host, model, ranks

if __name__ == "__main__":
    prepare()
    ranks.PROGRAM = "portable_rank"
    model.choose = partial(choose, kernels=Traceable, **KERNELS)  # type: ignore[assignment]
    host.main(sys.argv[1:])

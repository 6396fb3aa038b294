"""The program of a rank whose rank 0 runs `portable_worker`."""

from __future__ import annotations

import sys
from functools import partial

from devices.portable import Traceable, TraceableWriter, plainly

from mlx_manager.mlx_server.execution.group import follower
from mlx_manager.mlx_server.execution.select import Ways
from mlx_manager.mlx_server.workers import rank

if __name__ == "__main__":
    by_kernels = partial(Ways, build=Traceable, writers=TraceableWriter, compile=plainly)
    follower.Ways = by_kernels  # type: ignore[assignment, misc]
    rank.main(sys.argv[1:])

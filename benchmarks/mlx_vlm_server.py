"""Starts `mlx_vlm.server` as a fair peer; the arguments are its own.

It gets the BLAS that MLX's CPU build calls on our side, unless PEER_BLAS says "own". It imports
more than our environment has: run it by the Python of an environment with all of mlx-vlm's
packages, with our `backend` in PYTHONPATH.
"""

from __future__ import annotations

import os

from mlx_vlm.server.cli import main

from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas

if os.environ.get("PEER_BLAS") != "own":
    load_fast_blas()
main()

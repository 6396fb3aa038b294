"""Starts `mlx_lm.server` as a fair peer; the arguments are its own.

Two things are as on our side: the BLAS that MLX's CPU build calls, unless PEER_BLAS says "own", and
a listen backlog of 1 024. With its own backlog of 5, a burst of connections measures how TCP
retransmits, not the server.
"""

from __future__ import annotations

import os
from http.server import ThreadingHTTPServer

from mlx_lm.server import main

from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas

if os.environ.get("PEER_BLAS") != "own":
    load_fast_blas()
ThreadingHTTPServer.request_queue_size = 1024
main()

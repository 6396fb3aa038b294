"""The program of a rank whose rank 0 runs `portable_worker`."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

from devices.cuda.linear_attention.portable import PortableDelta, PortableShort
from devices.cuda.matmul.portable import PortableProducts
from devices.portable import PortableLatents, Traceable, TraceableWriter, plainly

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.execution.decoder import forward
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.group import follower
from mlx_manager.mlx_server.execution.select import Ways
from mlx_manager.mlx_server.workers import rank

KERNELS: dict[str, Any] = {
    "writers": TraceableWriter,
    "compile": plainly,
    "deltas": PortableDelta,
    "latents": PortableLatents.build,
    "shorts": PortableShort,
}


def prepare() -> None:
    """Give decoders products by portable kernels, which need little to warm up."""
    build = partial(FusedDecoder.build, products=lambda _: PortableProducts())
    FusedDecoder.build = staticmethod(build)  # type: ignore[method-assign,assignment,arg-type]
    forward.LONG = 256
    devices.CPU = replace(devices.CPU, warm_chunk=64)


if __name__ == "__main__":
    prepare()
    follower.Ways = partial(Ways, build=Traceable, **KERNELS)  # type: ignore[assignment,misc]
    rank.main(sys.argv[1:])

"""Models run by portable kernels, which stand in for a GPU's."""

from __future__ import annotations

from functools import partial

from devices.cuda.linear_attention.portable import PortableDelta, PortableShort
from devices.portable import Portable, PortableLatents, PortableWriter, plainly

from mlx_manager.mlx_server.execution.select import choose

on_kernels = partial(
    choose,
    kernels=Portable,
    compile=plainly,
    deltas=PortableDelta,
    writers=PortableWriter,
    latents=PortableLatents.build,
    shorts=PortableShort,
)

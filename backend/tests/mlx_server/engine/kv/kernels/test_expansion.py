"""Latent vectors made into keys and values of heads against plain arithmetic."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from engine.kv.kernels.test_kernels import BF16, DEVICE, F16
from engine.kv.kernels.test_latent import HALVES, NEIGHBOURS, Emulated
from engine.portable import PortableChunks

from mlx_manager.mlx_server.engine.kv.kernels import Expansion, Text, chunks
from mlx_manager.mlx_server.engine.kv.kernels.chunk_tiles import GroupTiles, Tiles, WarpTiles
from mlx_manager.mlx_server.engine.kv.kernels.chunks import ChunkKernels
from mlx_manager.mlx_server.engine.kv.kernels.latent_check import checking_expansion
from mlx_manager.mlx_server.engine.kv.kernels.latent_shape import LatentShape
from mlx_manager.mlx_server.utils.steps import finish

GLM = LatentShape(20, 512, 64, 192, 768, 32, BF16, 256)
DEEPSEEK = LatentShape(128, 512, 64, 128, 1536, 16, BF16, 128)
SMALL = LatentShape(2, 64, 16, 48, 128, 16, BF16, 64)
# Values that are wider than keys, and of another width than those of kernels.
WIDE = LatentShape(3, 64, 16, 8, 72, 32, F16, 40)


@pytest.mark.parametrize("tiles", [WarpTiles(4, 32), GroupTiles(2, 64)], ids=lambda of: of.name)
def test_kernels_for_chunks_attend_to_what_is_expanded(tiles: Tiles, compile_cuda, monkeypatch):
    def compiled(text, **_):
        return Emulated(compile_cuda, text)

    monkeypatch.setattr(chunks, "compiled_for_cuda", compiled)
    expansion = Expansion(SMALL, ChunkKernels(SMALL.expanded, DEVICE, tiles))
    assert finish(checking_expansion(expansion, traditional=NEIGHBOURS)) is None

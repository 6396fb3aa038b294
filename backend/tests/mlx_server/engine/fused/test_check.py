"""What finds a decoder wrong."""

from __future__ import annotations

from engine.common_decoders import make
from engine.portable import Portable, plainly

from mlx_manager.mlx_server.engine.fused.check import check
from mlx_manager.mlx_server.engine.fused.decoder import FusedDecoder

PAGE = 16


def test_check_notices_what_a_name_would_hide():
    model = make("llama", {})
    decoder = FusedDecoder.build(model, PAGE, Portable, compile=plainly)
    for block in model.model.layers:
        block.self_attn.scale *= 1.5
    assert "differ from the module's" in check(decoder, model, PAGE)

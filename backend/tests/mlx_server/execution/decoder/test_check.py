"""What finds a decoder wrong."""

from __future__ import annotations

from devices.portable import Portable, plainly
from execution.decoder.common_decoders import make

from mlx_manager.mlx_server.execution.decoder.check import check
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder

PAGE = 16


def test_check_notices_what_a_name_would_hide():
    model = make("llama", {})
    decoder = FusedDecoder.build(model, PAGE, Portable, compile=plainly)
    for block in model.model.layers:
        block.self_attn.scale *= 1.5
    assert "differ from the module's" in check(decoder, model, PAGE)

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.mla import MultiLinear

from mlx_manager.mlx_server.execution.attention.latent import multiply_by_head


class Holder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("shape", [(1, 5, 1), (3, 5, 1), (1, 5, 4), (2, 5, 3)])
@pytest.mark.parametrize("turned", [True, False])
def test_each_head_s_matrix_multiplies_all_rows(
    bits: int | None, shape: tuple[int, int, int], turned: bool
) -> None:
    layer: nn.Module = MultiLinear(64, 96, 5)
    if bits is not None:
        layer = layer.to_quantized(32, bits)
    x = mx.random.normal((*shape, 64 if turned else 96), key=mx.random.key(1))
    theirs = layer(x, transpose=turned)
    model = Holder(layer)
    multiply_by_head(model)
    # Once more changes nothing.
    multiply_by_head(model)
    assert mx.allclose(model.layer(x, transpose=turned), theirs, atol=1e-5)
    assert isinstance(model.layer, MultiLinear) == (bits is None)

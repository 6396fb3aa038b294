"""Which modules are common decoders."""

from __future__ import annotations

import pytest
from engine.common_decoders import make
from engine.portable import Portable

from mlx_manager.mlx_server.engine.fused.decoder import FusedDecoder
from mlx_manager.mlx_server.engine.kernels.kernel import Unsupported

PAGE = 16
MINISTRAL = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}, "a body of other parts"),
        ("olmo2", {"head_dim": 16}, "a block of other parts"),
        ("ministral3", MINISTRAL, "attention that takes attn_scale"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "DynamicNTK"),
        ("llama", {"num_attention_heads": 8}, "rotation of 8 elements"),
    ],
)
def test_other_modules_are_declined_with_the_difference(family, changes, reason):
    declined = FusedDecoder.build(make(family, changes), PAGE, Portable)
    assert isinstance(declined, Unsupported)
    assert reason in declined.reason


def test_a_device_without_kernels_is_the_reason():
    declined = FusedDecoder.build(make("llama", {}), PAGE, lambda _: Unsupported("no GPU here"))
    assert declined == Unsupported("the module is no common decoder: no GPU here")

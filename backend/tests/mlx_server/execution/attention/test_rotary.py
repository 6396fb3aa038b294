from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from mlx_manager.mlx_server.execution.attention.rotary import SharedRotation

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROTATIONS = {
    "plain": nn.RoPE(32, traditional=False, base=10000.0),
    "interleaved": nn.RoPE(32, traditional=True, base=500000.0),
    "partial": nn.RoPE(16, traditional=False, base=10000.0),
    "partial interleaved": nn.RoPE(8, traditional=True, base=10000.0),
    "llama 3": Llama3RoPE(32, 2048, False, 500000.0, LLAMA3),
    "yarn": YarnRoPE(32, scaling_factor=4.0),
    "longrope": SuScaledRoPE(32, long_factor=[1.5] * 16, original_max_position_embeddings=256),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_a_shared_rotation_turns_as_the_models_own_does(name: str) -> None:
    rope = ROTATIONS[name]
    shared = SharedRotation(rope, 32)
    x = mx.random.normal((5, 3, 1, 32), key=mx.random.key(1))
    positions = mx.array([0, 1, 17, 400, 1999], mx.int32)
    error = mx.abs(shared(x, positions) - rope(x, offset=positions)).max().item()
    assert error < 1e-4


def test_what_mixes_more_than_pairs_is_not_taken_for_a_rotation() -> None:
    class Mixing(nn.Module):
        def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
            return x + x.sum(axis=-1, keepdims=True)

    with pytest.raises(ValueError, match="more than pairs"):
        SharedRotation(Mixing(), 32)

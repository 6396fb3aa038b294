from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

from mlx_manager.mlx_server.devices.cpu.convolution import Taps, with_taps


def of_each_channel(channels: int, taps: int, *, bias: bool = False) -> nn.Conv1d:
    conv = nn.Conv1d(channels, channels, taps, groups=channels, bias=bias)
    if bias:
        conv.bias = mx.random.normal((channels,), key=mx.random.key(3))
    return conv


@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(2, 70),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    st.sampled_from([mx.float32, mx.bfloat16]),
)
@settings(deadline=None, max_examples=60)
def test_taps_are_the_convolution(
    rows: int,
    tokens: int,
    channels: int,
    count: int,
    bias: bool,
    dtype: mx.Dtype,
    of_input: mx.Dtype,
) -> None:
    conv = of_each_channel(channels, count, bias=bias)
    conv.set_dtype(dtype)
    x = mx.random.normal((rows, tokens + count - 1, channels), key=mx.random.key(tokens))
    x = x.astype(of_input)
    taps = Taps(conv)
    wanted = conv(x)
    assert taps(x).dtype == wanted.dtype
    exact = wanted.dtype == mx.float32
    assert mx.allclose(taps(x), wanted, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 2e-2)
    assert mx.array_equal(taps.weight, conv.weight)


def test_a_models_convolutions_of_each_channel_become_taps_once() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.short = of_each_channel(8, 4)
            self.others = [nn.Conv1d(8, 8, 4), nn.Conv1d(8, 8, 4, groups=8, padding=3)]

        def __call__(self, x: mx.array) -> mx.array:
            return sum((other(x)[:, :5] for other in self.others), self.short(x)[:, :5])

    layer, x = Layer(), mx.random.normal((2, 9, 8), key=mx.random.key(0))
    before = layer(x)
    with_taps(layer)
    placed = layer.short
    with_taps(layer)
    assert isinstance(placed, Taps)
    assert layer.short is placed
    assert [type(other) for other in layer.others] == [nn.Conv1d] * 2
    assert mx.allclose(layer(x), before, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_what_skips_tokens_is_left_as_it_is(stride: int) -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 2, stride=stride, groups=4))
    with_taps(model)
    assert isinstance(model.layers[0], Taps) is (stride == 1)

"""How far logits may be from a model's own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from execution.decoder.common_decoders import EXPERTS, HYBRIDS, make
from mlx import nn
from thorough import slow

from mlx_manager.mlx_server.devices.likeness import (
    carries_on,
    difference,
    distance,
    may_stray,
)
from mlx_manager.mlx_server.execution.select import choose


class Uneven(nn.Module):
    """A norm that rounds otherwise for other numbers of rows, as a GPU's products do."""

    def __init__(self, norm: nn.RMSNorm, by: float) -> None:
        super().__init__()
        self.norm, self.by = norm, by

    def __call__(self, x: mx.array) -> mx.array:
        y = self.norm(x)
        turned = mx.random.normal(y.shape, key=mx.random.key(y.size // y.shape[-1]))
        return y * (1 + self.by * turned).astype(y.dtype)


def uneven(family: str, by: float) -> nn.Module:
    """Of 12 layers, packed and in bfloat16."""
    kinds = ["full_attention", "sliding_attention"] * 6
    more = {"num_hidden_layers": 12, "layer_types": kinds, "num_local_experts": 16}
    model = make(family, EXPERTS[family] | more if family in EXPERTS else {"num_hidden_layers": 12})
    nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.bfloat16)
    for layer in model.layers:
        layer.post_attention_layernorm = Uneven(layer.post_attention_layernorm, by)
    return model


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("mixtral", marks=slow)])
def test_a_model_is_batched_though_rounding_sends_rows_through_other_experts(family):
    assert choose(uneven(family, 0.004), 16).kind == "ragged"


def test_logits_that_are_as_far_from_a_model_without_experts_are_another_s():
    assert choose(uneven("mixtral", 0.03), 16).kind == "ragged"
    assert choose(uneven("llama", 0.03), 16).kind == "alone"


def test_only_half_precision_sends_rows_through_other_experts():
    model = make("mixtral", EXPERTS["mixtral"])
    assert not may_stray(model, mx.zeros(3))
    assert may_stray(model, mx.zeros(3, mx.bfloat16))
    assert not may_stray(make("llama", {}), mx.zeros(3, mx.bfloat16))


def test_rounding_is_carried_on_by_a_state_and_in_half_precision_alone():
    model = make("qwen3_5", HYBRIDS["qwen3_5"])
    assert carries_on(model, mx.zeros(3, mx.bfloat16))
    assert not carries_on(model, mx.zeros(3))
    assert not carries_on(make("llama", {}), mx.zeros(3, mx.bfloat16))


@pytest.mark.parametrize(
    ("distances", "strays", "right"),
    [
        ([0.01, 0.04, 0.05], False, True),
        ([0.01, 0.01, 0.06], False, False),
        ([0.01, 0.01, 0.4], True, True),
        ([0.01, 0.2, 0.4], True, False),
        ([0.01, 0.01, 0.6], True, False),
        ([0.01, 0.01, float("inf")], True, False),
    ],
)
def test_few_rows_may_be_farther_where_rounding_sends_them_through_other_experts(
    distances, strays, right
):
    assert (difference(distances, 0.05, strays=strays) is None) == right


def test_what_is_no_number_is_as_far_as_can_be():
    theirs = mx.array([3.0, 4.0])
    assert distance(mx.array([3.0, 4.5]), theirs) == pytest.approx(0.1)
    assert np.isinf(distance(mx.array([3.0, float("nan")]), theirs))

"""Settings of config.json, and the registry; what the modules compute is in `backends`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from tiny_encoders import CONFIGS

from mlx_manager.mlx_server.encoders.architectures import ARCHITECTURES
from mlx_manager.mlx_server.encoders.architectures.architecture import Config
from mlx_manager.mlx_server.encoders.architectures.mpnet import buckets_of
from mlx_manager.mlx_server.encoders.architectures.roberta import places_after
from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.architectures import ENCODERS


def config(**values: Any) -> Config:
    return Config(values, "m")


def test_what_is_listed_as_served_has_a_module():
    assert ARCHITECTURES.keys() == ENCODERS == CONFIGS.keys()


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "2", [2]])
def test_a_size_is_a_whole_number(value: Any):
    with pytest.raises(ModelLoadFailed, match=r"m can't be loaded: .* has hidden_size .*; it should be a whole number from 1 on"):  # fmt: skip
        config(hidden_size=value).whole("hidden_size", 768)


def test_a_setting_that_is_missing_or_null_has_its_default():
    assert config(hidden_size=None).whole("hidden_size", 768) == 768
    assert config().flag("norm_bias", False) is False
    assert config(is_decoder=None).must_be("is_decoder", False) is None


def test_layers_are_of_the_types_that_are_told_or_of_the_old_pattern():
    told = {"layer_types": ["sliding_attention", "full_attention"]}
    assert config(**told).layer_types(2, bool) == [True, False]
    assert config().layer_types(3, lambda index: index != 0) == [False, True, True]
    with pytest.raises(ModelLoadFailed, match="a list of 3 types, one for each layer"):
        config(**told).layer_types(3, bool)
    with pytest.raises(ModelNotSupported, match="a layer of type 'linear_attention'"):
        config(layer_types=["linear_attention"]).layer_types(1, bool)


@pytest.mark.parametrize(
    ("values", "base"),
    [
        ({}, 7.0),
        ({"local_rope_theta": 5.0}, 5.0),
        ({"rope_theta": 3.0}, 7.0),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 4.0}}}, 4.0),
        ({"rope_parameters": {"full_attention": {"rope_theta": 4.0}}, "local_rope_theta": 5.0}, 5.0),
    ],
)  # fmt: skip
def test_a_layer_has_the_base_of_its_type(values: dict[str, Any], base: float):
    assert config(**values).rotary_base(7.0, "sliding_attention", "local_rope_theta") == base


def test_a_base_for_all_layers_is_that_of_each():
    assert config(rope_theta=3.0).rotary_base(7.0, "full_attention") == 3.0
    assert config(rope_parameters={"rope_theta": 3.0}).rotary_base(7.0) == 3.0


@pytest.mark.parametrize("architecture", ["gemma3_text", "modernbert", "qwen3"])
@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear", "factor": 8.0}, {"partial_rotary_factor": 0.5}]
)
def test_positions_that_are_scaled_are_refused(architecture: str, rope: dict[str, Any]):
    values = CONFIGS[architecture] | {"rope_parameters": {"rope_theta": 1e4, **rope}}
    with pytest.raises(ModelNotSupported, match="m has a RoPE scaling"):
        ARCHITECTURES[architecture].sizes(Config(values, "m"))


def test_places_are_counted_from_the_paddings_on():
    ids = mx.array([[5, 1, 6, 7, 1, 1]])
    assert places_after(ids, 1).tolist() == [[2, 1, 3, 4, 1, 1]]


def test_distances_have_the_buckets_of_t5():
    first = buckets_of(200)[:, 0].tolist()
    # Tokens before have 0 to 15: eight by themselves, then wider ones up to a distance of 128.
    assert first[:10] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert [first[away] for away in (15, 16, 31, 32, 63, 64, 127, 128, 199)] == [9, 10, 11, 12, 13, 14, 15, 15, 15]  # fmt: skip
    assert buckets_of(200)[0].tolist() == [0, *(bucket + 16 for bucket in first[1:])]

"""Shares of weights, without other ranks: each rank's is made from the same whole."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from tiny_models import FAMILIES, make_tiny_model

from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.models.loading.load import bytes_of
from mlx_manager.mlx_server.models.loading.shards import check_shared, shard, sharer

SHARED = [
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe", "glm4_moe_lite"),
    *("gpt_oss", "llama", "longcat_flash", "minimax", "ministral3", "qwen2", "qwen3", "qwen3_5"),
    "qwen3_moe",
]


class Seat:
    """A rank's place in a group that computes nothing together."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("family", SHARED)
def test_every_matrix_is_shared_out_or_whole_on_both_ranks(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(tmp_path / "m", family)
    whole, *ranks = (load_model(folder, lazy=True)[0] for _ in range(3))
    for rank, model in enumerate(ranks):
        shard("m", model, Seat(rank, 2))  # type: ignore[arg-type]
    kept = [dict(tree_flatten(model.parameters())) for model in ranks]
    for name, array in tree_flatten(whole.parameters()):
        parts = [each[name] for each in kept]
        assert parts[0].shape == parts[1].shape
        halves = [axis for axis, n in enumerate(array.shape) if 2 * parts[0].shape[axis] == n]
        assert halves or parts[0].shape == array.shape
        if len(halves) == 1 and name.endswith(
            ("q_proj.weight", "o_proj.weight", "down_proj.weight")
        ):
            assert mx.array_equal(mx.concatenate(parts, axis=halves[0]), array)
    assert sum(map(bytes_of, ranks)) < 2 * bytes_of(whole)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"tie_word_embeddings": False, "vocab_size": 258}, 129),
        ({"tie_word_embeddings": False, "vocab_size": 257}, 257),
        ({"tie_word_embeddings": True, "vocab_size": 258}, None),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_each_rank_has_its_rows_of_the_vocabulary_where_they_divide(
    tmp_path: Path, settings: dict[str, int], rows: int | None, packed: bool
) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama", **settings)
    models = [load_model(folder, lazy=True)[0] for _ in range(2)]
    for rank, model in enumerate(models):
        if packed:
            nn.quantize(model, group_size=32, bits=8)
        shard("m", model, Seat(rank, 2))  # type: ignore[arg-type]
    heads = [model.get("lm_head") for model in models]
    assert [None if head is None else len(head.weight) for head in heads] == [rows, rows]


@pytest.mark.parametrize(
    ("family", "size", "settings", "reason"),
    [
        ("llama", 2, {"num_key_value_heads": 1}, r"1 \(n_kv_heads of model.layers.\d.self_attn\)"),
        ("qwen3", 4, {}, r"2 \(n_kv_heads of"),
        ("qwen3", 3, {}, "3 devices: "),
        ("gpt_oss", 8, {}, "8 devices: "),
    ],
)
def test_heads_that_do_not_divide_are_refused_by_name(
    tmp_path: Path, family: str, size: int, settings: dict[str, int], reason: str
) -> None:
    model, _ = load_model(make_tiny_model(tmp_path / "m", family, **settings), lazy=True)
    with pytest.raises(ModelNotSupported, match=reason) as refusal:
        shard("m", model, Seat(0, size))  # type: ignore[arg-type]
    assert "devices = 1" in refusal.value.message


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - set(SHARED)))
def test_architectures_that_mlx_lm_does_not_share_out_are_refused(
    tmp_path: Path, family: str
) -> None:
    model, _ = load_model(make_tiny_model(tmp_path / "m", family), lazy=True)
    if sharer(model) is not None:
        return
    with pytest.raises(ModelNotSupported, match=rf"'{family}' model, which mlx-lm .* can't spread"):
        check_shared("m", model, family)

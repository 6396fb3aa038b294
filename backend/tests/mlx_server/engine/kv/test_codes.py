"""Keys and values in 8 bits: how near they stay, and what their pages hold."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_manager.mlx_server.devices.attention import codes
from mlx_manager.mlx_server.engine.kv.coded import CodedStore, is_coded
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore, Numbers

SHAPE = LayerShape(2, 64, 64, mx.bfloat16)


def through(heads: mx.array, group: int) -> np.ndarray:
    return np.array(codes.decoded(*codes.encoded(heads, group), mx.float32))


@settings(max_examples=60)
@given(
    dim=st.sampled_from([8, 16, 32, 64, 72, 80, 96, 128]),
    magnitude=st.floats(-12, 12),
    spread=st.floats(0, 3),
    seed=st.integers(0, 1000),
)
def test_no_number_moves_by_more_than_half_a_step_of_its_group(
    dim: int, magnitude: float, spread: float, seed: int
) -> None:
    group = codes.group_of(dim)
    assert group is not None
    chance = np.random.default_rng(seed)
    # Channels of very different sizes, as keys have them.
    drawn = chance.normal(size=(3, 5, dim)) * 10 ** (magnitude + spread * chance.normal(size=dim))
    heads = drawn.astype(np.float32)
    largest = np.abs(heads).reshape(3, 5, -1, group).max(-1, keepdims=True)
    off = np.abs(through(mx.array(heads), group) - heads).reshape(3, 5, -1, group)
    # Bfloat16 keeps 8 bits of a scale.
    assert (off <= 0.5 * largest / codes.MOST * (1 + 2.0**-7)).all()


def test_zeros_stay_zeros_and_what_is_encoded_again_stays_what_it_is() -> None:
    assert not through(mx.zeros((2, 3, 64)), 32).any()
    once = through(mx.random.normal((2, 30, 64), key=mx.random.key(1)), 32)
    np.testing.assert_array_equal(through(mx.array(once), 32), once)


@pytest.mark.parametrize(
    ("dim", "group"),
    [(64, 64), (128, 64), (80, 40), (72, 36), (16, 16), (8, 8), (4, None), (134, None)],
)
def test_groups_divide_the_head(dim: int, group: int | None) -> None:
    assert codes.group_of(dim) == group


def test_a_token_takes_little_more_than_half() -> None:
    store = CodedStore(SHAPE, 16)
    store.resize(10)
    assert store.token_bytes * 160 == sum(array.nbytes for array in store.held)
    assert store.token_bytes / LayerStore(SHAPE, 16).token_bytes == pytest.approx(0.516, abs=0.001)


def test_latent_vectors_and_heads_without_groups_are_not_coded() -> None:
    assert is_coded(SHAPE)
    for shape in (LayerShape(1, 512, 64, mx.float16), LayerShape(2, 134, 134, mx.float16)):
        assert not is_coded(shape)
        with pytest.raises(ValueError, match="8 bits"):
            CodedStore(shape, 16)


def test_pages_keep_what_was_written_while_others_are_written_cleared_and_added() -> None:
    heads = mx.random.normal((4, 24, 64), key=mx.random.key(2)).astype(mx.bfloat16)
    keys, values = heads[:2], heads[2:]
    turn = codes.turn_of(64)
    kept = codes.decoded(*codes.encoded(heads.astype(mx.float32) @ turn, 64), mx.bfloat16)
    store = CodedStore(SHAPE, 8)
    store.resize(6)
    # Pages 4, 1 and 3, the last two written as one slice each.
    store.write(keys[:, :8], values[:, :8], Numbers(np.arange(32, 40, dtype=np.int32)))
    store.write(keys[:, 8:16], values[:, 8:16], slice(8, 16))
    store.write(keys[:, 16:], values[:, 16:], slice(24, 32))
    store.clear([0, 2, 5])
    store.resize(9)
    store.write(keys[:, :8], values[:, :8], Numbers(np.arange(64, 72, dtype=np.int32)))
    found = store.gather(Numbers(np.array([[4, 1, 3], [8, 2, 0]], np.int32)))
    np.testing.assert_array_equal(
        np.array(mx.concatenate(found, axis=1)[0].astype(mx.float32)),
        np.array(kept.astype(mx.float32)),
    )
    assert not np.array(mx.concatenate(found, axis=1)[1, :, 8:].astype(mx.float32)).any()
    again = store.slice(8, 16)
    np.testing.assert_array_equal(
        np.array(mx.concatenate(again, axis=1)[0].astype(mx.float32)),
        np.array(kept[:, 8:16].astype(mx.float32)),
    )
    assert store.format == "int8/64"


@pytest.mark.parametrize("dim", [8, 16, 64, 72, 80, 96, 128, 256])
def test_heads_are_turned_back_by_turning_and_their_products_stay(dim: int) -> None:
    turn = codes.turn_of(dim)
    np.testing.assert_allclose(np.array(turn @ turn), np.eye(dim), atol=1e-5)
    np.testing.assert_array_equal(np.array(turn), np.array(turn.T))


def test_a_few_large_numbers_do_not_leave_the_others_few_codes() -> None:
    """Keys of real models have channels a hundred times as large as others."""
    store = CodedStore(LayerShape(1, 64, 64, mx.float32), 8)
    store.resize(1)
    keys = mx.random.normal((1, 8, 64), key=mx.random.key(3))
    keys = keys + 50.0 * (mx.arange(64) == 5)
    store.write(keys, keys, slice(0, 8))
    found, _ = store.read(Numbers(np.zeros((1, 1), np.int32)))
    off = np.abs(np.array(found[0] - keys))
    # Without turning, a step is 51 / 127.
    assert off.mean() < 0.03 < 0.25 * 51 / 127

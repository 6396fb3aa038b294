"""The shapes that batches are filled up to; what encoders answer is tested in `backends`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.encoders.encoder import SHORTEST, next_shape

ROWS, TOKENS = st.integers(1, 512), st.integers(1, 32_768)


@given(ROWS, TOKENS)
def test_a_batch_fits_and_is_less_than_half_padding(rows: int, longest: int):
    filled, tokens = next_shape(rows, longest)
    assert rows <= filled < 2 * rows
    assert longest <= tokens < max(longest + SHORTEST, 1.25 * longest)


@given(ROWS, TOKENS)
def test_what_is_filled_up_stays_as_it_is(rows: int, longest: int):
    shape = next_shape(rows, longest)
    assert next_shape(*shape) == shape


def test_there_are_few_shapes():
    assert len({next_shape(1, longest)[1] for longest in range(1, 32_769)}) == 32

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.utils.prefixes import alike


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=30))
def test_what_two_sequences_begin_with_is_found(a: list[int], b: list[int]) -> None:
    same = [x == y for x, y in zip(a, b, strict=False)]
    expected = same.index(False) if False in same else len(same)
    assert alike(a, b) == alike(tuple(a), tuple(b)) == expected

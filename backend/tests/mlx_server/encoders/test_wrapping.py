from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from mlx_manager.mlx_server.encoders.wrapping import shortened


@given(st.integers(0, 40), st.integers(0, 40), st.integers(3, 50))
def test_pairs_are_cut_as_the_tokenizers_library_cuts_them(first: int, second: int, most: int):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.enable_truncation(most, strategy="longest_first")
    ids = tokenizer.encode("a" * first, "b" * second, add_special_tokens=False).sequence_ids
    assert shortened(first, second, most) == (ids.count(0), ids.count(1))

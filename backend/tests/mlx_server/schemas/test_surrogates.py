from __future__ import annotations

import json
import re

from hypothesis import example, given
from hypothesis import strategies as st

from mlx_manager.mlx_server.schemas.surrogates import halves, mended

PIECES = [r"\\", r"\ud83d", r"\uDE00", r"\uDBFF", r"\udc00", r"\u0041", r"\"", "ud83d", "a", "é"]


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
@example(r"\\ud83d\ude00")
@example(r"\ud83d\ud83d\ude00\ude00")
@example(r"\\\ud83d")
def test_halves_are_u_fffd_and_all_else_stays(text: str):
    written = f'{{"{text}": "{text}"}}'
    # Python reads halves as they are.
    read = re.sub("[\ud800-\udfff]", "\ufffd", json.loads(f'"{text}"'))
    assert json.loads(mended(written.encode())) == {read: read}


@given(st.text())
def test_a_text_of_whole_characters_has_no_halves(text: str):
    assert not list(halves(json.dumps(text).encode()))


def test_long_runs_of_backslashes_are_looked_through_once():
    backslashes = b"\\\\" * 100_000
    assert list(halves(b'"' + backslashes + rb'\ud83d"')) == [(200_001, 200_007)]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.text.scanner import TextScanner

few = st.text("ab", max_size=12)
strings = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(strings, st.lists(few, max_size=6))
def test_only_what_may_be_the_beginning_of_a_match_is_held_back(
    sought: list[str], pieces: list[str]
) -> None:
    scanner = TextScanner(sought)
    text = given_out = ""
    for piece in pieces:
        out, found, _ = scanner.feed(piece)
        text += piece
        given_out += out
        if found is not None:
            end = min(text.index(s) + len(s) for s in sought if s in text)
            assert text[:end].endswith(sought[found])
            assert given_out == text[: end - len(sought[found])]
            return
        assert not any(s in text for s in sought)
        beginnings = {s[:i] for s in sought for i in range(len(s))}
        held = max((b for b in beginnings if text.endswith(b)), key=len)
        assert given_out + held == text
    assert given_out + scanner.flush() == text


@pytest.mark.parametrize("stop", ["ababc", "zz"])
def test_text_that_repeats_a_beginning_goes_out_as_it_comes(stop: str) -> None:
    scanner = TextScanner([stop])
    given_out = [scanner.feed("ab")[0] for _ in range(30)]
    assert len("".join(given_out)) >= 60 - len(stop)
    assert all(given_out[2:])


def test_rows_that_seek_the_same_are_at_places_of_their_own() -> None:
    one, other = TextScanner(["abc"]), TextScanner(["abc"])
    assert one.feed("ab") == ("", None, "")
    assert other.feed("c") == ("c", None, "")
    assert one.feed("cd") == ("", 0, "d")
    assert other.feed("abc") == ("", 0, "")

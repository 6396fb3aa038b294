"""What others wrote, on a terminal."""

from __future__ import annotations

import unicodedata
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlx_manager.chat.display import display_for
from mlx_manager.completion_stream import Chunk
from mlx_manager.printable import in_lines, on_one_line

RETITLED = "\x1b]0;mine\x07 \x9b2J\x7f \x1b[31m"
WIDE = "\N{CJK UNIFIED IDEOGRAPH-6F22}\N{IDEOGRAPHIC SPACE}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER}"


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@given(st.text(st.characters() | st.sampled_from("\x1b\x07\r\n\t\x9b\ud800")))
def test_nothing_but_ends_of_lines_is_left_to_obey(text: str) -> None:
    shown = in_lines(text)
    assert not [c for c in shown if unicodedata.category(c) in {"Cc", "Cs"} and c not in "\n\t"]
    shown.encode()
    assert on_one_line(text).isprintable()


def test_what_can_be_read_stays() -> None:
    assert in_lines(f"a\tb\r\n{WIDE}\n") == f"a\tb\n{WIDE}\n"


@pytest.mark.parametrize("markdown", [False, True])
def test_a_model_can_not_command_the_terminal(markdown: bool) -> None:
    drawn = []
    for text in (RETITLED, "x" * len(RETITLED)):
        out = Terminal()
        display = display_for(Console(file=out, force_terminal=True, width=60), markdown, True)
        display.show(Chunk(reasoning=text))
        display.show(Chunk(text=f"{text}\n"))
        display.end()
        drawn.append([out.getvalue().count(control) for control in "\x1b\x07\x9b\x7f"])
    assert drawn[0] == drawn[1]


def test_what_is_piped_on_is_what_the_model_wrote() -> None:
    out = StringIO()
    display = display_for(Console(file=out), True, True)
    display.show(Chunk(text=f"{RETITLED}\r\n"))
    display.end()
    assert out.getvalue() == f"{RETITLED}\r\n"

from __future__ import annotations

import pytest

from mlx_manager.cli.terminal import show, table


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("[/x]", "[/x]"),
        ("100% [x]*", "100% [x]*"),
        ("[bold]a[/bold]", "[bold]a[/bold]"),
        ("a\x1b]0;title\x07\x1b[2Jb", "a\N{REPLACEMENT CHARACTER}]0;title"),
        ("ü 漢字", "ü 漢字"),
    ],
)
def test_names_are_shown_as_they_are_and_do_nothing(
    name: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = table("model", "size", right=("size",))
    made.add_row(name, "1 MB")
    show(made)
    printed = capsys.readouterr().out
    assert shown in printed
    assert "\x1b" not in printed
    assert "\x07" not in printed

from __future__ import annotations

from mlx_manager.mlx_server.utils.progress import counted, unheard


def test_each_part_is_told_when_it_begins():
    said: list[str] = []
    told = [(part, tuple(said)) for part in counted(said.append, "bricks are laid", "ab")]
    first, second = "bricks are laid (1 of 2)", "bricks are laid (2 of 2)"
    assert told == [("a", (first,)), ("b", (first, second))]


def test_where_nobody_asks_parts_come_all_the_same():
    assert list(counted(unheard, "bricks are laid", [1, 2, 3])) == [1, 2, 3]

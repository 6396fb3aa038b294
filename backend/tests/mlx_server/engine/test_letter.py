"""How the host learns a step's tokens."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.devices.cuda.mapped import TOKENS, carrier
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.engine.letter import Letter


@pytest.mark.parametrize("rows", [1, 3, TOKENS, TOKENS + 1])
def test_what_is_sent_is_read(rows):
    tokens = mx.arange(rows, dtype=mx.uint32) * 3
    letter = Letter.of(tokens)
    mx.async_eval(tokens, letter.sent)
    assert letter.read() == list(range(0, 3 * rows, 3))


def test_letters_that_wait_do_not_become_others():
    for _ in range(2):
        letters = [Letter.of(mx.array([i, 7 * i], mx.uint32)) for i in range(9)]
        mx.async_eval([letter.sent for letter in letters])
        assert [letter.read() for letter in letters] == [[i, 7 * i] for i in range(9)]


def test_a_box_is_used_where_there_are_boxes():
    letter = Letter.of(mx.array([1, 2], mx.uint32))
    assert (letter.box is None) == isinstance(carrier(), Unsupported)

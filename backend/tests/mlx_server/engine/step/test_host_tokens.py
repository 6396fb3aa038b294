"""A step's tokens, sent to the host and read there."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.devices.cuda.mapped import TOKENS, carrier
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.engine.step.host_tokens import HostTokens


@pytest.mark.parametrize("rows", [1, 3, TOKENS, TOKENS + 1])
def test_what_is_sent_is_read(rows):
    tokens = mx.arange(rows, dtype=mx.uint32) * 3
    transfer = HostTokens.of(tokens)
    mx.async_eval(tokens, transfer.sent)
    assert transfer.read() == list(range(0, 3 * rows, 3))


def test_transfers_that_wait_do_not_become_others():
    for _ in range(2):
        transfers = [HostTokens.of(mx.array([i, 7 * i], mx.uint32)) for i in range(9)]
        mx.async_eval([transfer.sent for transfer in transfers])
        assert [transfer.read() for transfer in transfers] == [[i, 7 * i] for i in range(9)]


def test_a_box_is_used_where_there_are_boxes():
    transfer = HostTokens.of(mx.array([1, 2], mx.uint32))
    assert (transfer.box is None) == isinstance(carrier(), Unsupported)

from __future__ import annotations

import pytest

from mlx_manager.mlx_server.errors import ServerNotReady
from mlx_manager.mlx_server.services.calls import Calls
from mlx_manager.mlx_server.services.drain import Drain


@pytest.mark.parametrize("begun", [False, True])
async def test_an_end_that_a_signal_has_asked_for_is_not_revoked(begun: bool) -> None:
    drain = Drain(Calls(lambda: None), 60)
    if begun:
        drain.begin()
    drain.begin(final=True)
    with pytest.raises(ServerNotReady, match="can't be revoked"):
        drain.revoke()
    assert drain.begun
    await drain.done()

"""Rows that go on after pictures, with drafts and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.seeing_rig import SeeingRig
from engine.test_pictures import GRIDS
from seeing import FAMILIES, scene

from mlx_manager.mlx_server.engine.speculation.proposers import Proposer


@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_drafts_after_pictures_change_nothing(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    async with SeeingRig(family, tmp_path, speculation="on") as rig:
        of = scene(family, grids=GRIDS)
        plain = rig.look(of, GRIDS, (1, 2), 24)
        rig.run()
        row = rig.seen(of, GRIDS, (1, 2), 24)
        guess = [*plain.tokens[:9], 5, *plain.tokens[10:]]
        row.sequence.proposer = Proposer(guess)
        rig.submit_together([row])
        rig.run()
        assert row.tokens == plain.tokens
        assert rig.engine.stats().accepted_tokens > 12

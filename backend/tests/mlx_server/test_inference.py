"""Which tokens end an answer, and how they do.

Other projects' scripts import `TestStopTokenDetection` as `tests.mlx_server.test_inference`, in the
folder `backend/` and without pytest: helpers are imported by their whole names here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.models.adapters import LlamaAdapter
from mlx_manager.mlx_server.models.catalog import described
from mlx_manager.mlx_server.models.loading.load import load
from mlx_manager.mlx_server.utils.memory import Ledger
from tests.mlx_server.engine.rig import Rig, alone, prompt
from tests.mlx_server.tiny_models import EOS_ID, EOT_ID, make_tiny_model


def vocabulary(**tokens: int) -> SimpleNamespace:
    """As much of a tokenizer as an adapter asks: its end of text, and the ids of `tokens`."""
    asked: list[str] = []

    def convert_tokens_to_ids(name: str) -> int | None:
        asked.append(name)
        return tokens.get(name.strip("<|>"))

    return SimpleNamespace(
        eos_token_id=128001, convert_tokens_to_ids=convert_tokens_to_ids, asked=asked
    )


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with Rig(make_tiny_model(tmp_path / "llama", "llama")) as rig:
        yield rig


class TestStopTokenDetection:
    def test_llama_stops_at_the_end_of_a_turn_too(self) -> None:
        tokenizer = vocabulary(eot_id=128009)
        assert LlamaAdapter().get_stop_tokens(tokenizer) == [128001, 128009]
        assert tokenizer.asked[-1] == "<|eot_id|>"

    def test_llama_stops_where_it_awaits_a_tool_if_it_has_a_token_for_that(self) -> None:
        tokenizer = vocabulary(eot_id=128009, eom_id=128008)
        assert set(LlamaAdapter().get_stop_tokens(tokenizer)) == {128001, 128008, 128009}
        assert tokenizer.asked[-1] == "<|eot_id|>"

    def test_a_tokenizer_without_the_family_tokens_has_its_own_eos(self) -> None:
        assert LlamaAdapter().get_stop_tokens(vocabulary()) == [128001]
        unknown = SimpleNamespace(
            eos_token_id=2, unk_token_id=0, convert_tokens_to_ids=lambda name: 0
        )
        assert LlamaAdapter().get_stop_tokens(unknown) == [2]

    def test_stop_tokens_are_the_union_of_all_that_name_one(self) -> None:
        tokenizer = vocabulary(eot_id=9)
        tokenizer.eos_token_ids = {128001, 5}
        adapter = LlamaAdapter({"eos_token_id": [7, 5]})
        assert set(adapter.get_stop_tokens(tokenizer)) == {128001, 5, 7, 9}
        assert len(adapter.get_stop_tokens(tokenizer)) == 4

    def test_the_ends_of_both_configs_stop_a_model(self, tmp_path: Path) -> None:
        folder = make_tiny_model(tmp_path / "m", "llama", eos_token_id=EOS_ID)
        ends = json.dumps({"eos_token_id": [EOT_ID, 65]})
        (folder / "generation_config.json").write_text(ends)
        source = described("m", folder, "models_dir")
        loaded = load(source, PoolLimits(weights="keep"), Ledger(1 << 30))
        assert {EOS_ID, EOT_ID, 65} <= set(loaded.adapter.get_stop_tokens(loaded.tokenizer))

    async def test_a_stop_token_ends_the_row_and_is_counted_but_not_shown(self, rig: Rig) -> None:
        drawn = await rig.thread.call(lambda: alone(rig.model, prompt(9), 16))
        place = next(i for i in range(3, 16) if drawn[i] not in drawn[:i])
        row = rig.submit(prompt(9), stop_ids=frozenset({drawn[place]}))
        finished = await row.finished()
        assert row.tokens == drawn[:place]
        assert finished.reason == "stop"
        assert finished.usage.completion_tokens == place + 1

    async def test_min_tokens_forbids_the_stop_token_before_them(self, rig: Rig) -> None:
        drawn = await rig.thread.call(lambda: alone(rig.model, prompt(9), 16))
        row = rig.submit(prompt(9), stop_ids=frozenset(drawn), min_tokens=12)
        await row.finished()
        assert len(row.tokens) >= 12
        assert not set(row.tokens[:12]) & set(drawn)

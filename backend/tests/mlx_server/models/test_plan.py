"""Memory of a token's keys and values by a model's config.json, as published."""

from __future__ import annotations

import pytest

from mlx_manager.mlx_server.models.hub import HubFile, Repository
from mlx_manager.mlx_server.models.plan import MemoryPlan, plan_of, token_bytes

LLAMA = {
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"hidden_size": 4096, "max_position_embeddings": 8192},
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 32 * 2 * 8 * 128 * 2),
        ({**LLAMA, "head_dim": 256}, 32 * 2 * 8 * 256 * 2),
        ({"text_config": LLAMA}, 32 * 2 * 8 * 128 * 2),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 2 * 12 * 64 * 2),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 61 * 576 * 2),
        ({**LLAMA, "full_attention_interval": 4}, 8 * 2 * 8 * 128 * 2),
        (
            {**LLAMA, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8},
            8 * 2 * 8 * 128 * 2,
        ),
        ({}, None),
        ({"num_hidden_layers": 4}, None),
        ({"num_hidden_layers": "4", "num_attention_heads": True}, None),
    ],
)
def test_a_tokens_bytes(config: dict[str, object], expected: int | None) -> None:
    assert token_bytes(config) == expected


def test_what_fits_beside_the_weights() -> None:
    files = {"model.safetensors": HubFile(600, ""), "tokenizer.json": HubFile(50, "")}
    found = Repository("a/b", "main", files, "", False, "llama")
    plan = plan_of(found, LLAMA, 600 + 3 * 8192 * 131072)
    assert (plan.weights, plan.fits) == (600, True)
    assert (plan.tokens, plan.rows_at_context) == (3 * 8192, 3)


def test_what_does_not_fit_has_no_room_for_tokens() -> None:
    plan = MemoryPlan(1000, 900, 4096, 10)
    assert (plan.fits, plan.tokens, plan.rows_at_context) == (False, 0, 0)
    assert MemoryPlan(1000, 2000, 4096, None).rows_at_context is None

"""Gated delta layers in chunks, against mlx-lm's loop over tokens and the rule in double precision.
How models with them are served is in test_forward.py."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine.rig import Rig, prompt, regret
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray
from thorough import ALL
from tiny_models import FAMILIES, make_tiny_model, random_model

from mlx_manager.mlx_server.devices.cpu.delta import (
    ON_CPU,
    ON_GPU,
    ChunkedRule,
    compute_chunks,
    in_chunks,
)
from mlx_manager.mlx_server.execution.select import choose

_NOW = gated_delta.gated_delta_ops
LOOP = _NOW.original if isinstance(_NOW, ChunkedRule) else _NOW
RULE = ChunkedRule(LOOP)
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Tokens:
    """What a layer makes of some tokens, and the state before them."""

    q: Numbers
    k: Numbers
    v: Numbers
    g: Numbers
    beta: Numbers
    state: Numbers

    def given(self, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
        """As mlx-lm's layers give them: gates and the state are float32 whatever the rest is."""
        halves = [mx.array(x.astype(np.float32)).astype(dtype) for x in (self.q, self.k, self.v)]
        g, beta, state = (mx.array(x.astype(np.float32)) for x in (self.g, self.beta, self.state))
        return [*halves, g, beta.astype(dtype), state]

    def truth(self) -> tuple[Numbers, Numbers]:
        """The rule as its papers have it, token by token in double precision, of what float32
        leaves of the numbers."""
        q, k, v, g, beta, state = (np.array(x, np.float64) for x in self.given())
        group = v.shape[2] // k.shape[2]
        q, k = q.repeat(group, axis=2), k.repeat(group, axis=2)
        y = np.zeros(v.shape)
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None]
            change = v[:, t] - np.einsum("bhvk,bhk->bhv", state, k[:, t])
            change = change * beta[:, t, :, None]
            state = state + change[..., None] * k[:, t, :, None]
            y[:, t] = np.einsum("bhvk,bhk->bhv", state, q[:, t])
        return y, state


KEYS = ("any", "all alike", "nearly alike", "two in turn", "none")
GATES = ("any", "near 1", "1", "0", "some 0", "tiny", "near 1 after tiny")
BETAS = ("any", "1", "2", "0 to 2", "0")


def tokens_of(
    seed: int,
    shape: tuple[int, int, int, int, int, int],
    keys: str = "any",
    gates: str = "any",
    betas: str = "any",
) -> Tokens:
    """shape: rows, tokens, key heads, value heads of each, key dim, value dim."""
    rows, tokens, heads, group, key_dim, value_dim = shape
    made = np.random.default_rng(seed)
    k = made.normal(size=(rows, tokens, heads, key_dim))
    match keys:
        case "all alike":
            k[:] = k[:, :1]
        case "nearly alike":
            k = k[:, :1] + 0.03 * k
        case "two in turn":
            k = np.where((np.arange(tokens) % 2)[None, :, None, None], k[:, -1:], k[:, :1])
        case "none":
            k[:] = 0
    k /= np.maximum(np.linalg.norm(k, axis=-1, keepdims=True), 1e-6)
    gate = made.uniform(size=(rows, tokens, heads * group))
    match gates:
        case "near 1":
            gate = 1 - 1e-4 * gate
        case "1":
            gate[:] = 1
        case "0":
            gate[:] = 0
        case "some 0":
            gate = np.where(gate < 0.1, 0.0, 1 - 0.01 * gate)
        case "tiny":
            gate = gate * 1e-35
        case "near 1 after tiny":
            gate = np.where(gate < 0.1, 1e-30, 1 - 1e-3 * gate)
    beta = made.uniform(size=gate.shape)
    match betas:
        case "1" | "2" | "0":
            beta[:] = float(betas)
        case "0 to 2":
            beta *= 2
    return Tokens(
        q=made.normal(size=k.shape) / key_dim**0.5,
        k=k,
        v=made.normal(size=(*gate.shape, value_dim)),
        g=gate,
        beta=beta,
        state=made.normal(size=(rows, heads * group, value_dim, key_dim)),
    )


def farthest(got: tuple[mx.array, mx.array], wanted: tuple[Numbers, Numbers]) -> float:
    """Relative to the largest number of each; infinite if one is none."""
    worst = [
        float(np.abs(np.array(mine.astype(mx.float32)) - own).max() / max(np.abs(own).max(), 1e-3))
        for mine, own in zip(got, wanted, strict=True)
    ]
    return float("inf") if np.isnan(worst).any() else max(worst)


SHAPES = st.tuples(
    st.integers(1, 3),
    st.integers(1, 150),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([8, 32]),
    st.sampled_from([4, 24]),
)


@given(
    st.integers(0, 2**32 - 1),
    SHAPES,
    st.sampled_from(KEYS),
    st.sampled_from(GATES),
    st.sampled_from(BETAS),
    st.sampled_from([ON_CPU, ON_GPU]),
)
@settings(deadline=None, max_examples=100 if ALL else 30)
def test_chunks_are_as_exact_as_the_loop(
    seed: int,
    shape: tuple[int, int, int, int, int, int],
    keys: str,
    gates: str,
    betas: str,
    most: int,
) -> None:
    tokens = tokens_of(seed, shape, keys, gates, betas)
    truth = tokens.truth()
    given = tokens.given()
    # A beta of 2 for key after key makes mirrors of which none takes back what rounding brought.
    allowed = 1e-3 if betas == "2" else 5e-6 + 4 * farthest(LOOP(*given), truth)
    assert farthest(in_chunks(*given, most), truth) < allowed
    assert farthest(RULE(*given), truth) < allowed


@pytest.mark.parametrize("keys", ["all alike", "nearly alike", "two in turn"])
@pytest.mark.parametrize("most", [ON_CPU, ON_GPU])
def test_keys_that_are_alike_lose_no_precision(keys: str, most: int) -> None:
    tokens = tokens_of(0, (1, 300, 2, 2, 128, 128), keys, "1", "1")
    assert farthest(in_chunks(*tokens.given(), most), tokens.truth()) < 1e-5


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 80), min_size=2, max_size=4),
    st.sampled_from(GATES),
)
@settings(deadline=None, max_examples=25)
def test_a_prompt_may_come_in_parts(seed: int, parts: list[int], gates: str) -> None:
    tokens = tokens_of(seed, (2, sum(parts), 2, 2, 16, 16), gates=gates)
    *given, state = tokens.given()
    outputs = []
    for part in parts:
        y, state = RULE(*(x[:, :part] for x in given), state)
        given = [x[:, part:] for x in given]
        outputs.append(y)
    assert farthest((mx.concatenate(outputs, axis=1), state), tokens.truth()) < 1e-5


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_outputs_have_the_queries_type_and_the_state_is_float32(
    tokens: int, dtype: mx.Dtype
) -> None:
    given = tokens_of(1, (2, tokens, 2, 2, 32, 32)).given(dtype)
    (y, state), (own, own_state) = RULE(*given), LOOP(*given)
    assert (y.dtype, state.dtype) == (own.dtype, own_state.dtype) == (dtype, mx.float32)
    assert (y.shape, state.shape) == (own.shape, own_state.shape)
    wanted = tuple(np.array(x.astype(mx.float32), np.float64) for x in (own, own_state))
    assert farthest((y, state), wanted) < (1e-5 if dtype == mx.float32 else 1e-2)


@pytest.mark.parametrize("tokens", [1, 40])
def test_without_a_state_it_begins_with_zeros(tokens: int) -> None:
    *given, state = tokens_of(2, (2, tokens, 2, 2, 16, 8)).given()
    for mine, wanted in zip(RULE(*given), RULE(*given, mx.zeros_like(state)), strict=True):
        assert mx.array_equal(mine, wanted)


def test_masks_and_gates_of_each_element_go_to_the_loop() -> None:
    *given, state = tokens_of(3, (2, 40, 2, 1, 16, 8)).given()
    mask = mx.arange(40)[None] < mx.array([[40], [25]])
    for mine, wanted in zip(RULE(*given, state, mask), LOOP(*given, state, mask), strict=True):
        assert mx.array_equal(mine, wanted)
    q, k, v, g, beta = given
    wide = mx.broadcast_to(g[..., None], (*g.shape, 16))
    for each in (RULE, LOOP):
        assert mx.allclose(each(q, k, v, wide, beta, state)[0], RULE(*given, state)[0], atol=1e-5)


def tiny(family: str) -> nn.Module:
    return random_model({"model_type": family, **FAMILIES[family]}, seed=0, dtype=mx.float32)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
def test_a_models_prompt_is_what_the_loop_makes_of_it(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny(family), mx.array([prompt(100, 1)])
    logits = []
    for rule in (LOOP, RULE):
        monkeypatch.setattr(gated_delta, "gated_delta_ops", rule)
        logits.append(model(tokens, cache=make_prompt_cache(model)))
    assert mx.allclose(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
async def test_rows_of_a_batch_draw_what_the_loop_draws(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "m", family)
    async with Rig(folder, page_size=16, prefill_chunk=48) as rig:
        assert rig.forward.kind == "separate"
        assert isinstance(gated_delta.gated_delta_ops, ChunkedRule)
        rows = [rig.row(prompt(n, i), 12) for i, n in enumerate((3, 40, 101, 130))]
        rig.submit_together(rows)
        await asyncio.gather(*(row.finished() for row in rows))
        monkeypatch.setattr(gated_delta, "gated_delta_ops", LOOP)
        for row in rows:
            tokens, begin = row.sequence.tokens, row.sequence.prompt_length
            drawn = partial(regret, rig.model, tokens[:begin], tokens[begin:])
            assert await rig.thread.call(drawn) < 1e-3


def test_models_are_given_it_when_it_is_found_out_how_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gated_delta, "gated_delta_ops", LOOP)
    choose(tiny("llama"), 16)
    assert gated_delta.gated_delta_ops is LOOP
    model = tiny("qwen3_next")
    choose(model, 16)
    placed = gated_delta.gated_delta_ops
    assert isinstance(placed, ChunkedRule)
    assert placed.original is LOOP
    compute_chunks(model)
    assert gated_delta.gated_delta_ops is placed


def test_what_differs_from_the_loop_is_not_put_in_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def scaled(q: mx.array, *rest: mx.array | None) -> tuple[mx.array, mx.array]:
        return LOOP(q * 1.1, *rest)

    monkeypatch.setattr(gated_delta, "gated_delta_ops", scaled)
    with caplog.at_level(logging.WARNING):
        compute_chunks(tiny("qwen3_next"))
    assert gated_delta.gated_delta_ops is scaled
    assert "token by token" in caplog.text

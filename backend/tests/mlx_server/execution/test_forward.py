"""Every family through the whole engine: a crowd whose rows join and leave draws what each row
draws alone, with mlx-lm's own caches; and the fastest way of running that is right is chosen."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine.rig import HandRig, Rig, Row, prompt, regret
from execution.decoder.common_decoders import make
from mlx import nn
from mlx_lm.models import llama
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from thorough import every_other, one_in_turn
from tiny_models import FAMILIES, make_tiny_model, random_model

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.cpu.blocked import BlockedLinear
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize, chunk_of
from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.execution.alone import AloneForward
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess, Span
from mlx_manager.mlx_server.execution.forward import Chunk
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward
from mlx_manager.mlx_server.execution.module.separate import SeparateForward
from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.execution.working import query_heads, working_bytes
from mlx_manager.mlx_server.utils.memory import Ledger

FUSED, RAGGED, SEPARATE, ALONE = "fused", "ragged", "separate", "alone"
KINDS = {
    "llama": FUSED,
    "mistral": FUSED,
    "qwen2": FUSED,
    "qwen3": FUSED,
    "qwen3_moe": RAGGED,
    "mixtral": RAGGED,
    "gemma": RAGGED,
    "gemma3": FUSED,
    "gemma3_text": FUSED,
    "gemma3n": RAGGED,
    "gemma4_text": RAGGED,
    "gemma4_text, keys shared": RAGGED,
    "gemma4_text, experts": RAGGED,
    "phi": RAGGED,
    "phi3": FUSED,
    "phimoe": RAGGED,
    "olmo2": RAGGED,
    "olmo3": RAGGED,
    "olmoe": RAGGED,
    "granite": FUSED,
    "cohere": RAGGED,
    "cohere2": RAGGED,
    "gpt_oss": RAGGED,
    "gpt2": RAGGED,
    "gpt_neox": RAGGED,
    "glm4": FUSED,
    "glm4_moe": RAGGED,
    "llama4_text": RAGGED,
    "minimax": RAGGED,
    "mimo_v2_flash": RAGGED,
    "ministral3": FUSED,
    "minicpm3": RAGGED,
    "deepseek_v2": RAGGED,
    "ernie4_5": FUSED,
    "smollm3": FUSED,
    "exaone4": RAGGED,
    "seed_oss": FUSED,
    "starcoder2": RAGGED,
    "stablelm": RAGGED,
    "internlm2": RAGGED,
    "hunyuan_v1_dense": RAGGED,
    # These compute attention themselves: soft caps, latent attention.
    "gemma2": FUSED,
    "deepseek_v3": SEPARATE,
    "glm4_moe_lite": SEPARATE,
    "deepseek_v32": SEPARATE,
    "longcat_flash": SEPARATE,
    # These keep a state of another kind, all of it or beside keys and values.
    "mamba": SEPARATE,
    "mamba2": SEPARATE,
    "rwkv7": SEPARATE,
    "recurrent_gemma": SEPARATE,
    "qwen3_next": SEPARATE,
    "qwen3_5": SEPARATE,
    "olmo_hybrid": SEPARATE,
    "kimi_linear": SEPARATE,
    "nemotron_h": SEPARATE,
    "granitemoehybrid": SEPARATE,
    "jamba": SEPARATE,
    "falcon_h1": SEPARATE,
    "lfm2": SEPARATE,
    "lfm2_moe": SEPARATE,
    "baichuan_m1": SEPARATE,
    "plamo2": SEPARATE,
    # A cache in chunks; a cache of its own; positions counted on the host.
    "llama4": ALONE,
    "deepseek_v41": ALONE,
    "gpt_bigcode": ALONE,
}
PAGES_ALONE = {"deepseek_v3", "glm4_moe_lite", "deepseek_v32", "longcat_flash"}
"""Those of the separate ones whose pages are all there is to a prefix."""

PAGE = 16
# (prompt, tokens to draw): the longest are over several chunks, pages and windows of 32.
FIRST = [(3, 20), (101, 3), (40, 9)]
LATER = [(17, 6), (75, 4)]
# How far the token drawn may be from the best one, in standard deviations of the logits: rows in
# a batch are rounded differently than rows alone.
TIE = 1e-3


async def crowd(rig: Rig) -> list[Row]:
    """Rows of different lengths; some leave and some join while others run, and one of those
    that join begins like one that ran before."""
    rows = [rig.row(prompt(n, i + 1), m) for i, (n, m) in enumerate(FIRST)]
    rig.submit_together(rows)
    await rows[1].finished()
    rows += [rig.row(prompt(n, i + 5), m) for i, (n, m) in enumerate(LATER)]
    rows.append(rig.row(prompt(101, 2)[:98] + prompt(20, 9), 5))
    rig.submit_together(rows[len(FIRST) :])
    finished = await asyncio.gather(*(row.finished() for row in rows if row is not rows[1]))
    known = 98 // rig.engine.stats().page_size * rig.engine.stats().page_size
    # Pages are found as far as the two are alike; a state only where the first prompt's ends.
    assert (
        finished[-1].usage.cached_tokens
        in {
            "pages": {known},
            "snapshot": {known, 0},
            "copy": {known, 0},
        }[rig.forward.prefixes]
    )
    return rows


async def check(rig: Rig, rows: list[Row], tie: float = TIE) -> None:
    for row in rows:
        sequence = row.sequence
        assert len(row.tokens) == sequence.limit
        given, drawn = (
            sequence.tokens[: sequence.prompt_length],
            sequence.tokens[sequence.prompt_length :],
        )
        assert await rig.thread.call(partial(regret, rig.model, given, drawn)) <= tie
    assert rig.engine.stats().pages_held == 0


def prefixes(family: str) -> str:
    """What a prefix consists of that a later row can begin with."""
    match KINDS[family]:
        case "fused" | "ragged":
            return "pages"
        case "separate":
            return "pages" if family in PAGES_ALONE else "snapshot"
        case _:
            return "copy"


def test_every_family_of_the_tiny_models_is_in_the_table() -> None:
    assert set(KINDS) == set(FAMILIES)


@pytest.mark.parametrize("family", every_other(KINDS))
async def test_a_crowd_draws_what_each_draws_alone(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", family)
    async with Rig(folder, page_size=PAGE, prefill_chunk=48) as rig:
        assert rig.forward.kind == KINDS[family]
        assert rig.forward.prefixes == prefixes(family)
        await check(rig, await crowd(rig))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": mx.bfloat16}),
        ("qwen3", {"dtype": mx.float16}),
        ("gemma3_text", {"dtype": mx.bfloat16}),
        ("gemma2", {"dtype": mx.bfloat16}),
        ("mamba2", {"dtype": mx.bfloat16}),
        ("qwen3_5", {"dtype": mx.bfloat16}),
        ("llama", {"dtype": mx.bfloat16, "quantize": {"group_size": 32, "bits": 4}}),
        ("qwen3_moe", {"quantize": {"group_size": 32, "bits": 4}}),
        ("deepseek_v3", {"quantize": {"group_size": 32, "bits": 8}}),
    ],
    ids=str,
)
async def test_half_precision_and_quantised_weights_run_the_same_way(
    family: str, options: dict[str, object], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "m", family, **options)  # type: ignore[arg-type]
    # What fused steps save on a CPU is little beside its products in half precision.
    half = "dtype" in options and KINDS[family] == FUSED
    otherwise = SEPARATE if family == "gemma2" else RAGGED
    async with Rig(folder, page_size=PAGE, prefill_chunk=48) as rig:
        assert rig.forward.kind == (otherwise if half else KINDS[family])
        await check(rig, await crowd(rig), tie=0.2 if "dtype" in options else TIE)


@pytest.mark.parametrize(
    ("family", "page_size"), one_in_turn(["gemma3_text", "deepseek_v3", "falcon_h1"], [1, 8, 64])
)
async def test_pages_may_have_any_size(family: str, page_size: int, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", family)
    async with Rig(folder, page_size=page_size, prefill_chunk=48) as rig:
        assert rig.forward.kind == KINDS[family]
        await check(rig, await crowd(rig))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "mamba2", "llama4"])
async def test_a_prompt_longer_than_a_chunk_may_be_the_first_to_come(
    family: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "m", family)
    async with Rig(folder, page_size=PAGE, prefill_chunk=32) as rig:
        row = rig.submit(prompt(90, 1), 5)
        await row.finished()
        await check(rig, [row])


@pytest.mark.parametrize("family", ["llama4", "deepseek_v41", "gpt_bigcode"])
async def test_a_model_that_is_served_alone_goes_on_from_what_it_has_read(
    family: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "m", family)
    async with HandRig(folder, page_size=PAGE, prefill_chunk=48) as rig:
        assert rig.forward.kind == ALONE
        first = prompt(120, 1)
        rig.submit(first, 8)
        rig.run()
        # The same again, a turn more, and another end, beside each other.
        asked = [first, [*first, *prompt(30, 2)], [*first[:115], *prompt(20, 3)]]
        rows = [rig.submit(tokens, 8) for tokens in asked]
        rig.step(2)
        # Each holds what it began with a second time.
        assert rig.engine.stats().pages_held >= sum(len(tokens) // PAGE for tokens in asked)
        rig.run()
        assert [row.sequence.cached for row in rows] == [112, 112, 112]
        for row, tokens in zip(rows, asked, strict=True):
            assert regret(rig.model, tokens, row.tokens) <= TIE
        assert rig.engine.stats().pages_held == 0


class Indexing(llama.Attention):
    """Keeps keys by which it would choose what it sees, far into a text."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        own, index = cache
        kept, _ = index.update_and_fetch(x[:, None], x[:, None])
        seen = x if kept.shape[2] <= 1000 else mx.zeros_like(x)
        return super().__call__(seen, mask, own)


def test_what_a_module_reads_by_itself_is_never_what_one_step_alone_has_written() -> None:
    of = {"model_type": "llama", **FAMILIES["llama"]}
    model = random_model(of, seed=0, dtype=mx.float32)
    assert choose(model, PAGE).kind == FUSED
    model = random_model(of, seed=0, dtype=mx.float32)
    for layer in model.layers:
        layer.self_attn.__class__ = Indexing
    model.make_cache = lambda: [CacheList(KVCache(), KVCache()) for _ in model.layers]
    assert choose(model, PAGE).kind == ALONE


def test_a_family_that_is_served_alone_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model({"model_type": "llama4", **FAMILIES["llama4"]}, seed=0, dtype=mx.float32)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose(model, PAGE), AloneForward)
    (record,) = caplog.records
    assert "one at a time" in record.message
    assert "llama4" in record.message


def test_a_model_that_cannot_run_here_is_refused_at_load() -> None:
    model = random_model({"model_type": "llama", **FAMILIES["llama"]}, seed=0, dtype=mx.float32)
    model.model.layers[1].mlp.up_proj.weight = mx.zeros((3, 3))
    with pytest.raises(ModelNotSupported, match="does not run on this machine"):
        choose(model, PAGE)


def test_a_model_whose_logits_are_no_numbers_is_not_taken_for_right() -> None:
    model = random_model({"model_type": "llama", **FAMILIES["llama"]}, seed=0, dtype=mx.float32)
    ways_tried = []

    class Unstable(type(model.model.norm)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            ways_tried.append(x.shape)
            return x * (mx.nan if x.shape[1] == 1 and x.shape[0] > 1 else 1.0)

    model.model.norm.__class__ = Unstable
    assert choose(model, PAGE).kind not in (FUSED, RAGGED)


def test_a_model_that_is_served_on_pages_still_runs_over_mlx_lms_own_caches() -> None:
    model = random_model({"model_type": "qwen3", **FAMILIES["qwen3"]}, seed=0, dtype=mx.float32)
    tokens = mx.array([prompt(20, 1)])
    before = model(tokens, cache=make_prompt_cache(model))
    assert choose(model, PAGE).kind == FUSED
    assert mx.allclose(model(tokens, cache=make_prompt_cache(model)), before, atol=1e-5)
    assert mx.allclose(model(tokens), before, atol=1e-4)


@pytest.mark.skipif(mx.default_device().type != mx.gpu, reason="needs a GPU")
def test_several_prompts_of_one_step_give_on_a_gpu_what_each_gives_by_itself() -> None:
    """Their contexts are long enough to be divided among blocks, which count what has arrived."""
    sizes = {"hidden_size": 512, "block_dim": 512, "num_attention_heads": 8, "head_dim": 64}
    config = {"model_type": "lfm2", **FAMILIES["lfm2"], **sizes}
    model = random_model(config, seed=0, dtype=mx.bfloat16)
    pages, before, own = 64, 1536, 512
    texts = [prompt(before + own, seed) for seed in range(8)]
    tables = [PageTable(list(range(row, pages * 8, 8))) for row in range(8)]

    def logits(at_once: int) -> mx.array:
        forward = SeparateForward(model, 32, KeyAccess.PAGES, KernelSet())
        for store in forward.stores:
            store.resize(pages * 8)
        rows = []
        for first in range(0, 8, at_once):
            keys = range(first, first + at_once)
            for end, queries, final in ((before, before, False), (before + own, own, True)):
                chunks = [
                    Chunk(k, Span(tables[k], end, queries), texts[k][end - queries : end], final)
                    for k in keys
                ]
                out = forward.run(None, chunks)
                mx.eval(out, forward.state())
            rows.append(out)
        return mx.concatenate(rows)

    together, alone = logits(8), logits(1)
    assert together.shape[0] == 8
    assert bool((together == alone).all())


@pytest.mark.parametrize("form", ["dense", "quantised", "in blocks"])
def test_a_gpus_step_is_taken_to_hold_what_each_product_makes_of_its_tokens(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 256}
    model = make("llama", sizes)
    if form == "quantised":
        nn.quantize(model, group_size=32, bits=4)
    elif form == "in blocks":
        for layer in model.model.layers:
            layer.mlp.up_proj = BlockedLinear(layer.mlp.up_proj)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    # Queries and outputs, keys and values of half as many heads, gates and ups, the way down.
    made = 3 * (2 * 128 + 2 * 64 + 2 * 192 + 128)
    assert working_bytes(model, AloneForward(model), 10, 7) == 16 * 7 * 256 + 4 * 10 * made


@pytest.mark.parametrize(("dim", "held"), [(64, False), (128, False), (256, True)])
def test_scores_that_a_mac_holds_are_in_the_ledger(
    dim: int, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama", {"head_dim": dim})
    forward = RaggedForward(model, PAGE, KeyAccess.PAGES)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    on_cuda = working_bytes(model, forward, 10, 7)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    scores = 8 * devices.METAL.scores if held else 0
    assert working_bytes(model, forward, 10, 7) == on_cuda + scores


def test_chunks_of_modules_that_attend_by_themselves_are_cut_by_what_a_mac_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("llama", {})
    heads = query_heads(model)
    assert heads == model.args.num_attention_heads
    forward, ledger = AloneForward(model), Ledger(2**33, cache_bytes=lambda: 0)
    monkeypatch.setattr(devices, "current", lambda: devices.METAL)
    size = StepSize.of(EngineLimits(), model, forward, ledger)
    assert size.limits.seen == devices.METAL.scores / heads


class Unpacking(AloneForward):
    """Takes memory for weights that are made dense, until it is told not to."""

    taken = 2**30

    def unpacked_bytes(self, tokens: int) -> int:
        return self.taken

    def keep_packed(self) -> None:
        self.taken = 0


@pytest.mark.parametrize(("limit", "unpacks"), [(2**33, True), (2**31, False)])
def test_weights_are_made_dense_for_prompts_where_that_leaves_most_memory_to_pages(
    limit: int, unpacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama", {})
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    forward, ledger = Unpacking(model), Ledger(limit, cache_bytes=lambda: 0)
    size = StepSize.of(EngineLimits(), model, forward, ledger)
    assert forward.taken == (2**30 if unpacks else 0)
    assert (size.working_bytes > 2**30) is unpacks
    assert size.working_bytes < limit / 3
    # Prompts are not cut smaller for what is not done.
    assert size.tokens == chunk_of(EngineLimits())

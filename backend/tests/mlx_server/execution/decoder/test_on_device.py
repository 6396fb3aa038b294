"""Steps of the fused decoder on the device at hand."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from execution.decoder.common_decoders import LATENT, make
from mlx import nn

from mlx_manager.mlx_server.devices.attention.check import difference
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.cuda.mla import expansion
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.execution.attention.latent_chunks import meeting_of
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.forward import whole
from mlx_manager.mlx_server.execution.forward import Chunk, Decode
from mlx_manager.mlx_server.execution.step import RaggedStep

PAGE = 16
SIZES = {
    "kv_lora_rank": 128,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 64,
}


def step_of(rows: int, texts: list[tuple[int, int]]) -> tuple[RaggedStep, int]:
    """Running rows of some length, prompts of queries after tokens, those of the first's first
    pages, and padding; how many pages they have."""
    order, taken = np.random.default_rng(1).permutation(1000), 0
    tables: list[PageTable] = []
    for length in [130] * rows + [sum(text) for text in texts]:
        count = -(-length // PAGE)
        tables.append(PageTable(order[taken : taken + count].tolist()))
        taken += count
    first = tables[rows].pages
    spans = []
    for (queries, before), table in zip(texts, tables[rows:], strict=True):
        shared = min(before // PAGE, len(first))
        own = PageTable([*first[:shared].tolist(), *table.pages[shared:].tolist()])
        spans.append(Span(own, before + queries, queries))
    chunks = [
        Chunk(rows + number, span, [(5 * number + i) % 90 for i in range(span.queries)], final=True)
        for number, span in enumerate(spans)
    ]
    running = Decode(list(range(rows)), tables[:rows], [130] * rows, mx.full((rows,), 7, mx.uint32))
    return RaggedStep.of(running if rows else None, chunks, PAGE, whole), 1000


def logits_of(decoder: FusedDecoder, rows: int, texts: list[tuple[int, int]]) -> np.ndarray:
    step, pages = step_of(rows, texts)
    stores = decoder.stores(PAGE, KernelSet())
    mx.random.seed(5)
    for store in stores:
        store.resize(pages)
        store.keys, store.values = (
            mx.random.normal(pool.shape).astype(pool.dtype) for pool in (store.keys, store.values)
        )
        mx.eval(store.keys, store.values)
    decoder.prepare(step.plan, stores)
    logits, pieces = decoder.run_ragged(step, stores)
    pieces.finish()
    (kernels,) = decoder._latents.values()
    expanded = meeting_of(step.plan, kernels).expanded
    assert (expanded is None) == (kernels.expansion is None)
    return np.array(logits.astype(mx.float32))


@pytest.mark.skipif(
    mx.default_device().type != mx.gpu or mx.metal.is_available(), reason="needs an NVIDIA GPU"
)
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(
    "texts", [[(700, 0)], [(700, 0), (333, 688), (90, 160), (61, 500)]], ids=["one", "several"]
)
def test_expanded_latents_give_what_latents_do(rows, texts, monkeypatch):
    monkeypatch.setattr(expansion, "START", 0)
    model = make("glm4_moe_lite", {**LATENT, **SIZES})
    model.update(nn.utils.tree_map(lambda x: x.astype(mx.float16), model.parameters()))
    by_mlx = Unsupported("products are none of this test's business")
    decoder = FusedDecoder.build(model, PAGE, products=lambda _: by_mlx)
    assert not isinstance(decoder, Unsupported), decoder
    expanded = logits_of(decoder, rows, texts)
    decoder.keep_packed()
    as_they_are = logits_of(decoder, rows, texts)
    assert len(expanded) == rows + len(texts)
    assert difference(expanded, as_they_are) <= 2e-2

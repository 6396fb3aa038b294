"""The fused decoder against mlx-lm's modules, with portable arithmetic in place of the GPU's."""

from __future__ import annotations

import re
import sys

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.linear_attention.portable import PortableDelta, PortableShort
from devices.cuda.matmul.portable import PortableProducts
from devices.portable import Portable, PortableLatents, PortableWriter, Replayed, plainly
from execution.decoder.common_decoders import (
    EXPERTS,
    GEMMA4S,
    HYBRIDS,
    LATENT,
    LATENTS,
    MODELS,
    PACKABLE,
    SHORTS,
    make,
)
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import QuantizedMultiLinear
from thorough import one_in_turn

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.attention.splits import Splits
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Packed
from mlx_manager.mlx_server.devices.cuda.mla import expansion
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore
from mlx_manager.mlx_server.execution import compiled as compiled_steps
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.decoder import decoder as decoders
from mlx_manager.mlx_server.execution.decoder.check import CHECKED_ROWS, check
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.layers import Step
from mlx_manager.mlx_server.execution.decoder.projections import MOST_PACKED
from mlx_manager.mlx_server.execution.forward import Chunk, Decode
from mlx_manager.mlx_server.execution.step import RaggedStep
from mlx_manager.mlx_server.models.loading.weights import convert, forms_of

PAGE = 16
ATTENDING = MODELS | GEMMA4S


@pytest.fixture(params=ATTENDING, ids=list(ATTENDING))
def model(request) -> nn.Module:
    return make(*ATTENDING[request.param])


def built(model: nn.Module) -> FusedDecoder:
    decoder = FusedDecoder.build(model, PAGE, Portable, compile=plainly)
    assert isinstance(decoder, FusedDecoder), decoder
    return decoder


def test_fused_steps_give_the_modules_logits(model):
    assert check(built(model), model, PAGE) is None


@pytest.mark.parametrize(
    ("family", "chained"),
    [
        *(("qwen3_5", None), ("qwen3_5", 0), ("qwen3_5", 12), ("qwen3_next", 0)),
        *(("lfm2", None), ("lfm2", 0), ("lfm2", 12), ("lfm2_moe", 0)),
    ],
)
def test_layers_with_a_state_give_the_modules_logits(family, chained):
    model = make(family, (HYBRIDS | SHORTS)[family])
    how = {} if chained is None else {"products": lambda _: PortableProducts(chained)}
    how |= {"deltas": PortableDelta, "shorts": PortableShort}
    decoder = FusedDecoder.build(model, PAGE, Portable, compile=plainly, **how)
    assert isinstance(decoder, FusedDecoder), decoder
    assert check(decoder, model, PAGE) is None


@pytest.mark.parametrize("name", LATENTS)
@pytest.mark.parametrize("chained", [None, 0, 12])
def test_latent_attention_gives_the_modules_logits(name, chained):
    model, of = make(*LATENTS[name]), PortableProducts(chained or 0)
    products = {} if chained is None else {"products": lambda _: of}
    decoder = FusedDecoder.build(
        model, PAGE, Portable, compile=plainly, latents=PortableLatents.build, **products
    )
    assert isinstance(decoder, FusedDecoder), decoder
    assert check(decoder, model, PAGE) is None
    few = [] if chained is None else [rows for rows in CHECKED_ROWS if rows <= 32]
    assert of.heads.rows == {(rows, first) for rows in few for first in (True, False)}


def test_packed_latent_attention_is_fused_too():
    model, of = make("glm4_moe_lite", PACKABLE), PortableProducts()
    nn.quantize(model, group_size=32, bits=4)
    assert isinstance(model.model.layers[0].self_attn.embed_q, QuantizedMultiLinear)
    decoder = FusedDecoder.build(
        model, PAGE, Portable, lambda _: of, plainly, latents=PortableLatents.build
    )
    assert check(decoder, model, PAGE) is None
    assert of.packed == {rows for rows in CHECKED_ROWS if rows <= 48}


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_packed_layers_with_a_state_are_fused_too(family):
    model, of = make(family, (HYBRIDS | SHORTS)[family]), PortableProducts()
    nn.quantize(model, group_size=32, bits=4)
    decoder = FusedDecoder.build(
        model, PAGE, Portable, lambda _: of, plainly, deltas=PortableDelta, shorts=PortableShort
    )
    assert check(decoder, model, PAGE) is None
    assert of.packed == {rows for rows in CHECKED_ROWS if rows <= 48}


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("chained", [0, 12])
def test_few_rows_may_be_multiplied_by_kernels_of_their_own(changes, chained):
    model = make("llama", changes)
    of = PortableProducts(chained)
    decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: of, plainly)
    assert check(decoder, model, PAGE) is None


def test_norms_before_gates_by_groups_are_begun_by_who_makes_the_rows():
    model = make("llama", {"attention_bias": True, "mlp_bias": True})
    of = PortableProducts(grouped=17)
    decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: of, plainly)
    assert check(decoder, model, PAGE) is None
    assert of.ahead == {rows for rows in CHECKED_ROWS if 17 <= rows <= 32} != set()


@pytest.mark.parametrize("name", GEMMA4S)
def test_results_are_scaled_where_norms_are_added(name):
    model, of = make(*GEMMA4S[name]), PortableProducts(chained=8)
    decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: of, plainly)
    assert check(decoder, model, PAGE) is None
    assert of.sums.rows == {(rows, followed) for rows in CHECKED_ROWS for followed in (True, False)}


def test_layers_that_share_keys_and_values_have_no_pages():
    decoder = built(make(*GEMMA4S["gemma4-shared"]))
    assert [layer.source for layer in decoder._layers] == [0, 1, 0, 1, 0]
    shapes = [store.shape for store in decoder.stores(PAGE, None)]
    assert [(shape.key_dim, shape.window) for shape in shapes] == [(16, 24), (32, None)]


@pytest.mark.parametrize("name", GEMMA4S)
def test_a_prompt_of_a_gemma4_gives_the_modules_logits(name):
    model = make(*GEMMA4S[name])
    decoder = built(model)
    stores = decoder.stores(PAGE, None)
    for store in stores:
        store.resize(8)
    tokens = [5 + i % 40 for i in range(40)]
    chunk = Chunk(0, Span(PageTable([3, 1, 2]), 40, 40), tokens, final=True, every=True)
    logits, _ = decoder.run_ragged(RaggedStep.of(None, [chunk], PAGE), stores)
    wanted = model(mx.array([tokens]))[0]
    np.testing.assert_allclose(np.array(logits), np.array(wanted), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("grouped", [17, 33])
def test_norms_behind_products_are_one_launch_with_the_norms_that_follow(grouped):
    model, of = make(*MODELS["gemma3"]), PortableProducts(chained=8, grouped=grouped)
    decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: of, plainly)
    assert check(decoder, model, PAGE) is None
    # None follows the last layer's, nor is anything else to do a norm's part.
    assert of.sums.rows == {(rows, followed) for rows in CHECKED_ROWS for followed in (True, False)}
    assert not of.ahead
    step = step_of(decoder, model, 40)
    # Lengths, two rotations and the embedding; of either kind of layer its heads, attention, gates,
    # and two products with their sums, each of which gives rows normed for what follows, but for
    # the last layer's; the first layer's kind gives the next one's heads; the vocabulary.
    assert len(decoder.launches(step)) == 4 + (3 + 2 * 3 + 1) + (3 + 2 * 3 - 1) + 1


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_prompts_have_norms_behind_products_in_the_same_launches(name):
    of = PortableProducts()
    decoder = FusedDecoder.build(make(*MODELS[name]), PAGE, Portable, lambda _: of)
    mine, theirs = (ragged_logits(each, 0.3) for each in (decoder, built(make(*MODELS[name]))))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    assert of.sums.rows == {(31, True), (31, False)}


@pytest.mark.parametrize("final", [True, False])
def test_only_a_prompts_end_is_multiplied_by_the_vocabulary(final, monkeypatch):
    decoder = built(make("llama", {}))
    multiplied, ending = [], decoder._ending
    monkeypatch.setattr(decoder, "_ending", lambda x: multiplied.append(x.shape[0]) or ending(x))
    shape = LayerShape(2, 16, 16, mx.float32)
    stores = [LayerStore(shape, PAGE) for _ in range(3)]
    for store in stores:
        store.resize(4)
    chunk = Chunk(0, Span(PageTable([0, 1]), PAGE, PAGE), [5] * PAGE, final)
    logits, _ = decoder.run_ragged(RaggedStep.of(None, [chunk], PAGE), stores)
    assert logits.shape[0] == 1
    assert multiplied == ([1] if final else [])


@pytest.mark.parametrize(
    ("tokens", "at_once"),
    # Of steps that are larger than any but where memory is plenty, more is queued.
    [(100, 150), (200, 300), (400, 300), (1600, 300), (3200, 400), (6400, 800), (12_800, 1600)],
)
def test_what_is_in_memory_at_once_is_bounded_by_bytes_not_by_tokens(tokens, at_once, monkeypatch):
    decoder = built(make("llama", {"num_hidden_layers": 32}))
    whole = 200 * 32 * decoder._layer_bytes
    monkeypatch.setattr(decoders, "BYTES_AHEAD", whole)
    monkeypatch.setattr(decoders, "BYTES_AT_A_TIME", whole / 3)
    assert decoder.tokens_at_once(tokens) == at_once


@pytest.mark.parametrize(("ahead", "at_a_time"), [(1, 1), (1, 20_000), (20_000, 8_000)])
def test_a_step_in_pieces_is_as_one_that_is_queued_whole(ahead, at_a_time, monkeypatch):
    decoder = built(make("llama", {"num_hidden_layers": 9}))
    shape = LayerShape(2, 16, 16, mx.float32)
    chunk = Chunk(0, Span(PageTable([0, 1]), 2 * PAGE, 2 * PAGE), [5, 7] * PAGE, final=True)

    def logits() -> mx.array:
        stores = [LayerStore(shape, PAGE) for _ in range(9)]
        for store in stores:
            store.resize(4)
        out, pieces = decoder.run_ragged(RaggedStep.of(None, [chunk], PAGE), stores)
        assert pieces.unfinished == (ahead == decoders.BYTES_AHEAD)
        pieces.finish()
        return out

    whole = np.array(logits())
    monkeypatch.setattr(decoders, "BYTES_AHEAD", ahead)
    monkeypatch.setattr(decoders, "BYTES_AT_A_TIME", at_a_time)
    assert np.array_equal(np.array(logits()), whole)


def ragged_logits(decoder: FusedDecoder, pages: float) -> np.ndarray:
    """Of a running row and a chunk, over pages of other numbers in each layer."""
    stores = decoder.stores(PAGE, None)
    for number, store in enumerate(stores):
        store.resize(8)
        store.keys = mx.full(store.keys.shape, pages * number)
        store.values = mx.full(store.values.shape, pages + number)
    row = Decode([7], [PageTable([4, 5, 6])], [40], mx.array([11], mx.uint32))
    chunk = Chunk(0, Span(PageTable([0, 1, 2]), 40, 30), [5, 7, 9] * 10, final=True)
    logits, _ = decoder.run_ragged(RaggedStep.of(row, [chunk], PAGE), stores)
    return np.array(logits)


# What is put together once writes in place by kernels alone, and else for its own layer alone.
@pytest.mark.parametrize("name", [name for name in ATTENDING if name != "gemma4-shared"])
def test_layers_that_repeat_what_was_put_together_once_give_what_each_by_itself_does(name):
    model = make(*ATTENDING[name])
    repeating = FusedDecoder.build(model, PAGE, Portable)
    plain = built(model)
    for pages in (0.3, -0.2):
        mine, theirs = (ragged_logits(decoder, pages) for decoder in (repeating, plain))
        assert mine.shape == (2, 97)
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture
def expanding_short_prompts(monkeypatch) -> None:
    monkeypatch.setattr(expansion, "START", 0)
    monkeypatch.setattr(expansion, "MULTIPLYING", 0.1)


def latent_logits(decoder: FusedDecoder, rows: int) -> np.ndarray:
    """Of rows, and prompts of which two share a page and one is another's rest; then padding."""
    stores = decoder.stores(PAGE, KernelSet(Portable, build_writer=PortableWriter))
    mx.random.seed(5)
    for store in stores:
        store.resize(12)
        store.keys, store.values = (
            mx.random.normal(pool.shape, pool.dtype) for pool in (store.keys, store.values)
        )
    tables = [PageTable([number]) for number in range(10, 10 + rows)]
    row = Decode(list(range(rows)), tables, [7] * rows, mx.full((rows,), 11, mx.uint32))
    spans = [
        Span(PageTable([4, 1, 6]), 40, 21),
        Span(PageTable([4, 5]), 30, 14),
        Span(PageTable([0, 7, 2, 9]), 50, 50),
    ]
    chunks = [
        Chunk(3 + number, span, [5 + number] * span.queries, final=True)
        for number, span in enumerate(spans)
    ]
    step = RaggedStep.of(row if rows else None, chunks, PAGE, lambda tokens: 96)
    decoder.prepare(step.plan, stores)
    logits, _ = decoder.run_ragged(step, stores)
    return np.array(logits)


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("name", LATENTS)
def test_expanded_latents_give_what_latents_do(name, rows, request):
    model = make(*LATENTS[name])
    decoder = FusedDecoder.build(
        model, PAGE, Portable, compile=plainly, latents=PortableLatents.build_expanding
    )
    expected = latent_logits(decoder, rows)
    assert len(expected) == rows + 3
    request.getfixturevalue("expanding_short_prompts")
    (kernels,) = decoder._latents.values()
    attended = []
    of_kernels = kernels.attend_chunks
    kernels.attend_chunks = lambda *of, **how: attended.append(1) or of_kernels(*of, **how)
    np.testing.assert_allclose(latent_logits(decoder, rows), expected, rtol=1e-4, atol=1e-4)
    assert len(attended) == (len(decoder._layers) if rows else 0)


@pytest.mark.usefixtures("expanding_short_prompts")
@pytest.mark.parametrize("quantised", [False, True])
def test_layers_that_expand_latents_are_repeated(quantised):
    model = make("glm4_moe_lite", PACKABLE)
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    logits = [
        latent_logits(
            FusedDecoder.build(
                model, PAGE, Portable, compile=compile, latents=PortableLatents.build_expanding
            ),
            rows=2,
        )
        for compile in (mx.compile, plainly)
    ]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)


def test_what_is_expanded_is_counted_until_there_is_no_memory_for_it(monkeypatch):
    decoder = FusedDecoder.build(
        make("glm4_moe_lite", {**LATENT, "num_hidden_layers": 32}),
        PAGE,
        Portable,
        compile=plainly,
        latents=PortableLatents.build_expanding,
    )
    (kernels,) = decoder._latents.values()
    most, token = kernels.expansion.most_bytes, decoder._layer_bytes
    # Layers are queued one at a time then, and three of them.
    assert decoder._ahead(1, most) == (1, decoders.LEAST_AHEAD)
    assert decoder.expanded_at_once(1) == 3 * most + 3 * token - token * 32
    # What is counted for all steps is not counted twice.
    monkeypatch.setattr(decoders, "MANY", sys.maxsize)
    many = decoders.BYTES_AT_A_TIME // token
    counted = decoders.STEPS_AHEAD * decoders.BYTES_AHEAD
    expected = 3 * (most + many * token) - counted
    assert decoder.expanded_at_once(many) == pytest.approx(expected, rel=0.01)
    assert decoder.expands
    decoder.keep_packed()
    assert not decoder.expands
    assert decoder.expanded_at_once(many) == 0
    latent_logits(decoder, 2)


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("windows", 2), ("biases", 1)])
def test_a_step_with_prompts_is_put_together_once_for_each_kind_of_layer(name, kinds):
    model, put_together = make(*MODELS[name]), []

    def compile(function):
        return mx.compile(lambda *of: put_together.append(1) or function(*of))

    decoder = FusedDecoder.build(model, PAGE, Portable, compile=compile)
    ragged_logits(decoder, 0.3)
    assert len(put_together) == kinds


def test_quantised_projections_are_fused_too():
    model = make("llama", {"attention_bias": True})
    nn.quantize(model, group_size=32, bits=4)
    assert check(built(model), model, PAGE) is None


@pytest.mark.parametrize("chained", [0, 8])
@pytest.mark.parametrize("name", ["llama", "tied", "biases", "qwen3", "phi3", "gemma3"])
def test_few_rows_may_be_multiplied_as_they_are_packed(name, chained):
    model, of = make(*MODELS[name]), PortableProducts(chained)
    nn.quantize(model, group_size=32, bits=4)
    decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: of, plainly)
    assert check(decoder, model, PAGE) is None
    assert of.packed == {rows for rows in CHECKED_ROWS if rows <= 48}


@pytest.mark.parametrize("chained", [0, 8])
@pytest.mark.parametrize("name", ["llama", "tied", "biases", "phi3", "gemma3"])
def test_more_rows_are_multiplied_by_dense_weights_where_those_are_there_too(name, chained):
    model, of = make(*MODELS[name]), PortableProducts(chained, grouped=17)
    nn.quantize(model, group_size=32, bits=4)
    (form,) = (form for form in forms_of(model, "cuda", multiplies_packed=True) if form.keeps)
    convert(model, form)
    decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: of, plainly)
    assert check(decoder, model, PAGE) is None
    assert of.packed == {rows for rows in CHECKED_ROWS if rows <= MOST_PACKED} != set()
    ahead = set() if of.sums.rows else {rows for rows in CHECKED_ROWS if 17 <= rows <= 32}
    assert of.ahead == ahead
    weights = sum(array.nbytes for _, array in nn.utils.tree_flatten(model.parameters()))
    assert weights == form.nbytes


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_layers_with_a_state_have_packed_weights_beside_dense_ones_too(family):
    model, of = make(family, (HYBRIDS | SHORTS)[family]), PortableProducts()
    nn.quantize(model, group_size=32, bits=4)
    (form,) = (form for form in forms_of(model, "cuda", multiplies_packed=True) if form.keeps)
    convert(model, form)
    decoder = FusedDecoder.build(
        model, PAGE, Portable, lambda _: of, plainly, deltas=PortableDelta, shorts=PortableShort
    )
    assert check(decoder, model, PAGE) is None
    assert of.packed == {rows for rows in CHECKED_ROWS if rows <= MOST_PACKED}


def test_prompts_are_multiplied_by_dense_weights_where_packed_ones_are_there_too():
    logits = []
    for keeps in (False, True):
        model = make("llama", {"attention_bias": True})
        nn.quantize(model, group_size=32, bits=4)
        forms = forms_of(model, "cuda", multiplies_packed=True)
        convert(model, next(form for form in forms if form.dense and form.keeps == keeps))
        decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: PortableProducts())
        logits.append(ragged_logits(decoder, 0.3))
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"tie_word_embeddings": True}])
def test_packed_weights_are_made_dense_for_steps_of_many_tokens(changes, monkeypatch):
    monkeypatch.setattr(decoders, "FEWEST_UNPACKED", 31)
    model, of = make("llama", changes), PortableProducts()
    nn.quantize(model, group_size=32, bits=4)
    decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: of)
    layer = model.model.layers[0]
    linears = [each for _, each in layer.named_modules() if isinstance(each, nn.QuantizedLinear)]
    numbers = sum(each.weight.size * 8 for each in linears)
    assert decoder.unpacked_at_once == len(model.model.layers) * numbers * 4
    # The row and the prompt's end are multiplied by the vocabulary, all 31 by nothing else.
    unpacked = ragged_logits(decoder, 0.3)
    assert of.packed == {2}
    decoder.unpacks = False
    packed = ragged_logits(decoder, 0.3)
    assert of.packed == {2, 31}
    np.testing.assert_allclose(unpacked, packed, rtol=1e-4, atol=1e-4)
    assert decoder.unpacked_at_once == 0


@pytest.mark.parametrize("quantised", [False, True])
def test_what_no_kernel_of_ours_multiplies_is_not_made_dense(quantised):
    model = make("llama", {})
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    assert built(model).unpacked_at_once == 0


def test_fewer_layers_are_queued_at_once_where_their_weights_are_made_dense(monkeypatch):
    model = make("llama", {"num_hidden_layers": 32})
    nn.quantize(model, group_size=32, bits=4)
    decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: PortableProducts(), plainly)
    of_layer = decoder.unpacked_at_once // 32
    monkeypatch.setattr(decoders, "BYTES_AHEAD", 40 * of_layer)
    monkeypatch.setattr(decoders, "BYTES_AT_A_TIME", of_layer)
    monkeypatch.setattr(decoders, "FEWEST_UNPACKED", 1)
    tokens = of_layer // decoder._layer_bytes
    assert decoder._ahead(tokens) == (1, 20)
    monkeypatch.setattr(decoders, "FEWEST_UNPACKED", tokens)
    assert decoder.unpacked_at_once == 20 * of_layer
    # Never more than there are, nor fewer than keep the device busy.
    monkeypatch.setattr(decoders, "BYTES_AHEAD", 63 * of_layer)
    monkeypatch.setattr(decoders, "BYTES_AT_A_TIME", 6 * of_layer)
    assert decoder.unpacked_at_once == 30 * of_layer
    monkeypatch.setattr(decoders, "BYTES_AHEAD", of_layer)
    assert decoder.unpacked_at_once == 3 * decoders.LEAST_AHEAD * of_layer
    monkeypatch.setattr(decoders, "BYTES_AHEAD", 40 * of_layer)
    decoder.unpacks = False
    assert decoder._ahead(tokens) == (decoders.LAYERS_AT_A_TIME, None)


def test_dense_weights_alone_are_multiplied_where_no_kernel_serves_what_they_were_made_of(
    monkeypatch,
):
    model, of = make("llama", {}), PortableProducts()
    nn.quantize(model, group_size=32, bits=4)
    (form,) = (form for form in forms_of(model, "cuda", multiplies_packed=True) if form.keeps)
    convert(model, form)
    monkeypatch.setattr(of, "serves", lambda weight: not isinstance(weight, Packed))
    decoder = FusedDecoder.build(model, PAGE, Portable, lambda _: of, plainly)
    assert check(decoder, model, PAGE) is None
    assert not of.packed


@pytest.mark.parametrize(
    ("family", "mode"), one_in_turn([*EXPERTS, "lfm2_moe"], [None, "affine", "mxfp4"])
)
def test_experts_are_multiplied_by_kernels_of_their_own(family, mode):
    model, of = make(family, (EXPERTS | SHORTS)[family]), PortableProducts()
    if mode:
        nn.quantize(model, group_size=32, bits=4, mode=mode)
    decoder = FusedDecoder.build(
        model,
        PAGE,
        Portable,
        lambda _: of,
        plainly,
        latents=PortableLatents.build,
        shorts=PortableShort,
    )
    assert isinstance(decoder, FusedDecoder), decoder
    assert check(decoder, model, PAGE) is None
    assert of.experts.rows == set(CHECKED_ROWS)


@pytest.mark.parametrize(
    ("family", "repeat"),
    [
        *((family, mx.compile) for family in ("qwen3_moe", "qwen2_moe", "glm4_moe", "dots1")),
        ("gemma4_text", Replayed),
    ],
)
def test_layers_with_experts_are_repeated_and_the_module_keeps_working(family, repeat):
    model = make(family, EXPERTS[family])
    tokens = mx.array([[5, 6, 7]])
    before = np.array(model(tokens))
    logits = []
    for compile in (repeat, plainly):
        decoder = FusedDecoder.build(
            model, PAGE, Portable, lambda _: PortableProducts(), compile=compile
        )
        logits.append(ragged_logits(decoder, 0.3))
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(model(tokens)), before, rtol=1e-4, atol=1e-4)


def test_experts_whose_weights_no_kernel_serves_are_the_reason(monkeypatch):
    model, of = make("mixtral", EXPERTS["mixtral"]), PortableProducts()
    monkeypatch.setattr(of.experts, "serves", lambda experts: False)
    declined = FusedDecoder.build(model, PAGE, Portable, lambda _: of, plainly)
    assert "experts that the kernels do not serve" in declined.reason
    declined = FusedDecoder.build(model, PAGE, Portable, compile=plainly)
    assert "experts, for which this device has no kernels" in declined.reason


def test_the_module_keeps_working_and_nothing_exists_twice():
    model = make("llama", {"hidden_size": 512, "intermediate_size": 1024})
    tokens = mx.array([[5, 6, 7]])
    before = model(tokens, cache=make_prompt_cache(model))
    mx.eval(before)
    mx.clear_cache()
    used = mx.get_active_memory()
    decoder = built(model)
    mx.clear_cache()
    weights = sum(a.nbytes for _, a in nn.utils.tree_flatten(model.parameters()))
    assert mx.get_active_memory() - used < 0.02 * weights
    after = model(tokens, cache=make_prompt_cache(model))
    np.testing.assert_allclose(np.array(before), np.array(after), rtol=1e-5, atol=1e-5)
    assert isinstance(decoder, FusedDecoder)


class Passing:
    """Kernels whose attention is each query itself, so that a step can be compiled anywhere."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def plan(self, lengths, *, window=None, table_rows=None) -> Splits:
        return Splits(items=mx.ones((len(lengths), 8), mx.int32), divided=False)

    def attend_fused(self, qkv, rotation, norms, k_pool, v_pool, table, lengths, **options):
        queries = qkv[:, : self.shape.q_heads * self.shape.head_dim]
        length = (lengths + table[:, 0] + options["splits"].items[:, 0])[:, None]
        return queries * length * rotation.sum(axis=1, keepdims=True) + k_pool.sum() * v_pool.sum()


@pytest.mark.parametrize("in_parts", [False, True])
def test_compiled_steps_give_what_plain_ones_do(in_parts, monkeypatch):
    monkeypatch.setattr(compiled_steps, "STEPS_BEFORE_COMPILING", 0)
    monkeypatch.setattr(decoders, "LAYERS_OF_A_PART", 1)
    model = make("llama", {})
    compiled = FusedDecoder.build(model, PAGE, Passing)
    plain = FusedDecoder.build(model, PAGE, Passing, compile=plainly)
    for i, rows in enumerate((2, 3, 2, 2)):
        lengths = np.arange(i, rows + i, dtype=np.int32)
        step = Step(
            tokens=mx.arange(rows) + i,
            before=mx.array(lengths),
            table=mx.full((rows, 2), i),
            pools=[(mx.full((2, PAGE, 16), 0.01 * i), mx.ones((2, PAGE, 16)))] * 3,
            splits=compiled.plan(lengths),
        )
        mine_of = compiled.run(step, in_parts=in_parts)
        assert compiled.repeats == (i == 2 or i == 3)
        for mine, theirs in zip(mine_of, plain.run(step), strict=True):
            np.testing.assert_allclose(np.array(mine), np.array(theirs), rtol=1e-4, atol=1e-4)


def test_a_step_that_is_waited_for_is_queued_while_it_is_put_together(monkeypatch):
    monkeypatch.setattr(decoders, "LAYERS_OF_A_PART", 1)
    model = make("llama", {})
    decoder = built(model)
    step = step_of(decoder, model, 40)
    queued = []
    monkeypatch.setattr(mx, "async_eval", queued.append)
    decoder.run(step)
    assert not queued
    decoder.run(step, in_parts=True)
    assert [part.shape for part in queued] == [(1, model.args.hidden_size)] * len(
        model.model.layers
    )


def step_of(decoder: FusedDecoder, model: nn.Module, length: int) -> Step:
    """One row, over the pages of every layer."""
    dim = model.model.layers[0].self_attn.k_proj.weight.shape[0] // 2
    lengths = np.array([length], np.int32)
    pages = -(-length // PAGE)
    return Step(
        tokens=mx.array([5]),
        before=mx.array(lengths - 1),
        table=mx.arange(pages)[None],
        pools=[
            (mx.random.normal((2, pages * PAGE, dim)), mx.random.normal((2, pages * PAGE, dim)))
            for _ in model.model.layers
        ],
        splits=decoder.plan(lengths),
    )


def test_launches_are_those_of_a_step_in_one_layer_of_each_kind():
    windows = MODELS["windows"][1]
    for changes, kinds in (({"num_hidden_layers": 1}, 1), ({}, 1), (windows, 2)):
        model = make("llama", changes)
        decoder = built(model)
        step = step_of(decoder, model, 40)
        launches = decoder.launches(step)
        # Lengths, a rotation, the embedding, five a layer and the heads of the next, the head.
        followed = min(kinds, len(model.model.layers) - 1)
        assert len(launches) == 3 + 5 * kinds + followed + 1
        if len(model.model.layers) == 1:
            mx.eval(launches)
            assert mx.allclose(launches[-1], decoder.run(step)[0], atol=1e-5)


class Opaque(Passing):
    """Attention that `mx.compile` joins with nothing, like a kernel."""

    def attend_fused(self, qkv, rotation, norms, k_pool, v_pool, table, lengths, **options):
        width = self.shape.q_heads * self.shape.head_dim
        seen = mx.concatenate([qkv, rotation], axis=1)
        return seen @ mx.ones((seen.shape[1], width))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    "name", ["llama", "traditional", "biases", "windows", "yarn", "gemma2", "gemma3"]
)
def test_launches_take_every_kernel_that_a_compiled_step_takes(
    name, quantised, tmp_path, monkeypatch
):
    def joined(outputs: list[mx.array]) -> set[str]:
        """What `mx.compile` has made kernels of."""
        graph = tmp_path / "graph.dot"
        mx.export_to_dot(str(graph), *outputs)
        return set(re.findall(r'label ="(Compiled\w*)', graph.read_text()))

    monkeypatch.setattr(decoders, "LAYERS_OF_A_PART", 1)
    model = make(*MODELS[name])
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    whole = []

    def compile(function):
        compiled = mx.compile(function)
        return lambda *arrays: whole.append(compiled(*arrays)) or whole[-1]

    decoder = FusedDecoder.build(model, PAGE, Opaque, lambda _: PortableProducts(), compile)
    step = step_of(decoder, model, 40)
    for _ in range(compiled_steps.STEPS_BEFORE_COMPILING + 1):
        decoder.run(step)
    assert len(whole) == 1
    assert joined(list(whole[0])) <= joined(decoder.launches_compiled(step))


def test_steps_that_keep_coming_are_compiled_once_and_few_kinds_are_kept(monkeypatch):
    monkeypatch.setattr(compiled_steps, "STEPS_BEFORE_COMPILING", 4)
    monkeypatch.setattr(compiled_steps, "MOST_COMPILED", 3)
    compiled = []
    decoder = FusedDecoder.build(
        make("llama", {}), PAGE, Portable, compile=lambda function: compiled.append(1) or function
    )
    pools = [(mx.zeros((2, PAGE, 16)), mx.zeros((2, PAGE, 16))) for _ in range(3)]

    def compiled_by(width, times=1):
        """Steps with tables of that width: how many times that is compiled."""
        before = len(compiled)
        for _ in range(times):
            lengths = np.array([1], np.int32)
            table = mx.zeros((1, width), mx.int32)
            splits = decoder.plan(lengths)
            decoder.run(Step(mx.array([1]), mx.array(lengths - 1), table, pools, splits))
        return len(compiled) - before

    assert compiled_by(1, 4) == 0
    assert compiled_by(1) == 1
    assert compiled_by(1, 9) == 0
    assert compiled_by(2, 5) == compiled_by(3, 5) == 1
    # The first has come since the second, which goes, and has to come as often as at first.
    assert compiled_by(1) == 0
    assert compiled_by(4, 5) == 1
    assert compiled_by(1) == 0
    assert compiled_by(2, 4) == 0
    assert compiled_by(2) == 1

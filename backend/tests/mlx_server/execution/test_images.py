"""Pictures in every way of running: logits are mlx-vlm's, wherever prompts are cut and whatever
runs beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from devices.portable import Portable, Replayed, Traceable, TraceableWriter, plainly
from engine.rig import prompt
from mlx import nn
from seeing import BASE, FAMILIES, Scene, SeeingFamily, reference_logits, scene
from thorough import every_other

from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.errors import GenerationFailed
from mlx_manager.mlx_server.execution.alone import AloneForward
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess, Span
from mlx_manager.mlx_server.execution.decoder.forward import FusedForward
from mlx_manager.mlx_server.execution.decoder.joined import JoinedForward, join
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward
from mlx_manager.mlx_server.execution.images import Features, MRope, Shown
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward
from mlx_manager.mlx_server.execution.module.separate import SeparateForward
from mlx_manager.mlx_server.execution.select import choose

PAGE = 16

Make = Callable[[nn.Module, SeeingFamily], Forward]


def not_fused(*_: object) -> Unsupported:
    return Unsupported("to see what the module does")


WAYS: dict[str, Make] = {
    "joined": lambda model, of: join(model, PAGE, of.mrope),
    "ragged": lambda model, of: RaggedForward(model, PAGE, KeyAccess.PAGES, vision=of),
    "separate": lambda model, of: SeparateForward(model, PAGE, KeyAccess.PAGES, vision=of),
    "gathered": lambda model, of: SeparateForward(model, PAGE, KeyAccess.GATHERED, vision=of),
    "alone": AloneForward,
    "fused": lambda model, of: choose(model, PAGE, Portable, plainly, vision=of),
    "chosen": lambda model, of: choose(model, PAGE, vision=of),
    "steps": lambda model, of: choose(
        model,
        PAGE,
        Traceable,
        Replayed,
        writers=TraceableWriter,
        deltas=not_fused,
        shorts=not_fused,
        vision=of,
    ),
}
KINDS = {
    "joined": JoinedForward,
    "ragged": RaggedForward,
    "separate": SeparateForward,
    "gathered": SeparateForward,
    "alone": AloneForward,
    "fused": FusedForward,
    "chosen": JoinedForward,
    "steps": RaggedForward,
}
CASES = [
    *((name, way) for name in ("smolvlm", "qwen2_5_vl", "qwen3_vl") for way in WAYS),
    *(("qwen3_5", way) for way in ("separate", "gathered", "alone")),
]


def chunk_of(
    scene: Scene, table: PageTable, start: int, stop: int, whole: bool, windowed: bool
) -> Chunk:
    parts = []
    for places, features in zip(scene.places, scene.features, strict=True):
        first, last = np.searchsorted(places, [start, stop])
        if first < last:
            levels = tuple(level[first:last] for level in features.levels)
            parts.append(
                Shown(places[first:last] - start, Features(features.rows[first:last], levels))
            )
    angles = None if scene.angles is None else scene.angles[:, start:stop]
    runs = [(int(places[0]), int(places[-1]) + 1) for places in scene.places]
    within = tuple(run for run in runs if start < run[1] and run[0] < stop)
    span = Span(table, stop, stop - start, within if whole else (), windowed)
    shown = Shown.joined(parts) if parts else None
    return Chunk(
        0, span, scene.tokens[start:stop], stop == scene.prompt, True, shown=shown, angles=angles
    )


def logits_of(
    forward: Forward,
    scene: Scene,
    cuts: list[int],
    text: list[int] | None = None,
    whole: bool = False,
    windowed: bool = False,
) -> tuple[mx.array, list[mx.array]]:
    """Logits of the scene, its prompt cut at `cuts`, and those of `text`, whose row decodes in the
    same steps."""
    pages = 48
    for store in forward.stores:
        store.resize(2 * pages)
    tables = [PageTable(range(pages)), PageTable(range(pages, 2 * pages))]
    beside: list[mx.array] = []
    got: list[mx.array] = []
    if text is not None:
        first = Chunk(1, Span(tables[1], 3, 3), text[:3], True)
        mx.eval([*forward.state(), forward.run(None, [first])])
    place = 3

    def decode(*rows: tuple[int, int, int, int]) -> Decode:
        order = forward.order([row[0] for row in rows], [row[1] for row in rows])
        keys, lengths, tokens, shifts = zip(*(rows[i] for i in order), strict=True)
        return Decode(
            list(keys),
            [tables[key] for key in keys],
            list(lengths),
            mx.array(tokens, mx.uint32),
            shifts if any(shifts) else (),
        )

    for start, stop in zip([0, *cuts], [*cuts, scene.prompt], strict=True):
        running = None
        if text is not None:
            running = decode((1, place + 1, text[place], 0))
            place += 1
        out = forward.run(running, [chunk_of(scene, tables[0], start, stop, whole, windowed)])
        mx.eval([*forward.state(), out])
        if running is not None:
            beside.append(out[0])
            out = out[1:]
        got.append(out[: stop - start])
    for at in range(scene.prompt, len(scene.tokens)):
        rows = [(0, at + 1, scene.tokens[at], scene.shift)]
        if text is not None:
            rows.append((1, place + 1, text[place], 0))
            place += 1
        step = decode(*rows)
        out = forward.run(step, [])
        mx.eval([*forward.state(), out])
        by_key = dict(zip(step.keys, out, strict=False))
        got.append(by_key[0][None])
        if text is not None:
            beside.append(by_key[1])
    return mx.concatenate(got), beside


def close(got: mx.array, expected: mx.array, within: float = 2e-4) -> None:
    scale = float(mx.abs(expected).max())
    assert float(mx.abs(got - expected).max()) <= within * scale


@pytest.fixture(scope="module")
def seen() -> dict[str, tuple[Scene, mx.array]]:
    found = {}
    for name, family in FAMILIES.items():
        of = scene(family)
        found[name] = of, reference_logits(family, family.model(), of)
    return found


@pytest.mark.parametrize(("name", "way"), every_other(CASES))
def test_logits_are_those_of_mlx_vlm_wherever_the_prompt_is_cut(seen, name: str, way: str) -> None:
    family = FAMILIES[name]
    of, expected = seen[name]
    for cuts in ([], [5, 20, 33, 40]):
        forward = WAYS[way](family.model(), family)
        assert isinstance(forward, KINDS[way])
        got, _ = logits_of(forward, of, cuts)
        close(got, expected)


@pytest.mark.parametrize(("name", "way"), every_other(CASES, 1))
def test_a_text_beside_pictures_has_the_logits_that_it_has_alone(seen, name: str, way: str) -> None:
    family = FAMILIES[name]
    of, expected = seen[name]
    text = [int(t) for t in np.random.default_rng(5).integers(10, 250, 14)]
    model = family.model()
    alone = model(mx.array([text]))[0]
    got, beside = logits_of(WAYS[way](model, family), of, [12, 30], text)
    close(got, expected)
    for place, logits in enumerate(beside, 3):
        close(logits, alone[place])


def test_axes_of_pairs_are_those_of_transformers() -> None:
    blocks = MRope((2, 3, 3), interleaved=False).axes(8)
    assert blocks.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    interleaved = MRope((4, 2, 2), interleaved=True).axes(8)
    assert interleaved.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


def wide(family: SeeingFamily) -> SeeingFamily:
    """The family with heads of a size that kernels are made for."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 3}
    own = family.config.get("text_config", family.config) | sizes
    mrope = family.mrope
    if mrope is not None:
        sections = (12, 10, 10) if mrope.interleaved else (8, 12, 12)
        mrope = MRope(sections, mrope.interleaved)
        own |= {"rope_scaling": own["rope_scaling"] | {"mrope_section": list(sections)}}
    config = family.config | {"text_config": own} if "text_config" in family.config else own
    return replace(family, config=config, mrope=mrope)


@pytest.mark.skipif(
    mx.default_device().type != mx.gpu or mx.metal.is_available(), reason="needs an NVIDIA GPU"
)
@pytest.mark.parametrize("name", ["smolvlm", "qwen2_5_vl", "qwen3_vl"])
def test_the_fused_decoder_of_a_card_shows_pictures(name: str) -> None:
    family = wide(FAMILIES[name])
    of = scene(family, grids=((16, 20), (9, 7)), following=20)
    model = family.model(mx.bfloat16)
    exact = family.model(mx.bfloat16)
    exact.set_dtype(mx.float32)
    expected = reference_logits(family, exact, of)
    forward = choose(model, PAGE, vision=family)
    assert forward.kind == "fused"
    for cuts in ([], [100, 250, 330]):
        got, _ = logits_of(forward, of, cuts, prompt(60))
        close(got.astype(mx.float32), expected, within=5e-2)
        for key in (0, 1):
            forward.forget(key)


GEMMA = SeeingFamily(
    BASE
    | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
    },
    "",
)
"""Pictures are longer than its windows."""


def bidirectional_logits(model: nn.Module, of: Scene, windowed: bool) -> mx.array:
    """The logits with masks as transformers builds them. Gemma 3's: causal and in the window, or
    within a run. Gemma 4's (`windowed`): causal; in layers with windows, causal or within a run,
    and in the window."""
    body = model.model
    scale = body.norm.weight.size**0.5
    hidden = body.embed_tokens(mx.array([of.tokens]))
    hidden[0, mx.array(np.concatenate(of.places))] = mx.concatenate([f.rows for f in of.features])
    hidden = hidden * scale
    here = np.arange(len(of.tokens))
    group = np.full(len(here), -1)
    for number, places in enumerate(of.places):
        group[places] = number
    same = (group[:, None] == group) & (group[:, None] >= 0)
    causal = here <= here[:, None]
    for number, layer in enumerate(body.layers):
        near = (number % 2 == 1) | (here > here[:, None] - 12)
        seen = (causal & near) | same
        if windowed:
            seen = causal if number % 2 == 1 else (causal | same) & near
        hidden = layer(hidden, mx.array(seen), None)
    logits: mx.array = model.lm_head(body.norm(hidden))[0]
    return logits


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("way", ["chosen", "ragged", "separate", "gathered", "fused", "steps"])
def test_tokens_of_a_picture_see_all_of_it_where_the_family_wants_it(
    way: str, windowed: bool
) -> None:
    of = scene(GEMMA)
    expected = bidirectional_logits(GEMMA.model(), of, windowed)
    for cuts in ([], [5, 7, 33]):
        forward = WAYS[way](GEMMA.model(), GEMMA)
        got, _ = logits_of(forward, of, cuts, whole=True, windowed=windowed)
        close(got, expected)


def test_rows_that_are_run_alone_refuse_pictures_that_see_ahead() -> None:
    of = scene(GEMMA)
    with pytest.raises(GenerationFailed, match="whole picture"):
        logits_of(AloneForward(GEMMA.model(), GEMMA), of, [], whole=True)

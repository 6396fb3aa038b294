"""Steps of rows alone through mlx-lm's modules, compiled, with kernels that `mx.compile` can go
through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from devices.portable import Replayed, Traceable, TraceableWriter, plainly
from engine.rig import HandRig, alone, prompt
from mlx import nn
from mlx_lm.models import olmo2
from tiny_models import FAMILIES, make_tiny_model, random_model

from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.likeness import distance
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.execution import compiled, running
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.compiled import STEPS_BEFORE_COMPILING, Kinds
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward
from mlx_manager.mlx_server.execution.module.separate import SeparateForward
from mlx_manager.mlx_server.execution.running import padded_rows
from mlx_manager.mlx_server.execution.select import choose

PAGE = 16


@pytest.fixture(autouse=True)
def _narrow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of these tests read all of a table."""
    monkeypatch.setattr(running, "WIDTHS", (8, 64))


def not_fused(*_: Any) -> Unsupported:
    return Unsupported("to see what the module does")


class Watched:
    """`Replayed`, of which all that have been made are known."""

    def __init__(self, kind: Callable[..., Any] = Replayed) -> None:
        self._kind = kind
        self.made: list[Any] = []

    def __call__(self, function: Callable[..., Any]) -> Any:
        self.made.append(self._kind(function))
        return self.made[-1]


def chosen(model: nn.Module, page_size: int, compile: Callable[..., Any]) -> Forward:
    return choose(
        model,
        page_size,
        kernels=Traceable,
        compile=compile,
        writers=TraceableWriter,
        deltas=not_fused,
        shorts=not_fused,
    )


def tiny(family: str) -> nn.Module:
    return random_model({"model_type": family, **FAMILIES[family]}, seed=0, dtype=mx.float32)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        # Windows, sinks and experts.
        ("gpt_oss", "ragged"),
        # States beside pages in the same layer.
        ("falcon_h1", "separate"),
    ],
)
async def test_rows_of_compiled_steps_draw_what_each_draws_alone(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "STEPS_BEFORE_COMPILING", 2)
    folder, watch = make_tiny_model(tmp_path / "m", family), Watched()
    how = {"choose": partial(chosen, compile=watch), "prefill_chunk": 48, "page_size": PAGE}
    async with HandRig(folder, **how) as rig:
        assert (rig.forward.kind, rig.forward.looks_ahead) == (kind, True)
        rows = []
        for i, length in enumerate([3, 40, 17, 60]):
            rows.append((prompt(length, i + 1), 10 + 6 * i))
            rig.submit(*rows[-1])
            rig.step(6)
        rig.run()
        for row, (tokens, limit) in zip(rig._submitted, rows, strict=True):
            assert row.tokens == alone(rig.model, tokens, limit, row.tokens)
        assert rig.engine.stats().pages_held == 0
    assert len(watch.made) >= 2
    assert sum(each.times for each in watch.made) > 20


async def test_a_kind_of_step_is_compiled_when_it_has_come_often(tmp_path: Path) -> None:
    folder, watch = make_tiny_model(tmp_path / "m", "olmo2"), Watched()
    how = {"choose": partial(chosen, compile=watch), "page_size": PAGE}
    async with HandRig(folder, **how) as rig:
        # What has been compiled to be compared was of two rows.
        assert [each.times for each in watch.made] == [2]
        steps = STEPS_BEFORE_COMPILING + 20
        row = rig.submit(prompt(7), steps + 1)
        rig.run()
        assert row.tokens == alone(rig.model, prompt(7), steps + 1, row.tokens)
    assert [each.times for each in watch.made] == [2, 20]


class Walk:
    """Two forwards of one model, given the same steps."""

    def __init__(self, family: str, kind: type, compile: Callable[..., Any]) -> None:
        self.watch = Watched(compile)
        self.forwards = [chosen(tiny(family), PAGE, how) for how in (plainly, self.watch)]
        for forward in self.forwards:
            assert type(forward) is kind
            for store in forward.stores:
                store.resize(32)
        self._tables = {key: PageTable(list(range(8 * key, 8 * key + 8))) for key in range(4)}
        self._lengths: dict[int, int] = {}

    def join(self, key: int, length: int) -> None:
        self._lengths[key] = length
        span = Span(self._tables[key], length, length)
        self._alike(lambda f: f.run(None, [Chunk(key, span, prompt(length, key + 1), True)]))

    def leave(self, key: int) -> None:
        del self._lengths[key]
        for forward in self.forwards:
            forward.forget(key)

    def step(self, number: int) -> None:
        keys = [*self._lengths]
        for key in keys:
            self._lengths[key] += 1
        lengths = [self._lengths[key] for key in keys]

        def run(forward: Forward) -> mx.array:
            order = forward.order(keys, lengths)
            tokens = mx.array([(13 * number + 7 * keys[i]) % 200 for i in order], mx.uint32)
            mine, sees = [keys[i] for i in order], [lengths[i] for i in order]
            decode = Decode(mine, [self._tables[key] for key in mine], sees, tokens)
            return forward.run(decode, [])[: len(keys)]

        self._alike(run)

    def _alike(self, run: Callable[[Forward], mx.array]) -> None:
        found = [[run(forward), *forward.state()] for forward in self.forwards]
        for mine, theirs in zip(*found, strict=True):
            np.testing.assert_allclose(np.array(mine), np.array(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("olmo3", RaggedForward),
        # Layers that have others' keys and values.
        ("gemma3n", RaggedForward),
        # States in layers of their own.
        ("nemotron_h", SeparateForward),
    ],
)
def test_compiled_steps_give_and_keep_what_plain_ones_do(
    family: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "STEPS_BEFORE_COMPILING", 2)
    walk = Walk(family, kind, Replayed)
    walk.join(0, 5)
    walk.join(1, 31)
    for number in range(12):
        if number == 4:
            walk.join(2, 18)
        if number == 8:
            walk.leave(0)
        walk.step(number)
    # While it was compared; two, three, and two others.
    assert sum(each.times for each in walk.watch.made) == 2 + 2 + 2 + 4


@pytest.mark.skipif(mx.default_device().type != mx.gpu, reason="needs a GPU")
@pytest.mark.parametrize("family", ["olmo3", "nemotron_h", "mamba2"])
def test_steps_that_a_gpu_compiles_give_what_plain_ones_do(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "STEPS_BEFORE_COMPILING", 2)
    wide = {"head_dim": 64} if family != "mamba2" else {}
    config = {"model_type": family, **FAMILIES[family], **wide}
    watch, size = Watched(mx.compile), 32
    forwards = [
        choose(random_model(config, seed=0, dtype=mx.bfloat16), size, compile=how)
        for how in (plainly, watch)
    ]
    assert all(isinstance(each, RaggedForward | SeparateForward) for each in forwards)
    assert all(forward.looks_ahead for forward in forwards)
    for forward in forwards:
        for store in forward.stores:
            store.resize(16)
    tables, lengths = [PageTable([0, 2, 4, 6]), PageTable([1, 3, 5, 7])], [5, 31]
    for step in range(40):
        found = []
        for forward in forwards:
            if not step:
                chunks = [
                    Chunk(key, Span(tables[key], n, n), prompt(n, key + 1), True)
                    for key, n in enumerate(lengths)
                ]
                found.append(forward.run(None, chunks))
            else:
                tokens = mx.array([13 * step % 200, 17 * step % 200], mx.uint32)
                sees = [n + step for n in lengths]
                found.append(forward.run(Decode([0, 1], tables, sees, tokens), []))
            mx.eval(found[-1], forward.state())
        for row in range(2):
            assert distance(found[1][row], found[0][row]) < 5e-2
    assert watch.made


class Counting(olmo2.LlamaModel):  # type: ignore[misc]
    """Looks at what it computes."""

    def __call__(self, *args: Any, **how: Any) -> mx.array:
        found = super().__call__(*args, **how)
        return found if found[0, 0, 0].item() < 1e9 else -found


async def test_a_module_that_looks_at_its_numbers_is_served_and_not_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "STEPS_BEFORE_COMPILING", 2)
    folder, watch = make_tiny_model(tmp_path / "m", "olmo2"), Watched(mx.compile)

    def looking(model: nn.Module, page_size: int) -> Forward:
        model.model.__class__ = Counting
        return chosen(model, page_size, watch)

    with caplog.at_level(logging.INFO):
        async with HandRig(folder, choose=looking, page_size=PAGE) as rig:
            assert (rig.forward.kind, rig.forward.looks_ahead) == ("ragged", True)
            row = rig.submit(prompt(20), 12)
            rig.run()
            assert row.tokens == alone(rig.model, prompt(20), 12, row.tokens)
    assert len(watch.made) == 1
    assert caplog.text.count("steps are not compiled") == 1


class Stale(Replayed):
    """Gives what it has given first."""

    def __call__(self, *given: Any) -> Any:
        if not self.times:
            self._first = super().__call__(*given)
        return self._first


class Off(Replayed):
    def __call__(self, *given: Any) -> Any:
        logits, *others = super().__call__(*given)
        return [logits * 1.5, *others]


class Unfinished(Replayed):
    """Leaves what is kept as it is."""

    def __call__(self, *given: Any) -> Any:
        *others, _, hidden = super().__call__(*given)
        return [*others, given[-1], hidden]


@pytest.mark.parametrize("wrong", [Stale, Off, Unfinished])
def test_compiled_steps_that_are_wrong_are_not_used(
    wrong: type[Replayed], caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watched(wrong)
    with caplog.at_level(logging.INFO):
        forward = chosen(tiny("falcon_h1"), PAGE, watch)
    assert isinstance(forward, SeparateForward)
    assert forward.looks_ahead
    assert forward.rows is not None
    assert not forward.rows.kinds.compiles
    assert len(watch.made) == 1
    assert "steps are not compiled: its logits differ" in caplog.text


def test_a_kind_that_cannot_be_compiled_is_the_last_that_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "STEPS_BEFORE_COMPILING", 1)
    tried = []

    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            tried.append(arrays)
            raise ValueError("it looks at its numbers")

        return run

    kinds = Kinds(compile)
    for kind in "aabbaabb":
        assert kinds.run(kind, lambda x: x + 1, 1) == 2
    assert len(tried) == 1
    assert not kinds.compiles


def test_rows_are_padded_to_few_sizes() -> None:
    assert [padded_rows(rows) for rows in (1, 5, 128, 129, 300)] == [1, 6, 128, 256, 384]

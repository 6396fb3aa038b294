"""Choice of the way of running a model that is right on this machine, by comparing logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_manager.mlx_server.devices import attention as gpu
from mlx_manager.mlx_server.devices.attention import (
    BuildKernels,
    BuildLatents,
    BuildWriter,
    KernelSet,
)
from mlx_manager.mlx_server.devices.cpu.delta import compute_chunks
from mlx_manager.mlx_server.devices.cuda.linear_attention import delta as recurrent
from mlx_manager.mlx_server.devices.cuda.linear_attention import short
from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import BuildDelta
from mlx_manager.mlx_server.devices.cuda.linear_attention.short import BuildShort
from mlx_manager.mlx_server.devices.cuda.mapped import carrier
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.likeness import (
    MARGIN,
    carries_on,
    difference,
    distance,
    may_stray,
)
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.sampling import every_way
from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.execution.alone import AloneForward
from mlx_manager.mlx_server.execution.attention.paged import Reading, Span
from mlx_manager.mlx_server.execution.caches import kept_in, shapes_of
from mlx_manager.mlx_server.execution.compiled import WRONG, Compile
from mlx_manager.mlx_server.execution.decoder.check import check
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.forward import FEW, FusedForward
from mlx_manager.mlx_server.execution.decoder.joined import join
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward, NotApplicable
from mlx_manager.mlx_server.execution.module.over_pages import GATHERING, OverPages
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward
from mlx_manager.mlx_server.execution.module.separate import SeparateForward
from mlx_manager.mlx_server.execution.module.steps import ModuleSteps
from mlx_manager.mlx_server.execution.spec.decoder import attention_shapes
from mlx_manager.mlx_server.utils.progress import Doing, counted, unheard

log = logging.getLogger(__name__)


class Choice(Protocol):
    """Function that chooses the way of running a model, in pages of so many tokens. doing: told
    what is begun."""

    def __call__(self, model: nn.Module, page_size: int, *, doing: Doing = unheard) -> Forward: ...


# Steps of running rows that are compared. Where steps are compiled, the first of two rows is not,
# the second is, the third repeats the second, and the last, of one row, is not.
STEPS = 4


@dataclass(slots=True)
class Reference:
    """Two sequences, each with the length of its prompt, and the model's own logits for them.

    noise: the distance of the model's logits from its own when it reads a token at a time; None
    until measured.
    """

    model: nn.Module
    page_size: int
    texts: list[tuple[list[int], int]]
    logits: list[list[mx.array]]
    noise: float | None = None

    @classmethod
    def of(cls, model: nn.Module, page_size: int) -> Reference:
        texts = _texts(page_size)
        logits: list[list[mx.array]] = []
        try:
            for text, n in texts:
                logits.append(_alone(model, text, n))
        except WRONG as error:
            raise ModelNotSupported(f"This model does not run on this machine: {error}") from error
        if all(_has_no_number(each) for text in logits for each in text):
            raise ModelNotSupported(
                "What this model computes is no number (NaN), whatever it reads: its weights are "
                "damaged, or too large for the precision that they are in."
            )
        return cls(model, page_size, texts, logits)

    def disagreement(self, forward: Forward) -> str | None:
        """Return a message that says how `forward` differs from the model, or None if it does
        not."""
        distances = self._distances(run_both(forward, self.texts, self.page_size))
        first = self.logits[0][0]
        # Half precision rounds differently in products of different shapes.
        allowed = 2e-3 if first.dtype == mx.float32 else 5e-2
        strays = may_stray(self.model, first)
        rough = strays or carries_on(self.model, first)
        if rough and max(distances) > allowed:
            if self.noise is None:
                self.noise = self._from_itself()
            allowed = max(allowed, MARGIN * self.noise)
        wrong = difference(distances, allowed, strays=strays)
        return wrong and f"its logits differ from the model's own {wrong}"

    def _from_itself(self) -> float:
        """Return the distance of the model's logits from its own when it reads a token at a
        time."""
        again = []
        for text, n in self.texts:
            again.append(_alone(self.model, text, 1)[n - 1 :])
        return max(self._distances(again))

    def _distances(self, got: list[list[mx.array]]) -> list[float]:
        both = zip(got, self.logits, strict=True)
        return [distance(*pair) for mine, own in both for pair in zip(mine, own, strict=False)]


def choose(  # noqa: PLR0917
    model: nn.Module,
    page_size: int,
    kernels: BuildKernels = gpu.build,
    compile: Compile = mx.compile,
    deltas: BuildDelta = recurrent.build,
    writers: BuildWriter = gpu.build_writer,
    latents: BuildLatents = gpu.build_latents,
    shorts: BuildShort = short.build,
    *,
    doing: Doing = unheard,
) -> Forward:
    """Return the first way of running `model` whose logits are those of its own forward pass.

    kernels, deltas, writers, latents, shorts: builders of a GPU's kernels; a CPU has none. compile:
    compiles steps, where there are kernels. doing: told what is begun.

    Raises:
        ModelNotSupported: the model's own pass fails on this machine, or gives no numbers.
    """
    doing("it is run as it is, to compare with")
    compute_chunks(model)
    reference = Reference.of(model, page_size)
    built = KernelSet(kernels, build_writer=writers)
    build = partial(
        FusedDecoder.build,
        model,
        page_size,
        built.find,
        compile=compile,
        deltas=deltas,
        latents=latents,
        shorts=shorts,
    )
    forward = _first_right(model, built, build, reference, compile, doing)
    if forward.looks_ahead or mx.default_device() == mx.gpu:
        # Sampling kernels are compiled and checked here, not in the step of the first row that
        # draws.
        doing("kernels that draw tokens are checked")
        for drawn in every_way(mx.stack(reference.logits[0][:2])):
            mx.eval(drawn)
        carrier()
    return forward


def _first_right(  # noqa: PLR0917
    model: nn.Module,
    built: KernelSet,
    build: Callable[[], FusedDecoder | Unsupported],
    reference: Reference,
    compile: Compile,
    doing: Doing,
) -> Forward:
    page_size = reference.page_size
    if mx.default_device() == mx.gpu:
        shapes = list(attention_shapes(model, page_size))
        for shape in counted(doing, "kernels for prompts are checked", shapes):
            built.chunks(shape)
    over = partial(_over_pages, model, page_size, compile)
    others: list[Callable[[], Forward]] = [
        partial(over, Reading.PAGES, built),
        partial(over, Reading.HANDED_ON, built),
        lambda: join(model, page_size),
        partial(over, Reading.PAGES, None),
        partial(over, Reading.HANDED_ON, None),
        *(
            partial(over, reading, kernels)
            for reading in (Reading.GATHERED, Reading.GROUPED)
            for kernels in (built, None)
        ),
    ]
    ways = [
        partial(_fused, model, built, build, reference, doing),
        *(partial(_compared, make, reference) for make in others),
    ]
    name, reasons = type(model).__module__, []
    for way in counted(doing, "a way to run it is compared", ways):
        try:
            forward = way()
        except (NotApplicable, *WRONG) as error:
            log.debug("%s: %s", name, error)
            built.order.forget()
            reasons.append(str(error))
            continue
        if isinstance(forward, RaggedForward) and forward.looks_ahead:
            log.info("%s: steps are not fused: %s", name, reasons[0])
        for store in forward.stores:
            store.resize(0)
        return forward
    log.warning(
        "%s cannot be batched: its rows are computed one at a time (%s)",
        name,
        "; ".join(dict.fromkeys(reasons)),
    )
    return AloneForward(model)


def _over_pages(
    model: nn.Module,
    page_size: int,
    compile: Compile,
    reading: Reading,
    kernels: KernelSet | None,
) -> RaggedForward | SeparateForward:
    """Return the module over pages: all tokens in one pass if all that layers keep is on pages and
    attention reads it there, else rows and chunks apart.

    Raises:
        NotApplicable: pages cannot hold what the module's layers keep.
    """
    if reading not in GATHERING:
        if None not in shapes_of(model):
            return RaggedForward(model, page_size, reading, kernels, compile)
        if reading is Reading.HANDED_ON:
            raise NotApplicable("layers that keep another state hand nothing on")
    return SeparateForward(model, page_size, reading, kernels, compile)


def _compared(make: Callable[[], Forward], reference: Reference) -> Forward:
    """Return the forward that `make` builds, compared with the reference.

    Raises:
        NotApplicable: the forward's logits differ from the model's, or a layer's cache is not read
            by attention over pages.
    """
    forward = make()
    rows = forward.rows if isinstance(forward, OverPages) else None
    disagreement = _disagreement(forward, rows, reference)
    layers = forward.layers if isinstance(forward, OverPages) else ()
    if disagreement is None and any(layer.unread for layer in layers):
        # An example is an indexer, whose choice matters only far into a text.
        disagreement = "what a layer keeps is not read by attention over pages"
    if disagreement is None:
        return forward
    if forward.kind == "fused":
        log.warning("%s: not fused: %s", type(reference.model).__module__, disagreement)
    raise NotApplicable(f"not {forward.kind}: {disagreement}")


def _disagreement(forward: Forward, rows: ModuleSteps | None, reference: Reference) -> str | None:
    """Return a message that says how `forward` differs from the model, or None if it does not.

    Steps of rows alone (`rows`) are compared compiled, too. If compiling makes the difference,
    these steps are not compiled from now on.
    """
    if rows is None:
        return reference.disagreement(forward)
    kinds = rows.kinds
    kinds.early = True
    try:
        wrong = reference.disagreement(forward)
    except WRONG as error:
        if not kinds.compiled:
            raise
        wrong = str(error)
    kinds.early, compiled = False, kinds.compiled
    # Serving brings other rows: none of the compared kinds needs to be kept.
    kinds.forget()
    if wrong is None or not compiled:
        return wrong
    kinds.give_up()
    for key in range(len(reference.texts)):
        forward.forget(key)
    forward.abandon()
    for store in forward.stores:
        store.resize(0)
    still_wrong = reference.disagreement(forward)
    if still_wrong is None:
        log.info("%s: steps are not compiled: %s", type(reference.model).__module__, wrong)
    return still_wrong


def _fused(
    model: nn.Module,
    kernels: KernelSet,
    build: Callable[[], FusedDecoder | Unsupported],
    reference: Reference,
    doing: Doing,
) -> Forward:
    """Return the fused decoder over a GPU's kernels.

    Raises:
        NotApplicable: there is no fused decoder for the model, or its logits are wrong.
    """
    size = reference.page_size
    decoder = build()
    if isinstance(decoder, Unsupported):
        raise NotApplicable(decoder.reason)
    fused = FusedForward(decoder.stores(size, kernels), decoder, size, kernels.order)
    try:
        wrong = check(decoder, model, size, doing=doing)
        if wrong is None:
            wrong = reference.disagreement(fused)
        if wrong is None:
            fused.warm(doing)
    except WRONG as error:
        wrong = str(error)
    if wrong is not None:
        log.warning("%s: the fused decoder is not used: %s", type(model).__module__, wrong)
        raise NotApplicable(wrong)
    return fused


def _texts(page_size: int) -> list[tuple[list[int], int]]:
    """Return two sequences to compare by, each with the length of its prompt: one is long enough
    for kernels of chunks and of many rows, and one is not."""
    prompts = (page_size + FEW[-1] + 5, page_size // 2 + 3)
    return [
        ([3 + (7 * i + 13 * j) % 50 for j in range(n + STEPS)], n) for i, n in enumerate(prompts)
    ]


def run_both(
    forward: Forward, both: list[tuple[list[int], int]], page_size: int
) -> list[list[mx.array]]:
    """Return the logits of two sequences through `forward`, with joins, mixed chunks and a
    leave."""
    texts = [text for text, _ in both]
    lengths = [prompt for _, prompt in both]
    pages = [-(-len(text) // page_size) for text in texts]
    for store in forward.stores:
        store.resize(sum(pages))
    # The pages are handed out backwards, so that no table is a plain slice.
    order = list(range(sum(pages)))[::-1]
    tables = [PageTable(order[: pages[0]]), PageTable(order[pages[0] :])]
    a, b = lengths
    got: list[list[mx.array]] = [[], []]
    half = max(1, page_size // 2)
    first = Chunk(0, Span(tables[0], half, half), texts[0][:half], False)
    logits = forward.run(None, [first])
    mx.eval([*forward.state(), logits])
    last = [
        Chunk(0, Span(tables[0], a, a - half), texts[0][half:a], True),
        Chunk(1, Span(tables[1], b, b), texts[1][:b], True),
    ]
    # A forward that makes a pass of each chunk anyway gets one chunk a run, evaluated before the
    # next; the others get both chunks at once.
    runs = [[chunk] for chunk in last] if forward.kind == "separate" else [last]
    for chunks in runs:
        logits = forward.run(None, chunks)
        mx.eval([*forward.state(), logits])
        for i, chunk in enumerate(chunks):
            got[chunk.key].append(logits[i])
    for step in range(STEPS):
        # The second row leaves before the last step.
        rows = [0, 1] if step < STEPS - 1 else [0]
        keys = [rows[i] for i in forward.order(rows, [lengths[r] + step + 1 for r in rows])]
        tokens = mx.array([texts[k][lengths[k] + step] for k in keys], mx.uint32)
        ends = [lengths[k] + step + 1 for k in keys]
        decode = Decode(keys, [tables[k] for k in keys], ends, tokens)
        logits = forward.run(decode, [])
        mx.eval([*forward.state(), logits])
        for i, k in enumerate(keys):
            got[k].append(logits[i])
        if step == STEPS - 2:
            forward.forget(1)
    forward.forget(0)
    return got


def _alone(model: nn.Module, text: list[int], prompt: int) -> list[mx.array]:
    caches = make_prompt_cache(model)
    logits: list[mx.array] = []
    for tokens in (text[:prompt], *([token] for token in text[prompt:])):
        logits.append(model(mx.array([tokens], mx.int32), cache=caches)[0, -1])
        mx.eval([*kept_in(caches), logits[-1]])
    return logits


def _has_no_number(logits: mx.array) -> bool:
    """Return whether some logit is NaN. The host looks: on a GPU, MLX would compile a kernel for
    it."""
    return bool(np.isnan(np.array(logits.astype(mx.float32))).any())

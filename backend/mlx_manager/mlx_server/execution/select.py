"""Choice of the way of running a model that is right on this machine, by comparing logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.attention import kinds as attention
from mlx_manager.mlx_server.devices.attention.kernel_set import (
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
from mlx_manager.mlx_server.engine.sampling import every_way
from mlx_manager.mlx_server.execution.alone import AloneForward
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess
from mlx_manager.mlx_server.execution.caches import shapes_of
from mlx_manager.mlx_server.execution.compiled import WRONG, Compile
from mlx_manager.mlx_server.execution.decoder.check import check
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.forward import FusedForward
from mlx_manager.mlx_server.execution.decoder.joined import join
from mlx_manager.mlx_server.execution.forward import Forward, NotApplicable
from mlx_manager.mlx_server.execution.images import VisionTraits
from mlx_manager.mlx_server.execution.module.over_pages import GATHERING, OverPages
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward
from mlx_manager.mlx_server.execution.module.separate import SeparateForward
from mlx_manager.mlx_server.execution.module.steps import ModuleSteps
from mlx_manager.mlx_server.execution.reference import Reference
from mlx_manager.mlx_server.execution.spec.decoder import attention_shapes
from mlx_manager.mlx_server.utils.progress import Doing, counted, unheard

log = logging.getLogger(__name__)


class ChooseForward(Protocol):
    """Function that chooses the way of running a model, in pages of so many tokens. doing: told
    what is begun. vision: of a model that sees."""

    def __call__(
        self,
        model: nn.Module,
        page_size: int,
        *,
        doing: Doing = unheard,
        vision: VisionTraits | None = None,
    ) -> Forward: ...


def choose(  # noqa: PLR0917
    model: nn.Module,
    page_size: int,
    kernels: BuildKernels = attention.build,
    compile: Compile = mx.compile,
    deltas: BuildDelta = recurrent.build,
    writers: BuildWriter = attention.build_writer,
    latents: BuildLatents = attention.build_latents,
    shorts: BuildShort = short.build,
    *,
    doing: Doing = unheard,
    vision: VisionTraits | None = None,
) -> Forward:
    """Return the first way of running `model` whose logits are those of its own forward pass.

    kernels, deltas, writers, latents, shorts: builders of a GPU's kernels; a CPU has none. compile:
    compiles steps, where there are kernels. doing: told what is begun. vision: of a model that
    sees; what is compared are texts.

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
        mrope=None if vision is None else vision.mrope,
    )
    forward = _first_right(model, built, build, reference, compile, doing, vision)
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
    vision: VisionTraits | None,
) -> Forward:
    page_size = reference.page_size
    if mx.default_device() == mx.gpu:
        shapes = list(attention_shapes(model, page_size))
        for shape in counted(doing, "kernels for prompts are checked", shapes):
            built.chunks(shape)
    over = partial(_over_pages, model, page_size, compile, vision=vision)
    mrope = None if vision is None else vision.mrope
    others: list[Callable[[], Forward]] = [
        partial(over, KeyAccess.PAGES, built),
        partial(over, KeyAccess.HANDED_ON, built),
        lambda: join(model, page_size, mrope),
        partial(over, KeyAccess.PAGES, None),
        partial(over, KeyAccess.HANDED_ON, None),
        *(
            partial(over, reading, kernels)
            for reading in (KeyAccess.GATHERED, KeyAccess.GROUPED)
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
    return AloneForward(model, vision)


def _over_pages(
    model: nn.Module,
    page_size: int,
    compile: Compile,
    reading: KeyAccess,
    kernels: KernelSet | None,
    *,
    vision: VisionTraits | None,
) -> RaggedForward | SeparateForward:
    """Return the module over pages: all tokens in one pass if all that layers keep is on pages and
    attention reads it there, else rows and chunks apart.

    Raises:
        NotApplicable: pages cannot hold what the module's layers keep.
    """
    if reading not in GATHERING:
        if None not in shapes_of(model):
            return RaggedForward(model, page_size, reading, kernels, compile, vision=vision)
        if reading is KeyAccess.HANDED_ON:
            raise NotApplicable("layers that keep another state hand nothing on")
    return SeparateForward(model, page_size, reading, kernels, compile, vision=vision)


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

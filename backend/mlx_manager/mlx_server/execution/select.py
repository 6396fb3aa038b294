"""Choice of the way of running a model that is right on this machine, by comparing logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Protocol

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.attention import kinds as attention
from mlx_manager.mlx_server.devices.attention.kernel_set import (
    BuildCoded,
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
from mlx_manager.mlx_server.engine.kv.coded import is_coded
from mlx_manager.mlx_server.engine.sampling import every_way
from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.execution.alone import AloneForward
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess
from mlx_manager.mlx_server.execution.caches import shapes_of
from mlx_manager.mlx_server.execution.compiled import WRONG, Compile
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.forward import FusedForward
from mlx_manager.mlx_server.execution.decoder.joined import join
from mlx_manager.mlx_server.execution.forward import Forward, NotApplicable
from mlx_manager.mlx_server.execution.group.crew import Crew
from mlx_manager.mlx_server.execution.group.leader import GroupForward
from mlx_manager.mlx_server.execution.group.plan import (
    Compare,
    Eyes,
    Form,
    Make,
    Order,
    Refer,
    Warm,
)
from mlx_manager.mlx_server.execution.images import VisionTraits
from mlx_manager.mlx_server.execution.module.over_pages import GATHERING, OverPages
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward
from mlx_manager.mlx_server.execution.module.separate import SeparateForward
from mlx_manager.mlx_server.execution.module.steps import ModuleSteps
from mlx_manager.mlx_server.execution.reference import Reference
from mlx_manager.mlx_server.execution.spec.decoder import attention_shapes
from mlx_manager.mlx_server.settings import KVBits
from mlx_manager.mlx_server.utils.progress import Doing, counted, unheard

log = logging.getLogger(__name__)
CODED = 0.1
"""Largest allowed median of the distances of logits over keys and values in 8 bits from the model's
own: those of tiny random models are up to 0.04 away, those of another text 1.4."""


class ChooseForward(Protocol):
    """Function that chooses the way of running a model, in pages of so many tokens. kv_bits: of
    keys and values, see `choose`. doing: told what is begun. vision: of a model that sees."""

    def __call__(
        self,
        model: nn.Module,
        page_size: int,
        *,
        kv_bits: KVBits = 16,
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
    coded: BuildCoded = attention.checked_coded,
    *,
    kv_bits: KVBits = 16,
    doing: Doing = unheard,
    vision: VisionTraits | None = None,
    crew: Crew | None = None,
) -> Forward:
    """Return the first way of running `model` whose logits are those of its own forward pass.

    kernels, deltas, writers, latents, shorts, coded: builders of a GPU's kernels; a CPU has none.
    compile: compiles steps, where there are kernels. kv_bits: 8 for keys and values in 8 bits,
    which MLX's own operations write, and `coded` are kernels for running rows to read. doing: told
    what is begun. vision: of a model that sees; what is compared are texts. crew: the other ranks,
    where the model is one rank's share.

    Raises:
        ModelNotSupported: the model's own pass fails on this machine, or gives no numbers; or its
            keys and values can't be kept in so few bits.
    """
    doing("it is run as it is, to compare with")
    if kv_bits == 8 and crew is not None:
        raise _refused("it is spread over several devices")
    modules = Ways(
        model, page_size, kernels, writers, compile, coded, deltas, latents, shorts, vision
    )
    if crew is not None:
        crew.tell(Refer(page_size))
    reference = Reference.of(model, page_size)
    if kv_bits != 8:
        modules.check_chunks(doing)
    if crew is not None:
        reference.before_more = partial(crew.tell, Refer(page_size, again=True))
    ways = _ways(modules, crew, reference, doing, kv_bits)
    forward = _first_right(model, ways, modules, doing) or _made(modules, crew, "alone")
    if kv_bits == 8:
        doing("its keys and values in 8 bits are compared")
        _keep_in_8_bits(forward, reference, modules.kernels)
    if forward.looks_ahead or mx.default_device() == mx.gpu:
        _draw_once(reference, doing)
    return forward


def _draw_once(reference: Reference, doing: Doing) -> None:
    """Compile and check sampling kernels, which the first row that draws should not wait for."""
    doing("kernels that draw tokens are checked")
    for drawn in every_way(mx.stack(reference.logits[0][:2])):
        mx.eval(drawn)
    carrier()


MODULES = (
    (KeyAccess.PAGES, True),
    (KeyAccess.HANDED_ON, True),
    (KeyAccess.PAGES, False),
    (KeyAccess.HANDED_ON, False),
    (KeyAccess.GATHERED, True),
    (KeyAccess.GATHERED, False),
    (KeyAccess.GROUPED, True),
    (KeyAccess.GROUPED, False),
)
"""Ways of running a module over pages, the fastest first: its reading, and whether by kernels."""


class Ways:
    """Ways of running `model`, one of mlx-lm's, on this machine, in pages of so many tokens.

    build, writers, coded, deltas, latents, shorts: builders of a GPU's kernels. compile: compiles
    steps, where there are kernels. vision: of a model that sees.

    Attributes:
        kernels: those of this model.
    """

    def __init__(  # noqa: PLR0917
        self,
        model: nn.Module,
        page_size: int,
        build: BuildKernels = attention.build,
        writers: BuildWriter = attention.build_writer,
        compile: Compile = mx.compile,
        coded: BuildCoded = attention.checked_coded,
        deltas: BuildDelta = recurrent.build,
        latents: BuildLatents = attention.build_latents,
        shorts: BuildShort = short.build,
        vision: VisionTraits | None = None,
    ) -> None:
        compute_chunks(model)
        self.model = model
        self.page_size = page_size
        self.kernels = KernelSet(build, build_writer=writers, build_coded=coded)
        self.vision = vision
        self._compile = compile
        self._build_decoder = partial(
            FusedDecoder.build,
            model,
            page_size,
            self.kernels.find,
            compile=compile,
            deltas=deltas,
            latents=latents,
            shorts=shorts,
        )

    def check_chunks(self, doing: Doing = unheard) -> None:
        """Check a GPU's kernels for prompts."""
        if mx.default_device() == mx.gpu:
            shapes = list(attention_shapes(self.model, self.page_size))
            for shape in counted(doing, "kernels for prompts are checked", shapes):
                self.kernels.chunks(shape)

    def make(
        self, form: Form, reading: KeyAccess | None = None, by_kernels: bool = False
    ) -> Forward:
        """Return the model in a form; nothing has been compared yet. A module over pages has all
        tokens in one pass if all that layers keep is on pages and attention reads it there
        (`reading`), else rows and chunks apart.

        Raises:
            NotApplicable: there is no such form of this model here.
        """
        mrope = None if self.vision is None else self.vision.mrope
        match form:
            case "fused":
                decoder = self._build_decoder(mrope=mrope)
                if isinstance(decoder, Unsupported):
                    raise NotApplicable(decoder.reason)
                stores = decoder.stores(self.page_size, self.kernels)
                return FusedForward(stores, decoder, self.page_size, self.kernels.order)
            case "joined":
                return join(self.model, self.page_size, mrope)
            case "alone":
                return AloneForward(self.model, self.vision)
        assert reading is not None, "a module over pages is told where attention reads"
        kernels = self.kernels if by_kernels else None
        over: type[RaggedForward | SeparateForward] = SeparateForward
        if reading not in GATHERING:
            if None not in shapes_of(self.model):
                over = RaggedForward
            elif reading is KeyAccess.HANDED_ON:
                raise NotApplicable("layers that keep another state hand nothing on")
        return over(self.model, self.page_size, reading, kernels, self._compile, vision=self.vision)


def _ways(
    modules: Ways, crew: Crew | None, reference: Reference, doing: Doing, kv_bits: KVBits
) -> list[Callable[[], Forward]]:
    """Return the ways of running a model, the fastest first."""
    # Kernels write no codes.
    wanted = [way for way in MODULES if kv_bits != 8 or not way[1]]
    others = [partial(_made, modules, crew, "module", *way) for way in wanted]
    others.insert(0 if kv_bits == 8 else 2, partial(_made, modules, crew, "joined"))
    ways: list[Callable[[], Forward]] = [partial(_compared, make, reference) for make in others]
    if kv_bits != 8:
        ways.insert(0, partial(_fused, modules, crew, reference, doing))
    return ways


def _made(
    modules: Ways,
    crew: Crew | None,
    form: Form,
    reading: KeyAccess | None = None,
    by_kernels: bool = False,
) -> Forward:
    """Return a form of the model, or of rank 0's share with the other ranks following.

    Raises:
        NotApplicable: there is no such form, or some rank has none of its share.
    """
    if crew is None:
        return modules.make(form, reading, by_kernels)
    seen = modules.vision
    eyes = None if seen is None else Eyes(seen.mrope, seen.levels)
    refused = crew.ask(Make(form, eyes, reading, by_kernels))
    inner = modules.make(form, reading, by_kernels)
    if (reason := next(filter(None, refused), None)) is not None:
        raise NotApplicable(reason)
    return GroupForward(inner, crew)


def _first_right(
    model: nn.Module, ways: Sequence[Callable[[], Forward]], modules: Ways, doing: Doing
) -> Forward | None:
    """Return the first of the ways that is right; None if none is."""
    name, reasons = type(model).__module__, []
    for way in counted(doing, "a way to run it is compared", ways):
        try:
            forward = way()
        except (NotApplicable, *WRONG) as error:
            log.debug("%s: %s", name, error)
            modules.kernels.order.forget()
            reasons.append(str(error))
            continue
        inner = forward.inner if isinstance(forward, GroupForward) else forward
        if isinstance(inner, RaggedForward) and forward.looks_ahead:
            log.info("%s: steps are not fused: %s", name, reasons[0])
        for store in forward.stores:
            store.resize(0)
        return forward
    log.warning(
        "%s cannot be batched: its rows are computed one at a time (%s)",
        name,
        "; ".join(dict.fromkeys(reasons)),
    )
    return None


def _keep_in_8_bits(forward: Forward, reference: Reference, readers: KernelSet) -> None:
    """Keep keys and values of a forward that is right in 8 bits from now on.

    Raises:
        ModelNotSupported: it keeps none that can be, or the logits become others.
    """
    if forward.kind == "alone":
        raise _refused("its rows are computed one at a time, over mlx-lm's own caches")
    if not forward.stores:
        raise _refused("its layers keep a state instead of them")
    if not all(is_coded(store.shape) for store in forward.stores):
        raise _refused("what its layers keep is latent vectors, or keys and values of two sizes")
    forward.keep_in_8_bits(readers)
    # Rounding to codes may well send a row through other experts, whatever the precision.
    distances = reference.distances(forward)
    for store in forward.stores:
        store.resize(0)
    if median(distances) > CODED:
        raise _refused(f"its logits change by {median(distances):.2g} (relative; allowed {CODED})")


def _refused(reason: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"This model can't keep its keys and values in 8 bits: {reason}. "
        "It can be served with kv_bits = 16."
    )


def _compared(make: Callable[[], Forward], reference: Reference) -> Forward:
    """Return the forward that `make` builds, compared with the reference.

    Raises:
        NotApplicable: the forward's logits differ from the model's, or a layer's cache is not read
            by attention over pages.
    """
    forward = make()
    module = forward.inner if isinstance(forward, GroupForward) else forward
    rows = module.rows if isinstance(module, OverPages) else None
    disagreement = _disagreement(forward, rows, reference)
    layers = module.layers if isinstance(module, OverPages) else ()
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
    kinds = forward.compiling(rows.kinds) if isinstance(forward, GroupForward) else rows.kinds
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


def _fused(modules: Ways, crew: Crew | None, reference: Reference, doing: Doing) -> Forward:
    """Return the fused decoder over a GPU's kernels.

    Raises:
        NotApplicable: there is no fused decoder for the model, or its logits are wrong.
    """
    model = modules.model
    forward = _made(modules, crew, "fused")
    fused = forward.inner if isinstance(forward, GroupForward) else forward
    assert isinstance(fused, FusedForward)
    # Sums over ranks are in both: all do them together.
    tell: Callable[[Order], None] = (lambda order: None) if crew is None else crew.tell
    try:
        tell(Compare())
        wrong = fused.compare(model, doing)
        if wrong is None:
            wrong = reference.disagreement(forward)
        if wrong is None:
            tell(Warm())
            fused.warm(doing)
    except WRONG as error:
        wrong = str(error)
    if wrong is not None:
        log.warning("%s: the fused decoder is not used: %s", type(model).__module__, wrong)
        raise NotApplicable(wrong)
    return forward

"""The model of a worker: loaded on the MLX thread, within the memory that is granted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from mlx_manager.mlx_server.backends.embedding import EncoderBackend, prepare_encoder
from mlx_manager.mlx_server.backends.text import TextBackend, prepare
from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.devices.group import RankHosts, check_devices, here
from mlx_manager.mlx_server.encoders.encoder import EncoderModel
from mlx_manager.mlx_server.encoders.loading import (
    LoadedEncoder,
    PreparedEncoder,
    load_encoder,
    prepared_encoder,
)
from mlx_manager.mlx_server.encoders.loop import kept_bytes
from mlx_manager.mlx_server.engine.scheduler.step_size import least_working
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.errors import (
    ModelLoadFailed,
    ServerNotReady,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.execution.decoder.packed import multiplies_packed
from mlx_manager.mlx_server.execution.select import choose
from mlx_manager.mlx_server.models.facts import ModelFacts
from mlx_manager.mlx_server.models.loading.draft import (
    PreparedDraft,
    draft_line,
    load_draft,
    prepared_draft,
)
from mlx_manager.mlx_server.models.loading.load import (
    Foresight,
    LoadedModel,
    PreparedText,
    crowded,
    load,
    prepared_text,
    weights_line,
)
from mlx_manager.mlx_server.models.loading.mtp import (
    PreparedHead,
    SharedVocabulary,
    load_head,
    prepared_head,
)
from mlx_manager.mlx_server.models.loading.shards import held
from mlx_manager.mlx_server.text.grammar.sandbox import Sandbox
from mlx_manager.mlx_server.utils.broken import explained
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads
from mlx_manager.mlx_server.utils.memory import (
    Ledger,
    blaming_the_device,
    clear_cache,
    default_limit,
    device_memory,
    device_name,
    set_memory_limit,
    wire,
)
from mlx_manager.mlx_server.workers.hosts import read_hostfile
from mlx_manager.mlx_server.workers.memory import GrantedMemory
from mlx_manager.mlx_server.workers.messages import Doing, GiveBack, Granted, Hello, Prepare
from mlx_manager.mlx_server.workers.process import NO_LOG, LogSettings
from mlx_manager.mlx_server.workers.ranks import Ranks

log = logging.getLogger(__name__)

CLOSING = 5.0
"""Seconds that the MLX thread gets to end what it is doing."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that has been asked for and whose small files have been read. draft: its draft model,
    or its MTP head."""

    asked: Prepare
    prepared: PreparedText | PreparedEncoder
    draft: PreparedDraft | PreparedHead | None = None

    @property
    def draft_bytes(self) -> int:
        """Return the bytes of the draft's files. A model's own head is in the model's files, and
        is left out where there is no room for it."""
        match self.draft:
            case PreparedDraft() as draft:
                return draft.checked.nbytes
            case PreparedHead() as head if head.id != head.of:
                return head.nbytes
        return 0


class Model:
    """The one model of this process, and what it takes: thread, memory, sandbox.

    alone: whether MLX's limit of this process is this model's. log_settings: those of the processes
    of other ranks.

    Attributes:
        backend: what answers; None before the load.
    """

    def __init__(
        self,
        send: Callable[[object], None],
        *,
        alone: bool = True,
        log_settings: LogSettings = NO_LOG,
    ) -> None:
        self.thread = MLXThread()
        self.thread.start()
        self.ledger = Ledger(0)
        self.memory = GrantedMemory(self.ledger, send)
        self.backend: TextBackend | EncoderBackend | None = None
        self._send = send
        self._sandbox = Sandbox()
        self._alone = alone
        self._log_settings = log_settings
        self._ranks: Ranks | None = None
        self._ready: PreparedModel | None = None

    @property
    def served(self) -> TextBackend | EncoderBackend:
        """Return what answers.

        Raises:
            ServerNotReady: it has not been loaded.
        """
        if self.backend is None:
            raise ServerNotReady("The model is not loaded.")
        return self.backend

    @property
    def text(self) -> TextBackend:
        """Return what generates; the server asks no encoder for that."""
        assert isinstance(self.served, TextBackend)
        return self.served

    @property
    def encoder(self) -> EncoderBackend:
        """Return what embeds or ranks; the server asks no other model for that."""
        assert isinstance(self.served, EncoderBackend)
        return self.served

    def hello(self) -> Hello:
        """Return what the device is. On the MLX thread."""
        return Hello(device_name(), device_memory(), default_limit())

    async def prepare(self, asked: Prepare) -> int:
        """Read the small files, while nothing has been asked for yet: nobody makes room for a
        model that can't be loaded. Return the bytes that its weights take.

        Raises:
            ModelLoadFailed: it can't be loaded; the subclasses tell why.
        """
        self.memory.begin(asked.memory)
        self._spread(asked)
        self._ready = await DaemonThreads(1).run(partial(self._prepared, asked))
        return self._needed(self._ready)

    def _needed(self, ready: PreparedModel) -> int:
        """Return the bytes of the weights' files in this memory, the draft model's included."""
        return held(ready.prepared.checked.nbytes, self._ranks) + ready.draft_bytes

    def _spread(self, asked: Prepare) -> None:
        """Start the other ranks' processes, if the model is to run on several devices.

        Raises:
            ModelLoadFailed: there are not as many devices, or processes.
        """
        hosts, name = hosts_of(asked), asked.source.id
        size = len(hosts.hosts)
        if size == 1 or self._ranks is not None:
            return
        if asked.recipe.hostfile is None:
            check_devices(name, size)
        try:
            self._ranks = Ranks(name, hosts, self._log_settings, asked.limits.silence)
        except OSError as error:
            raise ModelLoadFailed(
                f"The processes for {size} devices can't be started for {name}: {error}."
            ) from error
        self._ranks.enlist(asked)

    async def load(self) -> ModelFacts:
        """Load the model that has been prepared, in the memory that is granted for it.

        Raises:
            ModelLoadFailed: it can't be loaded; the subclasses tell why.
            OutOfMemory: there is no room for it now.
        """
        assert self._ready is not None, "it is prepared first"
        begun = perf_counter()
        loaded = await self.thread.call(partial(self._bring, self._ready))
        self._ready = None
        if isinstance(self.backend, TextBackend):
            self._doing("what answers in JSON need is made")
            # Who asks for it hears what is wrong.
            with suppress(UnsupportedParameter):
                await DaemonThreads(1).run(self.backend.make_ahead)
        facts = facts_of(loaded, self.served, perf_counter() - begun)
        if (ranks := self._ranks) is None:
            return facts
        ranks.watch()
        nbytes = facts.nbytes * ranks.size // ranks.copies
        return replace(facts, devices=ranks.size, nbytes=nbytes)

    def broken(self) -> str | None:
        """Return why nothing can be computed here any more; None if it can."""
        if (lost := self.thread.lost_gpu) is not None:
            return f"the GPU takes no more work from it ({lost})"
        if self._ranks is not None and (lost := self._ranks.broken) is not None:
            return lost
        return None if self.thread.alive else "its MLX thread has ended"

    def granted(self, message: Granted) -> None:
        self.memory.granted(message)
        self.thread.post(self.memory.apply)

    def give_back(self, message: GiveBack) -> None:
        self.thread.post(partial(self.memory.give_back, message))

    def drop_prefixes(self) -> int:
        """Return the bytes given back. On the MLX thread."""
        before = self.ledger.used()
        self.served.drop_prefixes()
        clear_cache()
        self.memory.tell()
        return before - self.ledger.used()

    async def close(self) -> None:
        """Fail what is running and free everything."""
        # The MLX thread may wait for more, which nobody grants any more.
        self.memory.granted(Granted(0, 0))
        if self.thread.alive and self.backend is not None:
            closing = asyncio.create_task(self.thread.call(self.backend.close))
            await asyncio.wait([closing], timeout=CLOSING)
        self._sandbox.close()
        if self._ranks is not None:
            self._ranks.close()
        await asyncio.to_thread(self.thread.close, CLOSING)

    def _doing(self, what: str) -> None:
        self._send(Doing(what))

    def _prepared(self, asked: Prepare) -> PreparedModel:
        read = prepared_encoder if is_encoder(asked) else prepared_text
        with explained(asked.source.id):
            found = read(asked.source, asked.limits, asked.recipe, asked.memory, doing=self._doing)
        draft: PreparedDraft | PreparedHead | None = self._prepared_draft(asked, found)
        if draft is None:
            draft = self._prepared_head(asked, found)
        return PreparedModel(asked, found, draft)

    def _prepared_head(
        self, asked: Prepare, prepared: PreparedText | PreparedEncoder
    ) -> PreparedHead | None:
        """Read all of the model's MTP head but its weights; None if it has none, or if none is to
        draft.

        Raises:
            ModelLoadFailed: the head that the owner names can't draft for it.
        """
        name, wanted = asked.source.id, asked.recipe.head
        off = asked.engine.speculation == "off" or asked.recipe.mtp == "off"
        if wanted is None and (off or isinstance(prepared, PreparedEncoder)):
            return None
        try:
            if isinstance(prepared, PreparedEncoder):
                raise ModelLoadFailed("it generates nothing.")
            head = prepared_head(name, prepared.checked, asked.head)
            if head is not None and self._ranks is not None:
                raise ModelLoadFailed("it is spread over devices.")
            if head is not None and asked.recipe.adapter is not None:
                log.info("%s drafts with the MTP head of its base, without its adapter", name)
            return head
        except ModelLoadFailed as error:
            if wanted is None:
                log.warning("%s is loaded without its MTP head: %s", name, error.message)
                return None
            raise ModelLoadFailed(
                f"{wanted} has no MTP head that drafts for {name} (`mtp`): {error.message}"
            ) from error

    def _prepared_draft(
        self, asked: Prepare, prepared: PreparedText | PreparedEncoder
    ) -> PreparedDraft | None:
        """Read all of the draft model but its weights; None if there is none, or if the server's is
        none for this model.

        Raises:
            ModelLoadFailed: the model's own draft model can't draft for it.
        """
        draft, name = asked.draft, asked.source.id
        if draft is None:
            return None
        if isinstance(prepared, PreparedEncoder):
            raise ModelLoadFailed(f"{name} generates nothing: no draft_model can draft for it.")
        try:
            if self._ranks is not None:
                raise ModelLoadFailed(
                    f"{name} is spread over devices: no draft_model drafts for it."
                )
            return prepared_draft(
                name,
                prepared.tokenizer,
                draft.source,
                draft.recipe,
                asked.limits,
                doing=self._doing,
            )
        except ModelLoadFailed as error:
            if draft.required:
                raise
            log.info("%s is loaded without a draft model: %s", name, error)
            return None

    def _bring(self, ready: PreparedModel) -> LoadedModel | LoadedEncoder:
        """Read the weights and make the backend. On the MLX thread, which waits for memory."""
        self.memory.waits = True
        asked, nbytes = ready.asked, self._needed(ready)
        name = asked.source.id
        self._doing("room is made for it")
        # From here on MLX's limit moves with the ledger's.
        if self._alone:
            set_memory_limit(self.ledger.limit)
        if not self.memory.take(nbytes):
            raise crowded(name, nbytes, self.ledger.attainable(), asked.memory)
        try:
            with blaming_the_device(name, self.ledger):
                return self._brought(ready)
        finally:
            if self.backend is None:
                self.ledger.record(weights_line(name), 0)
                self.ledger.record(draft_line(name), 0)
                clear_cache()
            self.memory.waits = False
            self.memory.tell()

    def _brought(self, ready: PreparedModel) -> LoadedModel | LoadedEncoder:
        asked, prepared = ready.asked, ready.prepared
        source, limits, ledger = asked.source, asked.limits, self.ledger
        engine = replace(asked.engine, kv_bits=asked.recipe.kv_bits or asked.engine.kv_bits)
        foresight = Foresight(partial(working_bytes, engine), multiplies_packed)
        loaded: LoadedModel | LoadedEncoder
        match prepared:
            case PreparedEncoder():
                loaded = load_encoder(
                    source,
                    limits,
                    ledger,
                    asked.recipe,
                    foresight=foresight,
                    prepared=prepared,
                    doing=self._doing,
                )
                self.backend = prepare_encoder(
                    loaded, self.thread, engine, ledger, doing=self._doing
                )
            case PreparedText():
                loaded = load(
                    source,
                    limits,
                    ledger,
                    asked.recipe,
                    foresight=foresight,
                    prepared=prepared,
                    beside=ready.draft_bytes,
                    spread=self._ranks,
                    doing=self._doing,
                )
                made = prepare
                if self._ranks is not None:
                    made = partial(prepare, choice=partial(choose, crew=self._ranks))
                self.backend = made(
                    loaded,
                    self.thread,
                    engine,
                    ledger,
                    sandbox=self._sandbox,
                    doing=self._doing,
                    **self._drafting(ready, loaded, foresight),
                )
        if limits.wire_weights:
            wire(loaded.nbytes + ledger.figures().get(draft_line(source.id), 0))
        return loaded

    def _drafting(
        self, ready: PreparedModel, loaded: LoadedModel, foresight: Foresight
    ) -> dict[str, Any]:
        """Return the arguments of `prepare` about what drafts for a model that has been loaded."""
        limits, ledger = ready.asked.limits, self.ledger
        match ready.draft:
            case PreparedDraft() as draft:
                load = partial(load_draft, draft, limits, ledger, foresight, doing=self._doing)
                return {"draft": load}
            case PreparedHead() as head:
                shared, recipe = SharedVocabulary.of(loaded.model), ready.asked.recipe
                load_it = partial(
                    load_head,
                    head,
                    shared,
                    loaded,
                    recipe,
                    limits,
                    ledger=ledger,
                    foresight=foresight,
                    doing=self._doing,
                )
                return {"head": load_it, "named": recipe.head}
        return {}


def is_encoder(asked: Prepare) -> bool:
    return asked.source.kind in ("embedding", "reranker")


def hosts_of(asked: Prepare) -> RankHosts:
    """Return the machines of the devices that the model is spread over. One that only reads has one
    device.

    Raises:
        ModelLoadFailed: its own settings name more for such a model, or its hostfile is wrong.
    """
    own, file = asked.recipe.devices, asked.recipe.hostfile
    if is_encoder(asked):
        if file is None and own in (None, 1):
            return here(1)
        raise ModelLoadFailed(
            f"{asked.source.id} only reads, and such models run on one device; its settings name "
            "more (`devices`, `hostfile`)."
        )
    if file is None:
        return here(own or asked.limits.devices, asked.limits.distributed)
    hosts = read_hostfile(file)
    if own not in (None, len(hosts.hosts)):
        raise ModelLoadFailed(
            f"The settings of {asked.source.id} say `devices = {own}`, and the hostfile {file} has "
            f"{len(hosts.hosts)} hosts."
        )
    return hosts


def working_bytes(limits: EngineLimits, model: Any, context_length: int) -> int:
    """Return the bytes that a model's steps work on at least."""
    if isinstance(model, EncoderModel):
        return kept_bytes(model, context_length)
    return least_working(limits, model)


def facts_of(
    loaded: LoadedModel | LoadedEncoder, backend: TextBackend | EncoderBackend, seconds: float
) -> ModelFacts:
    facts = ModelFacts(
        loaded.id,
        loaded.kind,
        loaded.family,
        loaded.context_length,
        loaded.nbytes,
        loaded.weights,
        backend.tokenizer_info(),
        seconds=seconds,
    )
    if isinstance(loaded, LoadedModel) and isinstance(backend, TextBackend):
        thinks = loaded.adapter.thinks(loaded.tokenizer)
        reads = ("text",) if loaded.vision is None else ("text", "image")
        return replace(
            facts,
            sampling=dict(loaded.sampling),
            thinks=thinks,
            input_modalities=reads,
            draft_model=backend.draft_model,
            mtp=backend.mtp,
        )
    return facts

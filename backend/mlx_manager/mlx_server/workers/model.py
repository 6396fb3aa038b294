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
from mlx_manager.mlx_server.errors import ModelLoadFailed, ServerNotReady, UnsupportedParameter
from mlx_manager.mlx_server.execution.decoder.packed import multiplies_packed
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
from mlx_manager.mlx_server.workers.memory import GrantedMemory
from mlx_manager.mlx_server.workers.messages import Doing, GiveBack, Granted, Hello, Prepare

log = logging.getLogger(__name__)

CLOSING = 5.0
"""Seconds that the MLX thread gets to end what it is doing."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A model that has been asked for and whose small files have been read. draft: its draft
    model."""

    asked: Prepare
    prepared: PreparedText | PreparedEncoder
    draft: PreparedDraft | None = None

    @property
    def draft_bytes(self) -> int:
        return 0 if self.draft is None else self.draft.checked.nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of the weights' files, the draft model's included."""
        return self.prepared.checked.nbytes + self.draft_bytes


class Model:
    """The one model of this process, and what it takes: thread, memory, sandbox.

    alone: whether MLX's limit of this process is this model's.

    Attributes:
        backend: what answers; None before the load.
    """

    def __init__(self, send: Callable[[object], None], *, alone: bool = True) -> None:
        self.thread = MLXThread()
        self.thread.start()
        self.ledger = Ledger(0)
        self.memory = GrantedMemory(self.ledger, send)
        self.backend: TextBackend | EncoderBackend | None = None
        self._send = send
        self._sandbox = Sandbox()
        self._alone = alone
        self._ready: Ready | None = None

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
        self._ready = await DaemonThreads(1).run(partial(self._prepared, asked))
        return self._ready.nbytes

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
        return facts_of(loaded, self.served, perf_counter() - begun)

    def broken(self) -> str | None:
        """Return why nothing can be computed here any more; None if it can."""
        if (lost := self.thread.lost_gpu) is not None:
            return f"the GPU takes no more work from it ({lost})"
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
        await asyncio.to_thread(self.thread.close, CLOSING)

    def _doing(self, what: str) -> None:
        self._send(Doing(what))

    def _prepared(self, asked: Prepare) -> Ready:
        read = prepared_encoder if is_encoder(asked) else prepared_text
        with explained(asked.source.id):
            found = read(asked.source, asked.limits, asked.recipe, asked.memory, doing=self._doing)
        return Ready(asked, found, self._prepared_draft(asked, found))

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

    def _bring(self, ready: Ready) -> LoadedModel | LoadedEncoder:
        """Read the weights and make the backend. On the MLX thread, which waits for memory."""
        self.memory.waits = True
        asked, nbytes = ready.asked, ready.nbytes
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

    def _brought(self, ready: Ready) -> LoadedModel | LoadedEncoder:
        asked, prepared = ready.asked, ready.prepared
        source, limits, engine, ledger = asked.source, asked.limits, asked.engine, self.ledger
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
                    doing=self._doing,
                )
                draft = None
                if ready.draft is not None:
                    draft = partial(
                        load_draft, ready.draft, limits, ledger, foresight, doing=self._doing
                    )
                self.backend = prepare(
                    loaded,
                    self.thread,
                    engine,
                    ledger,
                    sandbox=self._sandbox,
                    draft=draft,
                    doing=self._doing,
                )
        if limits.wire_weights:
            wire(loaded.nbytes + ledger.figures().get(draft_line(source.id), 0))
        return loaded


def is_encoder(asked: Prepare) -> bool:
    return asked.source.kind in ("embedding", "reranker")


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
        )
    return facts

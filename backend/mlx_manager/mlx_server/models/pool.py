"""Which models are in memory: loaded when asked for, kept while there is room, evicted when idle.

What the owner's file says of single models is read here, again whenever somebody asks for it; what
it can't change while a model is loaded takes effect once that model is idle.

Loads run piece by piece on the MLX thread, between the steps of models that are answering. One
load a model, however many ask for it; who asks for a model that does not fit beside those in use
waits for them to be given back, for a while.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import mlx.core as mx

from mlx_manager.mlx_server.config import CatalogSources, PoolLimits
from mlx_manager.mlx_server.core import Kind, Overlay, RowStatus
from mlx_manager.mlx_server.errors import (
    MLXManagerError,
    ModelInUse,
    ModelLoadFailed,
    ModelLoadStalled,
    ModelNotFound,
    OutOfMemory,
    StorageFailed,
)
from mlx_manager.mlx_server.models import hub
from mlx_manager.mlx_server.models.catalog import Catalog, ModelSource, described
from mlx_manager.mlx_server.models.encoder_loading import (
    LoadedEncoder,
    PreparedEncoder,
    checked_encoder,
    loading_encoder,
    prepared_encoder,
)
from mlx_manager.mlx_server.models.kinds import wrong_kind
from mlx_manager.mlx_server.models.loading import (
    NONE,
    Checked,
    Foresight,
    LoadedModel,
    PreparedText,
    check_room,
    checked_text,
    explained,
    loading,
    prepared_text,
    weights_line,
)
from mlx_manager.mlx_server.models.policy import Policy
from mlx_manager.mlx_server.models.rehearsal import Rehearsals
from mlx_manager.mlx_server.models.residents import ModelBackend, Resident, Residents
from mlx_manager.mlx_server.models.settings import NEVER, Recipe, Wishes, read_models_file
from mlx_manager.mlx_server.models.status import ModelStatus, Reloaded, Unloaded
from mlx_manager.mlx_server.models.streams import on_stream, side_stream
from mlx_manager.mlx_server.models.tokenizers import Tokenizers
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads, Job
from mlx_manager.mlx_server.utils.memory import (
    Ledger,
    Relief,
    clear_cache,
    default_limit,
    device_memory,
    gigabytes,
    in_words,
    out_of_reach,
    set_memory_limit,
    wire,
    working_line,
)
from mlx_manager.mlx_server.utils.pressure import Pressure, is_told
from mlx_manager.mlx_server.utils.steps import (
    BROKEN,
    Aside,
    Done,
    Steps,
    advance,
    beside,
    whereabouts,
)
from mlx_manager.mlx_server.utils.text import sized

T = TypeVar("T")
P = ParamSpec("P")
PATIENCE = 60.0
"""Seconds that a load waits for models in use to be given back."""
LOOK_AT_MEMORY = 10.0
"""Seconds between two looks at how short of memory a Mac is, while nobody is answered."""
DISK_AT_ONCE = 8
"""Threads that look at the disk for the catalog: one that hangs must not keep the others from it,
nor the program from its end."""
QUIET = 2.0
"""Seconds without a request after which something is made ahead; most of it takes less than one."""
SLOW_PIECE = 0.02
"""Seconds of a load in one go, on the MLX thread, that the log tells of: others waited for it."""
REHEARSED_BESIDES = 2**30
"""Bytes, and an eighth of the weights', for what steps work on when a model is loaded by a process
of its own."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """How models of a kind are loaded.

    check: raises what is wrong with a model's files. prepare: reads all but the weights, or raises
    that. tokenizer: reads it, or has it.
    """

    check: Callable[[ModelSource, PoolLimits, Recipe], Checked]
    prepare: Callable[..., PreparedText | PreparedEncoder]
    loading: Callable[..., Steps[LoadedModel | LoadedEncoder]]
    tokenizer: Callable[[Tokenizers, Path], object]


TEXT = Way(checked_text, prepared_text, loading, Tokenizers.text)
ENCODER = Way(
    lambda source, _, recipe: checked_encoder(source, recipe),
    prepared_encoder,
    loading_encoder,
    Tokenizers.encoder,
)


def way_of(source: ModelSource) -> Way:
    return ENCODER if source.kind in ("embedding", "reranker") else TEXT


class Thread(Protocol):
    """The MLX thread: everything that touches arrays runs there."""

    async def call(self, function: Callable[[], T]) -> T: ...

    def after_step(self, function: Callable[[], None]) -> None: ...


class ModelPoolManager:
    """Hands out loaded models. Its methods run in asyncio, `_on_mlx` ones on the MLX thread.

    To make one reads the disk, as the catalog does.
    make_backend: its steps are run on the MLX thread. foresight: what is known of a model that it
    will run. wishes: the owner's, of single models, kept up to date here; None: what their file
    says.
    rehearsals: of first loads; None: there is nothing to rehearse.
    """

    def __init__(
        self,
        limits: PoolLimits,
        sources: CatalogSources,
        thread: Thread,
        make_backend: Callable[[LoadedModel | LoadedEncoder, Ledger], Steps[ModelBackend]],
        *,
        foresight: Foresight = NONE,
        wishes: Wishes | None = None,
        rehearsals: Rehearsals | None = None,
        catalog: Catalog | None = None,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models_file = sources.models_file
        self.ledger = Ledger(limits.memory_limit or default_limit())
        self.ledger.add_relief(Relief.IDLE_MODELS, self._relieve_on_mlx, self._spare)
        self.catalog = catalog or Catalog(sources)
        self._default = sources.default_model
        self._aliases = sources.model_aliases
        self._limits = limits
        self._thread = thread
        self._make_backend = make_backend
        self._foresight = foresight
        self._rehearsals = rehearsals
        self._patience = patience
        self._residents = Residents(clock)
        self._policy = Policy(
            wishes or Wishes(read_models_file(sources.models_file)),
            limits.ttl,
            self.catalog,
            self._residents,
        )
        self._reading = asyncio.Lock()
        self._preloads: set[asyncio.Task[None]] = set()
        self._looks: set[asyncio.Task[object]] = set()
        self._loads_done: Counter[str] = Counter()
        self._unloads_done: Counter[str] = Counter()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._stuck: dict[str, Job[None]] = {}
        self._disk = DaemonThreads(DISK_AT_ONCE)
        self._loading = asyncio.Lock()
        self._returns = Returns()
        self._tokenizers = Tokenizers(limits.max_models, trust_remote_code=limits.trust_remote_code)
        self._looked_at: set[str] = set()
        # Of the MLX thread, hence made there.
        self._beside: mx.Stream | None = None
        self._undo_limit = set_memory_limit(self.ledger.limit)
        self._pressed = Pressure.NORMAL
        # Before any name is asked about.
        self.catalog.configure(self._policy.models)
        self._tell("ready to load models")

    # -- asking for a model --------------------------------------------------------------------

    async def get_model(self, model_id: str | None = None) -> Resident:
        """The model, loaded now if it was not. It may be evicted later: `lease` keeps it.

        Raises:
            ModelNotFound: nothing of that name is offered.
            ModelLoadFailed: it can't be loaded; the subclasses tell why.
            OutOfMemory: the models in use leave no room for it, and did so for a minute.
        """
        async with self.lease(model_id) as resident:
            return resident

    @asynccontextmanager
    async def lease(
        self, model_id: str | None = None, kind: Kind | None = None
    ) -> AsyncIterator[Resident]:
        """`get_model`, and the model stays in memory for the length of the context.

        kind: what it is wanted for; None: whatever it is.

        Raises:
            WrongModelKind: it is of another kind. It was not loaded for that.
        """
        name = self.resolve(model_id)
        if not self.catalog.allows(name):
            await self._on_disk(self.catalog.find, name)
        engine = self._policy.engine_of(name)
        resident = self._residents.lease(engine) or await self._lease_loaded(engine, kind)
        try:
            self._check_kind(name, resident.loaded.kind, kind)
            yield resident
        finally:
            self._residents.give_back(resident)
            self._returns.announce()

    async def _lease_loaded(self, name: str, kind: Kind | None) -> Resident:
        """Load the model, and lease it before anybody else's need of room can make it go."""
        resident: Resident | None = None
        try:
            with self._residents.awaited(name):
                while (resident := self._residents.lease(name)) is None:
                    if kind is not None:
                        source = await self._on_disk(self.catalog.find, name)
                        self._check_kind(name, source.kind, kind)
                    await self._load_once(name)
            return resident
        finally:
            if resident is None and name in self._residents:
                # It was kept for a caller who has left since.
                self._returns.announce()

    def resolve(self, model_id: str | None) -> str:
        """The id that a request's `model` means: none, "" and "default" mean the default one.

        What is on offer or loaded means itself. `model:preset` is a preset of that model. Any other
        name is an alias if it fits one's pattern, as may be what that stands for; if that leads
        round in a circle, it is none. What comes of it means itself.
        """
        if model_id is None or model_id in ("", "default"):
            return self._default
        base, colon, preset = model_id.rpartition(":")
        if colon and not self.offers(model_id):
            found = self._policy.preset(self.resolve(base), preset)
            if found is not None:
                return found
        aliases = self._all_aliases()
        name, passed = model_id, {model_id}
        while not self.offers(name):
            meant = next((model for alias, model in aliases if fnmatchcase(name, alias)), name)
            if meant == name:
                break
            if meant in passed:
                return model_id
            passed.add(name := meant)
        if name != model_id:
            self._look_again()
        return name

    def _look_again(self) -> None:
        """A name that is an alias now may be on offer when it is asked for next."""
        if self.catalog.stale and not self._looks:
            look = asyncio.create_task(self._on_disk(self.catalog.models), name="look again")
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    def offers(self, model_id: str) -> bool:
        """Whether there is a model of that id, as far as is known without a look at the disk."""
        loaded = model_id in self._residents and self.catalog.allows(model_id)
        return loaded or model_id == self._default or self.catalog.has(model_id)

    def is_loaded(self, model_id: str) -> bool:
        """Whether the model is in memory now."""
        return self._policy.engine_of(self.resolve(model_id)) in self._residents

    def overlay(self, model_id: str) -> Overlay:
        """Return what the owner lays over requests that name the model."""
        return self._policy.of(model_id).overlay

    def sampling(self, model_id: str) -> Mapping[str, float]:
        """What is drawn by where a request is silent: what the owner has set, and for a model that
        is loaded what its makers say."""
        resident = self._residents.get(self._policy.engine_of(model_id))
        makers = {} if resident is None else resident.sampling
        return {**makers, **self._policy.sampling(model_id)}

    def _check_kind(self, model_id: str, kind: Kind | None, wanted: Kind | None) -> None:
        if wanted is not None and kind not in (wanted, None):
            offered = (source.id for source in self.catalog.models() if source.kind == wanted)
            raise wrong_kind(model_id, kind, wanted, offered)

    # -- looking at it -------------------------------------------------------------------------

    async def models(self) -> tuple[ModelStatus, ...]:
        """Every model that a request may name, and those that are loaded, also while one loads."""
        sources = {source.id: source for source in await self._on_disk(self.catalog.models)}
        residents = {resident.id: resident for resident in self._residents.all()}
        sources |= {r.id: r.source for r in residents.values() if r.id not in sources}
        return tuple(
            self._status(source, residents.get(self._policy.engine_of(id)))
            for id, source in sources.items()
        )

    async def status(self, model_id: str) -> ModelStatus:
        """One of them, also by an alias.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        name = self.resolve(model_id)
        found = (status for status in await self.models() if status.id == name)
        return next(found, None) or self._status(await self._on_disk(self.catalog.find, name), None)

    def rows(self) -> list[RowStatus]:
        """Every row of every model that has not ended."""
        return [row for resident in self._residents.all() for row in resident.backend.rows()]

    def figures(self) -> dict[str, Any]:
        """`ledger` and `mlx` in bytes; `engines`, and `loads` and `unloads` so far, by model."""
        return {
            "ledger": self.ledger.figures(),
            "mlx": self.ledger.usage(),
            "engines": {r.id: asdict(r.backend.stats()) for r in self._residents.all()},
            "loads": dict(self._loads_done),
            "unloads": dict(self._unloads_done),
        }

    def _status(self, source: ModelSource, resident: Resident | None) -> ModelStatus:
        settings = self._policy.of(source.id)
        context = min(source.context_length, settings.context_length or source.context_length)
        status = ModelStatus(
            source.id,
            "loading" if self._policy.engine_of(source.id) in self._loads else "loadable",
            source.origin,
            source.family,
            source.model_type,
            context,
            source.nbytes,
            aliases=settings.aliases,
            recipe=settings.recipe,
            pinned=self._policy.is_pinned(source.id),
            preload=settings.preload,
            ttl=self._policy.ttl(source.id),
            kind=source.kind,
        )
        if resident is None:
            return status
        loaded = resident.loaded
        shares = resident.id != source.id
        if shares:
            context = min(loaded.context_length, settings.context_length or loaded.context_length)
        return replace(
            status,
            state="loaded",
            family=loaded.family,
            context_length=context if shares else loaded.context_length,
            nbytes=loaded.nbytes,
            weights=loaded.weights,
            leases=resident.leases,
            recipe=settings.recipe if shares else resident.recipe,
            idle=None if resident.leases else self._residents.idle_for(resident),
            outdated=self._policy.is_outdated(resident),
            memory={} if shares else self._memory(resident.id),
            kind=loaded.kind,
            sampling=self.sampling(source.id) if loaded.kind == "text" else {},
            thinks=loaded.adapter.thinks(loaded.tokenizer)
            if isinstance(loaded, LoadedModel)
            else None,
        )

    def _memory(self, model_id: str) -> dict[str, int]:
        """The ledger's lines of a model, in bytes: weights, pages, states, prefill, snapshots."""
        lines = ((*line.partition(":"), n) for line, n in self.ledger.figures().items())
        return {kind: nbytes for kind, _, model, nbytes in lines if model == model_id}

    async def _on_disk(self, look: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """`asyncio.to_thread`, on threads that the program does not wait for."""
        return await self._disk.run(partial(look, *arguments, **named))

    # -- letting go ----------------------------------------------------------------------------

    async def unload(self, model_id: str) -> Unloaded | None:
        """Free a model's memory, pinned or not; None if it was not loaded.

        Raises:
            ModelInUse: it is answering requests, or being loaded.
            ModelNotFound: nothing of that name is offered.
        """
        name = self._policy.engine_of(self.resolve(model_id))
        if name in self._loads:
            raise ModelInUse(f"{name} is being loaded.", param="model")
        gone = await self._evict(lambda r: r.id == name)
        if gone is not None:
            return gone
        for resident in self._residents.all():
            if resident.id == name:
                raise ModelInUse(
                    f"{name} is answering {resident.leases} requests. Cancel them, or wait.",
                    param="model",
                )
        await self._on_disk(self.catalog.find, name)
        return None

    async def pin(self, model_id: str, pinned: bool) -> None:
        """Keep a model that is loaded, or let it go when room is needed or its time is over.

        Holds until the program ends, whatever the settings say.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        name = self._policy.engine_of((await self.status(model_id)).id)
        self._policy.pin(name, pinned)
        self._returns.announce()

    async def keep(self, model_id: str, seconds: float) -> None:
        """Keep a model for so long without use, 0: unload it as soon as it is idle.

        Holds until the next call, before what the settings say; a pinned model stays.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        name = self.resolve(model_id)
        await self._on_disk(self.catalog.find, name)
        self._policy.keep(self._policy.engine_of(name), seconds)
        self._returns.announce()

    async def download(self, repository: str, report: hub.Report) -> None:
        """Fetch a model from the hub, or the files of it that are missing.

        Raises:
            MLXManagerError: see `hub.fetch`.
        """
        # As `_fetch`: it may take hours, in which the program can end.
        await DaemonThreads(1).run(partial(hub.fetch, repository, report))
        await self._on_disk(self.catalog.rescan)

    async def delete(self, model_id: str) -> None:
        """Unload a model and delete its files.

        Raises:
            ModelInUse: it is answering requests, or being loaded.
            ModelNotFound: nothing of that name lies in `models_dir` or in the hub's cache.
            InvalidRequest: it is embedded, or lies elsewhere.
            StorageFailed: a file can't be deleted; others may be gone.
        """
        name = self.resolve(model_id)
        plan = await self._on_disk(self.catalog.removal, name)
        for resident in self._residents.all():
            # An adapter's engine reads its base's files.
            if name in (resident.id, resident.recipe.base):
                await self.unload(resident.id)
        try:
            await asyncio.to_thread(plan.carry_out)
        except OSError as error:
            raise StorageFailed(f"{error.filename} can't be deleted: {error.strerror}.") from error
        await self._on_disk(self.catalog.rescan)

    async def clear_prefixes(self, model_id: str | None = None) -> dict[str, int]:
        """Forget the prompts kept for reuse, of one model or of all; bytes given back, by model.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        name = None
        if model_id is not None:
            name = self._policy.engine_of((await self.status(model_id)).id)
        return await self._thread.call(partial(self._clear_prefixes_on_mlx, name))

    async def tend(self) -> None:
        """Preload what is to be, unload what has been idle for too long, and make ahead, while
        nobody is answered, what would hold streams up; until cancelled."""
        await self._tell_unknown()
        self._preload(self._preloaded())
        complete_at = -1
        while True:
            seen = self._returns.count
            rest = await self.expire()
            if is_told():
                await self._mind_others()
                rest = LOOK_AT_MEMORY if rest is None else min(rest, LOOK_AT_MEMORY)
            if complete_at == seen or not self._is_quiet():
                await self._returns.wait(seen, rest)
                continue
            await self._returns.wait(seen, QUIET if rest is None else min(rest, QUIET))
            still = self._returns.count == seen and self._is_quiet()
            if still and not await self._make_one_ahead():
                complete_at = seen

    async def expire(self) -> float | None:
        """Unload what has been idle for too long, or must be loaded anew, which what is preloaded
        is then.

        Returns: seconds until it will be the next one's turn; None: not before one is used.
        """
        policy = self._policy
        outdated = {r.id for r in self._residents.all() if policy.is_outdated(r)}
        while any(policy.is_over(resident) for resident in self._idle()):
            await self._evict(policy.is_over)
        again = [id for id in self._preloaded() if id in outdated and id not in self._residents]
        if again:
            self._preload(again)
        rest = min((policy.rest(resident) for resident in self._idle()), default=NEVER)
        return None if rest == NEVER else max(0.0, rest)

    async def _mind_others(self) -> None:
        """Give up what is only kept for reuse when other programs have come to want the memory."""
        before, self._pressed = self._pressed, self.ledger.pressure()
        if self._pressed > max(before, Pressure.NORMAL):
            freed = await self.clear_prefixes(None)
            log.info("other programs want memory: prompts are kept no more: %s", freed)

    async def _evict(self, fits: Callable[[Resident], bool]) -> Unloaded | None:
        """Free the least recently used idle model of those that fit, pinned ones too: none that
        waits for room could have made those go."""
        gone = await self._thread.call(partial(self._evict_on_mlx, fits))
        if gone is not None:
            self._returns.announce()
        return gone

    async def complete(self) -> None:
        """Make what the first request for JSON needs, of every model in memory: before anybody is
        answered, since Python's lock is held for up to a second a model."""
        while await self._complete_one():
            pass

    async def make_ahead(self) -> None:
        """All at once what `tend` has made while nobody is answered."""
        while await self._make_one_ahead():
            pass

    async def _make_one_ahead(self) -> bool:
        """Something that Python's lock is held for, up to a second: of a model in memory what its
        first request for JSON needs, then tokenizers of models on disk. False: nothing is left."""
        if await self._complete_one():
            return True
        # Their own code is run for who asks for them.
        if self._limits.trust_remote_code or self._tokenizers.full:
            return False
        for source in await self._on_disk(self.catalog.models):
            new = source.id not in self._looked_at and source.id not in self._residents
            useful = source.origin != "embedded" and source.nbytes <= self.ledger.limit
            if new and useful and source.path is not None:
                self._looked_at.add(source.id)
                read = way_of(source).tokenizer
                await self._tried(source.id, partial(read, self._tokenizers, source.path))
                return True
        return False

    async def _complete_one(self) -> bool:
        for resident in self._residents.all():
            if not resident.complete:
                resident.complete = True
                await self._tried(resident.id, resident.backend.make_ahead)
                return True
        return False

    async def _tried(self, model_id: str, make: Callable[[], object]) -> None:
        """Who asks for it hears what is wrong."""
        try:
            await Job(make).result(self._limits.load_timeout)
        except (MLXManagerError, *BROKEN) as error:
            # A TimeoutError among them.
            log.debug("%s: not made ahead: %s", model_id, error or type(error).__name__)

    def _is_quiet(self) -> bool:
        return not self._loads and len(self._idle()) == len(self._residents.all())

    def _idle(self) -> list[Resident]:
        residents = self._residents
        return [resident for resident in residents.all() if not residents.in_use(resident)]

    async def reload(self) -> Reloaded:
        """Read the models' settings again. What is idle and made otherwise is unloaded.

        Raises:
            InvalidSettings: those in force stay; the message names file, key and what is allowed.
        """
        async with self._reading:
            new = await self._on_disk(read_models_file, self._models_file)
            old = self._policy.models
            # What it names is known before its patterns of names count.
            await self._on_disk(self.catalog.configure, new)
            self._policy.follow(new)
            idle = [r.id for r in self._idle() if self._policy.is_outdated(r)]
            await self.expire()
            self._returns.announce()
            self._preload(self._preloaded())
            kept = {r.id: r for r in self._residents.all()}
            unknown = await self._tell_unknown()
        names = sorted({*old.models, *new.models})
        reloaded = Reloaded(
            self._models_file,
            tuple(name for name in names if old.of(name) != new.of(name)),
            tuple(id for id in idle if id not in kept),
            tuple(r.id for r in kept.values() if self._policy.is_outdated(r)),
            unknown,
        )
        changed = ", ".join(reloaded.changed) or "none"
        log.info(
            "the settings of the models have been read again; changed are those of %s", changed
        )
        return reloaded

    async def _tell_unknown(self) -> tuple[str, ...]:
        """Names in the models' settings that nothing on offer has; the log has them, too, and the
        aliases that are names of what is on offer."""
        offered = {source.id for source in await self._on_disk(self.catalog.models)}
        unknown = tuple(name for name in self._policy.models.models if name not in offered)
        for name in unknown:
            log.warning("%s has settings of %r, which is not on offer", self._models_file, name)
        for alias, model in self._all_aliases():
            if alias in offered and alias != model:
                log.warning("%r is no alias of %r: it is on offer itself", alias, model)
        return unknown

    def _all_aliases(self) -> tuple[tuple[str, str], ...]:
        return (*self._policy.models.aliases(), *self._aliases)

    def _preloaded(self) -> list[str]:
        """What is to be in memory before anybody asks for it, the default model first."""
        settings = self._policy.models.models
        return [self._default, *(id for id, its in settings.items() if its.preload)]

    def _preload(self, model_ids: Sequence[str]) -> None:
        task = asyncio.create_task(self._preload_all(model_ids), name="preload")
        self._preloads.add(task)
        task.add_done_callback(self._preloads.discard)

    async def _preload_all(self, model_ids: Sequence[str]) -> None:
        """`_loaded` logs those that fail."""
        for model_id in model_ids:
            with suppress(MLXManagerError):
                await self.get_model(model_id)

    async def close(self) -> None:
        """Abandon loads and free every model, in use or not; MLX has the limit that it had."""
        tasks = [*self._preloads, *self._looks, *self._loads.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._thread.call(self._close_on_mlx)

    # -- loading -------------------------------------------------------------------------------

    async def _load_once(self, model_id: str) -> None:
        """Wait for the one load of this model; it goes on if this caller gives up."""
        load = self._loads.get(model_id)
        if load is None:
            load = asyncio.create_task(self._load(model_id), name=f"load {model_id}")
            self._loads[model_id] = load
            load.add_done_callback(partial(self._loaded, model_id))
        await asyncio.shield(load)

    def _loaded(self, model_id: str, load: asyncio.Task[None]) -> None:
        del self._loads[model_id]
        if load.cancelled():
            return
        # Everybody who waited may have gone: the failure is logged, and so retrieved, here, and the
        # time that the model may be idle begins.
        if (error := load.exception()) is not None:
            level = logging.INFO if isinstance(error, ModelNotFound) else logging.WARNING
            log.log(level, "%s was not loaded: %s", model_id, error)
        else:
            self._returns.announce()

    async def _load(self, model_id: str) -> None:
        # A download takes its time: patience begins when it is done.
        await self._source(model_id)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        while True:
            seen = self._returns.count
            # The settings may have been read again meanwhile. If they are from here on, the model
            # is outdated by its recipe, whatever is found for its source.
            recipe = self._policy.of(model_id).recipe
            try:
                return await self._load_pieces(await self._source(model_id), recipe)
            except MLXManagerError as error:
                if not isinstance(error, OutOfMemory) or loop.time() >= give_up:
                    raise without_frames(error) from None
                in_use = any(map(self._residents.in_use, self._residents.all()))
                if not in_use and seen == self._returns.count:
                    raise without_frames(error) from None
            await self._returns.wait(seen, give_up - loop.time())

    async def _source(self, model_id: str) -> ModelSource:
        """Where the model is on disk, now if it was not."""
        source = await self._on_disk(self.catalog.find, model_id)
        if source.path is not None:
            return source
        folder = await self._fetch(source)
        here = await self._on_disk(described, source.id, folder, source.origin)
        return replace(source, path=folder, kind=here.kind)

    async def _fetch(self, source: ModelSource) -> Path:
        if not source.downloadable:
            raise ModelNotFound(
                f"{source.repository} has not been downloaded. The server's owner can run "
                f"`mlx-manager pull {source.repository}`, or set MLX_SERVER_ALLOW_DOWNLOAD=true.",
                param="model",
            )
        with explained(source.id):
            # It may take hours, in which the program can end.
            path = await DaemonThreads(1).run(partial(hub.fetch, source.repository))
        self.catalog.rescan()
        return path

    async def _load_pieces(self, source: ModelSource, recipe: Recipe) -> None:
        """Load between other models' steps and beside them, one model at a time.

        All but the weights is read before: nobody waits for room for what can't be loaded, nor for
        a file or a template that never ends.
        """
        prepared = await self._prepared(source, recipe)
        async with self._loading:
            load = self._bring_on_mlx(source, recipe, prepared)
            steps = self._beside_on_mlx(load)
            try:
                while True:
                    match await self._thread.call(partial(_next_piece, source.id, steps, load)):
                        case Done():
                            return
                        case Aside() as aside:
                            await self._done_aside(source.id, aside, lambda: whereabouts(load))
                        case None:
                            pass
            finally:
                await self._thread.call(partial(_end_load, steps))

    async def _prepared(
        self, source: ModelSource, recipe: Recipe
    ) -> PreparedText | PreparedEncoder:
        """Return the prepared parts of a model's small files, or raise an error that says what is
        wrong with these files."""
        doing = ["it is begun"]

        def prepare() -> PreparedText | PreparedEncoder:
            with explained(source.id):
                return way_of(source).prepare(
                    source,
                    self._limits,
                    recipe,
                    self.ledger.limit,
                    tokenizers=self._tokenizers,
                    doing=doing.append,
                )

        aside = Aside(prepare)
        await self._done_aside(source.id, aside, lambda: doing[-1])
        return aside.result()

    async def _done_aside(
        self, model_id: str, aside: Aside[Any], whereabouts: Callable[[], str]
    ) -> None:
        """Have it done beside other models' steps.

        Raises:
            ModelLoadStalled: it takes longer than a load may go without getting further.
        """
        stuck = self._stuck.pop(model_id, None)
        if stuck is not None and stuck.alive:
            self._stuck[model_id] = stuck
            raise ModelLoadStalled(
                f"The last attempt to load {model_id} still hangs, on a disk that does not answer "
                "it seems. Mend that, or start the server again."
            )
        job = Job(partial(aside.run, self._thread.after_step))
        try:
            await job.result(self._limits.load_timeout)
        except TimeoutError:
            self._stuck[model_id] = job
            limit = self._limits.load_timeout
            raise ModelLoadStalled(
                f"The load of {model_id} got no further for {limit:g} s "
                f"(MLX_SERVER_LOAD_TIMEOUT_SECONDS), after this had begun: {whereabouts()}."
            ) from None

    def _make_place_on_mlx(self) -> None:
        """Evict until one more model may be loaded."""
        while len(self._residents.all()) >= self._limits.max_models:
            if not self._evict_on_mlx():
                raise OutOfMemory(self._crowd(), retry_after=10)

    def _crowd(self) -> str:
        residents = self._residents.all()
        in_use = sum(map(self._residents.in_use, residents))
        pinned = sum(1 for resident in residents if self._policy.is_pinned(resident.id))
        return (
            f"{len(residents)} models are loaded, {in_use} in use and {pinned} pinned, and no more "
            "may be (MLX_SERVER_MAX_MODELS)."
        )

    def _beside_on_mlx(self, load: Steps[None]) -> Steps[None]:
        if self._beside is None or any(job.alive for job in self._stuck.values()):
            # What still hangs may be computing on the one before.
            self._beside = side_stream()
        return (yield from on_stream(self._beside, load))

    def _bring_on_mlx(
        self, source: ModelSource, recipe: Recipe, prepared: PreparedText | PreparedEncoder
    ) -> Steps[None]:
        """Make place, load a model, make its backend, and take it among the residents."""
        begun = time.perf_counter()
        if self.ledger.pressure() is Pressure.CRITICAL:
            raise out_of_reach(f"{source.id} is not loaded")
        way = way_of(source)
        # No model goes for one that can't be loaded.
        check_room(source.id, prepared.checked.nbytes, self.ledger)
        self._make_place_on_mlx()
        yield from self._rehearse_on_mlx(source, recipe, prepared.checked.nbytes)
        with self._blaming_the_device(source.id):
            loaded = yield from way.loading(
                source,
                self._limits,
                self.ledger,
                recipe,
                foresight=self._foresight,
                prepared=prepared,
            )
            backend: ModelBackend | None = None
            try:
                backend = yield from self._make_backend(loaded, self.ledger)
            finally:
                if backend is None:
                    self.ledger.record(weights_line(loaded.id), 0)
        self._residents.add(Resident(loaded.id, loaded, backend, source, recipe))
        self._wire_on_mlx()
        self._loads_done[loaded.id] += 1
        if self._rehearsals is not None:
            yield from beside(partial(self._rehearsals.note, source, recipe))
        took = time.perf_counter() - begun
        self._tell(
            f"{loaded.id} is loaded in {took:.1f} s: {gigabytes(loaded.nbytes)} of weights, "
            f"{loaded.weights.name} ({loaded.weights.reason})",
            model=loaded.id,
            seconds=round(took, 3),
            weights_bytes=loaded.nbytes,
        )

    def _tell(self, said: str, **facts: object) -> None:
        """Log what has happened, and what MLX holds now: in words, and in bytes for machines."""
        usage = self.ledger.usage()
        told = {f"memory_{name}_bytes": nbytes for name, nbytes in usage.items()}
        log.info("%s; %s", said, in_words(usage), extra={"facts": {**facts, **told}})

    @contextmanager
    def _blaming_the_device(self, model_id: str) -> Iterator[None]:
        """That others have filled the device says nothing of the model.

        Raises:
            OutOfMemory: the device had no more memory.
        """
        try:
            yield None
        except (RuntimeError, ModelLoadFailed) as error:
            if not self.ledger.heed(error):
                raise
            raise OutOfMemory(
                f"The device has no more memory for {model_id}. Other programs use it, too: of its "
                f"{sized(device_memory())} models get {sized(self.ledger.limit)} now.",
                retry_after=10,
            ) from error

    def _rehearse_on_mlx(self, source: ModelSource, recipe: Recipe, nbytes: int) -> Steps[None]:
        """Have a process of its own load a model that is new to this machine, if somebody is being
        answered who would wait for what it compiles."""
        if self._rehearsals is None or not self.rows():
            return
        if (yield from beside(partial(self._rehearsals.is_due, source, recipe))):
            least = nbytes + nbytes // 8 + REHEARSED_BESIDES
            with self.ledger.lending(f"rehearsal:{source.id}", least) as lent:
                if lent:
                    yield from self._rehearsals.running(source.id, lent)

    # -- on the MLX thread ---------------------------------------------------------------------

    def _relieve_on_mlx(self, lacking: int) -> None:
        """Evict idle models, the least recently used first, until the bytes are there."""
        enough = self.ledger.available() + lacking
        while self.ledger.available() < enough and self._evict_on_mlx():
            pass

    def _spare(self) -> int:
        """Bytes that the idle models which may go have, less their pages."""
        lines = self.ledger.figures()
        idle = (resident.id for resident in self._idle() if self._policy.may_make_place(resident))
        return sum(lines.get(f(id), 0) for id in idle for f in (weights_line, working_line))

    def _evict_on_mlx(self, fits: Callable[[Resident], bool] | None = None) -> Unloaded | None:
        """Free the least recently used idle model of those that fit, or are not pinned."""
        remove = partial(self._residents.remove_idle, fits or self._policy.may_make_place)
        return self._free_on_mlx(remove)

    def _close_on_mlx(self) -> None:
        while self._free_on_mlx(self._residents.remove_any):
            pass
        self._undo_limit()

    def _free_on_mlx(self, remove: Callable[[], Resident | None]) -> Unloaded | None:
        resident = remove()
        if resident is None:
            return None
        model_id, nbytes, leases = resident.id, resident.loaded.nbytes, resident.leases
        before = self.ledger.usage()["active"]
        self._unloads_done[model_id] += 1
        resident.backend.close()
        self.ledger.record(weights_line(resident.id), 0)
        # The last reference, but for those among modules and bound methods of their own.
        del resident
        gc.collect()
        clear_cache()
        after = self.ledger.usage()["active"]
        self._wire_on_mlx()
        gone = Unloaded(model_id, nbytes, before, after)
        freed = gigabytes(max(0, gone.before - gone.after))
        self._tell(f"{model_id} is unloaded: {freed} are free again", model=model_id)
        # What another load reads meanwhile, or a caller that is cut off holds on to, is no leak.
        quiet = not self._loads and not leases
        if quiet and gone.before - gone.after < nbytes:
            whole = gigabytes(nbytes)
            log.warning("of the weights of %s, %s, not all came back", model_id, whole)
        return gone

    def _wire_on_mlx(self) -> None:
        """Have macOS keep the weights in memory, if the owner wants that."""
        if self._limits.wire_weights:
            wire(sum(resident.loaded.nbytes for resident in self._residents.all()))

    def _clear_prefixes_on_mlx(self, model_id: str | None) -> dict[str, int]:
        freed: dict[str, int] = {}
        for resident in self._residents.all():
            if model_id in (None, resident.id):
                before = sum(self._memory(resident.id).values())
                resident.backend.drop_prefixes()
                freed[resident.id] = before - sum(self._memory(resident.id).values())
        clear_cache()
        return freed


def without_frames(error: MLXManagerError) -> MLXManagerError:
    """The error without its tracebacks, whose frames would keep a model's weights alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _next_piece(
    model_id: str, steps: Steps[None], load: Steps[None]
) -> Done[None] | Aside[Any] | None:
    """The next of `steps`, which are those of `load` on a stream."""
    begun = time.perf_counter()
    piece = advance(steps)
    taken = time.perf_counter() - begun
    if taken > SLOW_PIECE:
        log.debug("loading %s: %.0f ms up to %s", model_id, 1e3 * taken, whereabouts(load))
    return piece


def _end_load(steps: Steps[None]) -> None:
    """Modules draw their weights when they are made, and the files' come instead before any is
    computed. By what they were to be drawn goes with them: MLX would keep each key for the sake of
    the next one, 100 KB a load and more, for ever."""
    steps.close()
    mx.random.seed(0)


class Returns:
    """Counts the leases given back, and wakes who waits for the next."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def announce(self) -> None:
        self.count += 1
        self._next.set()

    async def wait(self, seen: int, seconds: float | None) -> None:
        """Until `count` exceeds `seen`, or the seconds have passed."""
        if self.count > seen:
            return
        self._next.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._next.wait()


@cache
def get_model_pool() -> ModelPoolManager:
    """A pool of the process's own, for scripts, by the environment's settings.

    `main` composes it. It is asked by name, since nothing here may import what stands above.
    """
    main = importlib.import_module("mlx_manager.mlx_server.main")
    return cast(ModelPoolManager, main.make_script_pool())

"""The model pool: models are loaded on request, kept while there is room, and evicted when idle.

The owner's settings of single models are read here, and again on request. A change that needs a
new load takes effect once the model is idle.

Each model is loaded by a worker, a process of its own (`models.loads`). A model has one load at a
time, however many requests ask for it. A request for a model that does not fit beside those in use
waits for their leases to end, for a limited time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mlx_manager.mlx_server.config import (
    CatalogSources,
    EngineLimits,
    MLXServerSettings,
    PoolLimits,
)
from mlx_manager.mlx_server.core import Kind, Overlay, RowStatus
from mlx_manager.mlx_server.errors import (
    InvalidRequest,
    MLXManagerError,
    ModelInUse,
    ModelNotFound,
    StorageFailed,
)
from mlx_manager.mlx_server.models import hub
from mlx_manager.mlx_server.models.catalog import Catalog, ModelSource, described
from mlx_manager.mlx_server.models.kinds import wrong_kind
from mlx_manager.mlx_server.models.loads import NOT_LINES, PATIENCE, Loads, Start
from mlx_manager.mlx_server.models.plan import planned
from mlx_manager.mlx_server.models.policy import Policy
from mlx_manager.mlx_server.models.residents import Resident, Residents
from mlx_manager.mlx_server.models.settings import (
    NEVER,
    ModelsFile,
    SettingsWritten,
    Wishes,
    read_models_file,
    table_of,
    write_settings,
)
from mlx_manager.mlx_server.models.status import ModelStatus, Reloaded, Unloaded
from mlx_manager.mlx_server.remotes.remote import Remote
from mlx_manager.mlx_server.remotes.remotes import Placement, Remotes
from mlx_manager.mlx_server.utils.broken import explained
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads
from mlx_manager.mlx_server.utils.pressure import Pressure, is_told
from mlx_manager.mlx_server.workers.messages import DropPrefixes
from mlx_manager.mlx_server.workers.process import NO_LOG, LogSettings, start_process

T = TypeVar("T")
P = ParamSpec("P")
LOOK_AT_MEMORY = 10.0
"""Seconds between two checks of a Mac's memory pressure, while nobody is answered."""
DISK_AT_ONCE = 8
"""Threads that read the disk for the catalog: one that hangs must keep neither the others from
reading nor the program from ending."""
SILENCE = 300.0
"""Most seconds without a byte of an answer from another machine, unless the owner sets others."""
MOST_OFTEN, LEAST_OFTEN = 0.05, 1.0
"""Bounds of the seconds between two checks for workers that hang."""
log = logging.getLogger(__name__)


class ModelPoolManager:
    """Pool of loaded models. Its methods run in asyncio.

    The constructor reads the disk, as the catalog does.
    wishes: the owner's wishes, kept up to date here; None: the settings of their file.
    start: starts a worker.
    """

    def __init__(
        self,
        limits: PoolLimits,
        sources: CatalogSources,
        engine: EngineLimits | None = None,
        *,
        wishes: Wishes | None = None,
        catalog: Catalog | None = None,
        start: Start = start_process,
        log_settings: LogSettings = NO_LOG,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models_file = sources.models_file
        self.catalog = catalog or Catalog(sources)
        self._default = sources.default_model
        self._aliases = sources.model_aliases
        self._residents = Residents(clock)
        self._policy = Policy(
            wishes or Wishes(read_models_file(sources.models_file)),
            limits.ttl,
            self.catalog,
            self._residents,
        )
        self._loads = Loads(
            limits,
            engine or EngineLimits(),
            self._source,
            self._policy,
            self._residents,
            find_named=self._named,
            start=start,
            log_settings=log_settings,
            patience=patience,
        )
        self._remotes = Remotes(_places(self._policy.models))
        self.grants = self._loads.grants
        self._returns = self._loads.returns
        self._reading = asyncio.Lock()
        self._preloads: set[asyncio.Task[None]] = set()
        self._looks: set[asyncio.Task[object]] = set()
        self._disk = DaemonThreads(DISK_AT_ONCE)
        self._pressed = Pressure.NORMAL
        # The first scan precedes the first question about a name.
        self.catalog.configure(self._policy.models)

    # -- asking for a model --------------------------------------------------------------------

    async def get_model(self, model_id: str | None = None) -> Resident | Remote:
        """Return the model, after loading it if needed. It may be evicted later: `lease` keeps it.

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
    ) -> AsyncIterator[Resident | Remote]:
        """Return the model as `get_model` does, and keep it in memory for the whole context.

        A model on another machine is there without being loaded, even while no server answers.

        kind: the kind that is wanted; None: any.

        Raises:
            WrongModelKind: the model is of another kind. It was not loaded for that.
        """
        name = self.resolve(model_id)
        if not self.catalog.allows(name):
            await self._on_disk(self.catalog.find, name)
        engine = self._policy.engine_of(name)
        if (remote := self._remotes.get(engine)) is not None:
            await remote.learn()
            self._check_kind(name, remote.kind, kind)
            yield remote
            return
        resident = self._residents.lease(engine) or await self._lease_loaded(engine, kind)
        try:
            self._check_kind(name, resident.facts.kind, kind)
            self.grants.tell(resident.worker)
            yield resident
        finally:
            self._residents.give_back(resident)
            self._returns.announce()

    async def _lease_loaded(self, name: str, kind: Kind | None) -> Resident:
        """Load the model, and lease it before another load can evict it."""
        resident: Resident | None = None
        try:
            with self._residents.awaited(name):
                while (resident := self._residents.lease(name)) is None:
                    if kind is not None:
                        source = await self._on_disk(self.catalog.find, name)
                        self._check_kind(name, source.kind, kind)
                    await self._loads.once(name)
            return resident
        finally:
            if resident is None and name in self._residents:
                # The model was kept for a caller who has left since.
                self._returns.announce()

    def resolve(self, model_id: str | None) -> str:
        """Return the id that a request's `model` means: None, "" and "default" are the default.

        A name on offer or loaded means itself. `model:preset` is a preset of that model. Any other
        name is replaced by the model of the first alias whose pattern it matches, again and again
        until a name is on offer or matches none. A name whose aliases form a circle means itself.
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
        """Scan a stale catalog in the background: a name that is an alias may be on offer soon."""
        if self.catalog.stale and not self._looks:
            look = asyncio.create_task(self._on_disk(self.catalog.models), name="look again")
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    def offers(self, model_id: str) -> bool:
        """Return whether there is a model of that id, as far as is known without reading the
        disk."""
        loaded = model_id in self._residents and self.catalog.allows(model_id)
        return loaded or model_id == self._default or self.catalog.has(model_id)

    def is_loaded(self, model_id: str) -> bool:
        """Return whether the model is in memory now, here or on another machine."""
        engine = self._policy.engine_of(self.resolve(model_id))
        return engine in self._remotes or engine in self._residents

    async def sees(self, model_id: str) -> bool:
        """Return whether the model reads pictures: once loaded, as it was loaded; before, as its
        folder tells. A model that is still to be downloaded may, and one on another machine whose
        server does not tell.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        name = self.resolve(model_id)
        if (remote := self._remotes.get(self._policy.engine_of(name))) is not None:
            await remote.learn()
            told = remote.facts.input_modalities if remote.facts is not None else None
            return told is None or "image" in told
        resident = self._residents.get(self._policy.engine_of(name))
        if resident is not None:
            return "image" in resident.facts.input_modalities
        source = await self._on_disk(self.catalog.find, name)
        return source.path is None or "image" in source.input_modalities

    def overlay(self, model_id: str) -> Overlay:
        """Return the owner's changes to requests that name the model."""
        return self._policy.of(model_id).overlay

    def sampling(self, model_id: str) -> Mapping[str, float]:
        """Return the sampling values for requests that give none: the owner's, which override the
        makers'. The makers' are known once the model is loaded."""
        resident = self._residents.get(self._policy.engine_of(model_id))
        makers = {} if resident is None else resident.facts.sampling
        return {**makers, **self._policy.sampling(model_id)}

    def _check_kind(self, model_id: str, kind: Kind | None, wanted: Kind | None) -> None:
        if wanted is not None and kind not in (wanted, None):
            offered = (source.id for source in self.catalog.models() if source.kind == wanted)
            raise wrong_kind(model_id, kind, wanted, offered)

    # -- looking at it -------------------------------------------------------------------------

    async def models(self) -> tuple[ModelStatus, ...]:
        """Return every model that a request may name or that is loaded, also while one loads."""
        sources = {source.id: source for source in await self._on_disk(self.catalog.models)}
        residents = {resident.id: resident for resident in self._residents.all()}
        sources |= {r.id: r.source for r in residents.values() if r.id not in sources}
        return tuple(
            self._status(source, residents.get(self._policy.engine_of(id)))
            for id, source in sources.items()
        )

    async def status(self, model_id: str) -> ModelStatus:
        """Return the status of one model, which may be named by an alias.

        Raises:
            ModelNotFound: nothing of that name is offered.
        """
        name = self.resolve(model_id)
        found = (status for status in await self.models() if status.id == name)
        return next(found, None) or self._status(await self._on_disk(self.catalog.find, name), None)

    async def look(self) -> None:
        """Ask the workers for their figures, which `rows`, `figures` and `status` then use."""
        await self._loads.look()

    def rows(self) -> list[RowStatus]:
        """Return every row of every model that had not ended at the last `look`."""
        rows = [row for r in self._residents.all() for row in r.worker.figures.rows]
        return rows + self._remotes.rows()

    def workers(self) -> dict[str, int]:
        """Return the ids of the models' processes, by model."""
        return {r.id: r.worker.process.pid for r in self._residents.all()}

    def figures(self) -> dict[str, Any]:
        """Return `ledger` and `mlx` in bytes, and by model `engines`, the counts `loads`, `unloads`
        and `failures`, and the reasons of those left `down`. All are as at the last `look`.
        `remotes` has the servers of models on other machines, by model."""
        remotes = {remote.id: remote.servers() for remote in self._remotes.all()}
        return {**self._loads.figures(), "remotes": remotes}

    def failure(self, model_id: str) -> str | None:
        """Return why a model is left down; None if it is not."""
        engine = self._policy.engine_of(self.resolve(model_id))
        if (remote := self._remotes.get(engine)) is not None:
            return remote.failure
        return self._loads.strikes.reason(self._policy.engine_of(self.resolve(model_id)))

    def doing(self, model_id: str) -> str | None:
        """Return what a model's load is at; None if it is not being loaded."""
        return self._loads.doing(self._policy.engine_of(self.resolve(model_id)))

    def _status(self, source: ModelSource, resident: Resident | None) -> ModelStatus:
        settings = self._policy.of(source.id)
        engine = self._policy.engine_of(source.id)
        context = min(source.context_length, settings.context_length or source.context_length)
        doing, failure = self._loads.doing(engine), self._loads.strikes.reason(engine)
        status = ModelStatus(
            source.id,
            "loading" if doing is not None else "down" if failure is not None else "loadable",
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
            input_modalities=source.input_modalities,
            doing=doing,
            failure=failure,
        )
        if (remote := self._remotes.get(engine)) is not None:
            own = self.sampling(source.id) if remote.kind == "text" else {}
            return _elsewhere(replace(status, sampling=own), remote)
        if resident is None:
            return status
        facts = resident.facts
        shares = resident.id != source.id
        if shares:
            context = min(facts.context_length, settings.context_length or facts.context_length)
        return replace(
            status,
            state="loaded",
            family=facts.family,
            context_length=context if shares else facts.context_length,
            nbytes=facts.nbytes,
            weights=facts.weights,
            leases=resident.leases,
            recipe=settings.recipe if shares else resident.recipe,
            idle=None if resident.leases else self._residents.idle_for(resident),
            outdated=self._policy.is_outdated(resident),
            memory={} if shares else _memory(resident),
            kind=facts.kind,
            sampling=self.sampling(source.id) if facts.kind == "text" else {},
            thinks=facts.thinks,
            input_modalities=facts.input_modalities,
            draft_model=facts.draft_model,
            mtp=facts.mtp,
            devices=facts.devices,
        )

    async def _on_disk(self, look: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run a function as `asyncio.to_thread` does, on threads that the program's end does not
        wait for."""
        return await self._disk.run(partial(look, *arguments, **named))

    # -- letting go ----------------------------------------------------------------------------

    async def unload(self, model_id: str) -> Unloaded | None:
        """Free a model's memory, pinned or not; None if it was not loaded.

        Raises:
            ModelInUse: it is answering requests, or being loaded.
            ModelNotFound: nothing of that name is offered.
        """
        name = self._policy.engine_of(self.resolve(model_id))
        self._loads.strikes.forget(name)
        if name in self._loads.under_way:
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
        """Pin a model, or let it be evicted when room is needed or its TTL is over.

        The pin holds until the program ends, whatever the settings say.

        Raises:
            ModelNotFound: nothing of that name is offered.
            InvalidRequest: it is on another machine.
        """
        name = await self._engine_here(model_id, "it can be pinned")
        self._policy.pin(name, pinned)
        self._returns.announce()

    async def _engine_here(self, model_id: str, alone: str) -> str:
        """Return the name of the engine that answers for a model. alone: what is done only where
        the model is loaded.

        Raises:
            ModelNotFound: nothing of that name is offered.
            InvalidRequest: it is on another machine.
        """
        name = self._policy.engine_of((await self.status(model_id)).id)
        if name in self._remotes:
            raise InvalidRequest(
                f"{name} is on another machine, where alone {alone}.", param="model"
            )
        return name

    async def keep(self, model_id: str, seconds: float) -> None:
        """Set a model's TTL: seconds without use until it is unloaded, 0: as soon as it is idle.

        The TTL holds until the next call and overrides the settings; a pinned model stays.

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
        # As in `_fetch`, a thread of its own: a download of hours must not delay the program's end.
        await DaemonThreads(1).run(partial(hub.fetch, repository, report))
        await self._on_disk(self.catalog.rescan)

    async def search(self, words: str, limit: int) -> list[hub.Listed]:
        """Return the models of the hub with these words in their names.

        Raises:
            DownloadFailed: the hub can't be reached.
        """
        return await self._on_disk(hub.search, words, limit)

    async def plan(self, repository: str) -> dict[str, Any]:
        """Return what a model of the hub would take on this machine, by the fields' names of
        `schemas.hub.ModelPlan`.

        Raises:
            MLXManagerError: see `hub.look_up`.
        """
        limit = self.figures()["ledger"]["limit"]
        return await self._on_disk(planned, repository, limit)

    async def settings_of(self, model_id: str) -> dict[str, Any]:
        """Return a model's table in the owner's file as it is written; {} if it has none.

        Raises:
            InvalidSettings: the file can't be read.
        """
        return await self._on_disk(table_of, self._models_file, model_id)

    async def change_settings(
        self, model_id: str, settings: Mapping[str, Any], *, dry_run: bool
    ) -> SettingsWritten:
        """Write a model's table into the owner's file; `reload` has it take effect.

        Raises:
            InvalidSettings: there is no file, or a setting is invalid; the file stays as it is.
        """
        async with self._reading:
            return await self._on_disk(
                write_settings, self._models_file, model_id, settings, dry_run=dry_run
            )

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
            # An adapter's engine reads its base's files, and one with a draft model that one's.
            facts = resident.facts
            if name in (resident.id, resident.recipe.base, facts.draft_model, facts.mtp):
                await self.unload(resident.id)
        try:
            await asyncio.to_thread(plan.carry_out)
        except OSError as error:
            raise StorageFailed(f"{error.filename} can't be deleted: {error.strerror}.") from error
        await self._on_disk(self.catalog.rescan)

    async def clear_prefixes(self, model_id: str | None = None) -> dict[str, int]:
        """Forget the prompts kept for reuse, of one model or of all; return the bytes given back,
        by model.

        Raises:
            ModelNotFound: nothing of that name is offered.
            InvalidRequest: it is on another machine.
        """
        name = None
        if model_id is not None:
            name = await self._engine_here(model_id, "its prompts are kept")
        freed: dict[str, int] = {}
        for resident in self._residents.all():
            if name in (None, resident.id):
                with suppress(MLXManagerError):
                    freed[resident.id] = await resident.worker.ask(DropPrefixes())
        return freed

    async def tend(self) -> None:
        """Preload models, unload those that have been idle for too long, and look at the servers
        of models on other machines; until cancelled."""
        self._remotes.watch()
        await self._tell_unknown()
        self._preload(self._preloaded())
        while True:
            seen = self._returns.count
            rest = await self.expire()
            if is_told():
                await self._mind_others()
                rest = LOOK_AT_MEMORY if rest is None else min(rest, LOOK_AT_MEMORY)
            await self._returns.wait(seen, rest)

    async def expire(self) -> float | None:
        """Unload models that have been idle for too long or are outdated. Outdated models that are
        to be preloaded are loaded again.

        Returns: seconds until the next idle model's TTL is over; None: there is none with a TTL.
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
        """Drop the prompts kept for reuse when the memory pressure of other programs rises."""
        before, self._pressed = self._pressed, self._loads.pressure()
        if self._pressed > max(before, Pressure.NORMAL):
            freed = await self.clear_prefixes(None)
            log.info("other programs want memory: prompts are kept no more: %s", freed)

    async def _evict(self, fits: Callable[[Resident], bool]) -> Unloaded | None:
        """Unload the least recently used idle model of those that fit, pinned ones included, and
        wake the loads that wait for room."""
        resident = self._residents.remove_idle(fits)
        if resident is None:
            return None
        gone = await self._loads.unload(resident)
        self._returns.announce()
        return gone

    async def end_hanging(self, seconds: float) -> None:
        """End the workers that do no step for so many seconds while there is work; until
        cancelled."""
        while seconds:
            self._loads.end_hanging(seconds)
            await asyncio.sleep(max(MOST_OFTEN, min(seconds / 10, LEAST_OFTEN)))

    def _idle(self) -> list[Resident]:
        return self._residents.idle()

    async def reload(self) -> Reloaded:
        """Read the models' settings again, and unload the idle models that are outdated by them.

        Raises:
            InvalidSettings: the file is invalid, and the settings in force stay. The message names
                file, key and what is allowed.
        """
        async with self._reading:
            new = await self._on_disk(read_models_file, self._models_file)
            old = self._policy.models
            # The catalog must know the file's models before the policy applies its patterns.
            await self._on_disk(self.catalog.configure, new)
            self._policy.follow(new)
            self._remotes.follow(_places(new))
            self._loads.strikes.forget()
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
        """Return the names in the models' settings that are not on offer. Log them, and the
        aliases that are names of models on offer."""
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
        """Return the models to load before any request, the default model first."""
        settings = self._policy.models.models
        return [self._default, *(id for id, its in settings.items() if its.preload)]

    def _preload(self, model_ids: Sequence[str]) -> None:
        task = asyncio.create_task(self._preload_all(model_ids), name="preload")
        self._preloads.add(task)
        task.add_done_callback(self._preloads.discard)

    async def _preload_all(self, model_ids: Sequence[str]) -> None:
        """Load the models in turn; `Loads` logs those that fail."""
        for model_id in model_ids:
            with suppress(MLXManagerError):
                await self.get_model(model_id)

    async def close(self) -> None:
        """Abandon loads and end every worker, in use or not."""
        tasks = [*self._preloads, *self._looks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._remotes.close()
        await self._loads.close()

    async def _source(self, model_id: str) -> ModelSource:
        """Return the source of a model on disk, after downloading it if needed."""
        return await self._here(await self._on_disk(self.catalog.find, model_id))

    async def _named(self, name: str) -> ModelSource:
        """Return the source of a model that the owner's settings name, after downloading it if
        needed."""
        return await self._here(await self._on_disk(self.catalog.named, name))

    async def _here(self, source: ModelSource) -> ModelSource:
        if source.path is not None:
            return source
        folder = await self._fetch(source)
        here = await self._on_disk(described, source.id, folder, source.origin)
        return replace(source, path=folder, kind=here.kind, input_modalities=here.input_modalities)

    async def _fetch(self, source: ModelSource) -> Path:
        if not source.downloadable:
            raise ModelNotFound(
                f"{source.repository} has not been downloaded. The server's owner can run "
                f"`mlx-manager pull {source.repository}`, or set MLX_SERVER_ALLOW_DOWNLOAD=true.",
                param="model",
            )
        with explained(source.id):
            # A thread of its own: a download of hours must not delay the program's end.
            path = await DaemonThreads(1).run(partial(hub.fetch, source.repository))
        self.catalog.rescan()
        return path


def _places(models: ModelsFile) -> dict[str, Placement]:
    """Return where the models on other machines are, by their names."""
    return {
        name: Placement(own.url, own.key_env, own.remote_model, own.kind, own.timeout or SILENCE)
        for name, own in models.models.items()
        if own.url is not None
    }


def _elsewhere(status: ModelStatus, remote: Remote) -> ModelStatus:
    """Return the status of a model on other machines, as far as one of them has told it."""
    facts, failure = remote.facts, remote.failure
    status = replace(
        status,
        state="down" if failure is not None else "loadable" if facts is None else "loaded",
        failure=failure,
        kind=remote.kind,
        leases=remote.leases,
        servers=remote.servers(),
    )
    if facts is None:
        return status
    return replace(
        status,
        family=facts.family or status.family,
        context_length=facts.context_length,
        thinks=facts.thinks,
        input_modalities=facts.input_modalities or ("text",),
    )


def _memory(resident: Resident) -> dict[str, int]:
    """Return a model's ledger lines, in bytes: weights, draft, pages, states, working,
    snapshots."""
    lines = resident.worker.figures.ledger.items()
    return {line.partition(":")[0]: n for line, n in lines if line not in NOT_LINES}


@cache
def get_model_pool() -> ModelPoolManager:
    """Return the process's pool for scripts, made by the environment's settings on the first
    call."""
    settings = MLXServerSettings()
    return ModelPoolManager(settings.pool, settings.catalog, settings.engine)

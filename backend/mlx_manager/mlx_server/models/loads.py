"""Loading and unloading of models: a worker for each, started, watched and ended."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlx_manager.mlx_server.config import EngineLimits, PoolLimits
from mlx_manager.mlx_server.errors import (
    InvalidRequest,
    ModelDown,
    ModelLoadFailed,
    ModelLoadStalled,
    ModelNotFound,
    OutOfMemory,
    Overloaded,
    WorkerFailed,
)
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.facts import ModelFacts
from mlx_manager.mlx_server.models.grants import Grants
from mlx_manager.mlx_server.models.policy import Policy
from mlx_manager.mlx_server.models.residents import Resident, Residents, Returns
from mlx_manager.mlx_server.models.settings import Recipe
from mlx_manager.mlx_server.models.status import Unloaded
from mlx_manager.mlx_server.models.warming import read_system
from mlx_manager.mlx_server.utils.pressure import Pressure, PressureGauge, out_of_reach
from mlx_manager.mlx_server.utils.text import gigabytes, in_words
from mlx_manager.mlx_server.workers.messages import (
    DraftSource,
    Load,
    Look,
    Prepare,
    WorkerFigures,
)
from mlx_manager.mlx_server.workers.process import NO_LOG, LogSettings, Process, start_process
from mlx_manager.mlx_server.workers.proxy import Proxy
from mlx_manager.mlx_server.workers.worker import MemoryNews, Worker

T = TypeVar("T")
log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a load waits for leases of other models to end."""
OFTEN = 1.0
"""Seconds between two looks at how far a load is."""
FIGURES_SECONDS = 1.0
"""Seconds to wait for a worker that is asked for its figures."""
PARTING = 5.0
"""Seconds that a process gets to write the prefixes that it keeps to disk, before it is ended."""
STRIKES = 3
"""Failures in a row at the same activity after which a model's worker is not started again."""
ANSWERING = "answering"
NOT_LINES = frozenset({"limit", "available", "buffer_cache"})
"""Figures of a ledger that are no reservations."""

Start = Callable[[str, LogSettings], tuple[socket.socket, Process]]
"""Starts a worker of that name."""


@dataclass(slots=True)
class Strike:
    """Failures in a row of a model's workers, `times` at the same activity."""

    doing: str
    how: str
    times: int = 1


class Strikes:
    """Failures of workers, by model."""

    def __init__(self) -> None:
        self._last: dict[str, Strike] = {}
        self.counts: Counter[str] = Counter()

    def note(self, model_id: str, doing: str, how: str) -> None:
        """Record the failure of a worker."""
        self.counts[model_id] += 1
        last = self._last.get(model_id)
        again = last is not None and last.doing == doing
        times = last.times + 1 if last is not None and again else 1
        self._last[model_id] = Strike(doing, how, times)

    def note_load(self, model_id: str) -> None:
        """Record a load that went well: it ends a row of failed loads."""
        last = self._last.get(model_id)
        if last is not None and last.doing != ANSWERING:
            self.forget(model_id)

    def forget(self, model_id: str | None = None) -> None:
        """Forget the failures of a model, or of all, so that it is tried again."""
        if model_id is None:
            self._last.clear()
        else:
            self._last.pop(model_id, None)

    def reason(self, model_id: str) -> str | None:
        """Return why a model is left down; None if it is not."""
        last = self._last.get(model_id)
        if last is None or last.times < STRIKES:
            return None
        return f"its process has failed {last.times} times in a row while {last.doing}: {last.how}"

    def down(self) -> dict[str, str]:
        """Return the models that are left down, and how their processes ended last."""
        return {id: last.how for id, last in [*self._last.items()] if last.times >= STRIKES}


class Loads:
    """Loader of models, which loads each once at a time and grants memory to their workers.

    The end of a worker is handled on a thread of its own, so the tables that this class changes
    are safe to use from any thread.

    find: returns the source of a model once it is on disk. find_named: the same for one that the
    owner's settings name.

    Attributes:
        grants: the memory of all workers.
        under_way: the running loads by model.
        done, gone: loads and unloads so far, by model.
    """

    def __init__(
        self,
        limits: PoolLimits,
        engine: EngineLimits,
        find: Callable[[str], Awaitable[ModelSource]],
        policy: Policy,
        residents: Residents,
        *,
        find_named: Callable[[str], Awaitable[ModelSource]],
        start: Start = start_process,
        log_settings: LogSettings = NO_LOG,
        patience: float = PATIENCE,
    ) -> None:
        self.grants = Grants(limits.memory_limit, self._idle_workers, self._let_go_for_room)
        self.strikes = Strikes()
        self.returns = Returns()
        self.pressure = PressureGauge()
        self.under_way: dict[str, asyncio.Task[None]] = {}
        self.done: Counter[str] = Counter()
        self.gone: Counter[str] = Counter()
        self._limits = limits
        self._engine = engine
        self._find, self._find_named = find, find_named
        self._policy = policy
        self._residents = residents
        self._start = start
        self._log_settings = log_settings
        self._patience = patience
        self._workers: dict[str, Worker] = {}
        self._told_ready = False

    # -- loading -------------------------------------------------------------------------------

    async def once(self, model_id: str) -> None:
        """Wait for the one load of this model; it goes on if this caller gives up.

        Raises:
            ModelLoadFailed: it can't be loaded; the subclasses tell why.
            OutOfMemory: the models in use leave no room for it, and did so for a minute.
            WorkerFailed: its process has ended.
        """
        load = self.under_way.get(model_id)
        if load is None:
            load = asyncio.create_task(self._load(model_id), name=f"load {model_id}")
            self.under_way[model_id] = load
            load.add_done_callback(partial(self._loaded, model_id))
        await asyncio.shield(load)

    def doing(self, model_id: str) -> str | None:
        """Return what a model's load is at; None if it is not being loaded."""
        if model_id not in self.under_way:
            return None
        worker = self._workers.get(model_id)
        return "it is downloaded" if worker is None else worker.doing

    def _loaded(self, model_id: str, load: asyncio.Task[None]) -> None:
        del self.under_way[model_id]
        if load.cancelled():
            return
        # Nobody may wait any more, so the failure is logged, and so retrieved, here. After a
        # success the model's idle time begins.
        if (error := load.exception()) is not None:
            level = logging.INFO if isinstance(error, ModelNotFound) else logging.WARNING
            log.log(level, "%s was not loaded: %s", model_id, error)
        else:
            self.returns.announce()

    async def _load(self, model_id: str) -> None:
        # The time limit of `patience` excludes a download.
        source, recipe = await self._find(model_id), self._policy.of(model_id).recipe
        await self._drafting(source, recipe)
        await self._head_of(recipe)
        if (down := self.strikes.reason(model_id)) is not None:
            raise ModelDown(
                f"{model_id} is down: {down}. It is left down until its owner unloads it (POST "
                "/v1/admin/models/unload) or has the settings read again."
            )
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        worker: Worker | None = None
        try:
            while True:
                seen = self.returns.count
                # The settings may have been read again meanwhile. If they are read again after this
                # line, the recipe marks the model as outdated, whatever its source.
                recipe = self._policy.of(model_id).recipe
                source = await self._find(model_id)
                worker = worker or await self._begin(source.id)
                try:
                    await self._bring(worker, source, recipe)
                except OutOfMemory:
                    in_use = any(map(self._residents.in_use, self._residents.all()))
                    settled = not in_use and seen == self.returns.count
                    if settled or loop.time() >= give_up:
                        raise
                else:
                    worker = None
                    return
                await self.returns.wait(seen, give_up - loop.time())
        finally:
            if worker is not None:
                worker.kill()

    async def _drafting(self, source: ModelSource, recipe: Recipe) -> DraftSource | None:
        """Return the draft model of a model, once it is on disk; None if it has none.

        Raises:
            ModelNotFound, DownloadFailed: the owner names one that is not here.
            ModelLoadFailed: the owner names one on another machine.
        """
        name = recipe.draft_model or self._limits.draft_model
        if name is None:
            return None
        if self._policy.of(self._policy.engine_of(name)).url is not None:
            raise ModelLoadFailed(
                f"{name} is on another machine, and can't draft for {source.id}: `draft_model` "
                "must be the id or the folder of a model that can be loaded here."
            )
        draft = await self._find_named(name)
        usual = recipe.draft_model is None
        if usual and recipe.head is not None:
            # The owner names what drafts for this model.
            return None
        if usual and (draft.path == source.path or source.kind != "text"):
            # It is the draft model of others, or generates nothing.
            return None
        return DraftSource(draft, self._policy.of(name).recipe, required=not usual)

    async def _head_of(self, recipe: Recipe) -> ModelSource | None:
        """Return the folder of the MTP head that a recipe names, once it is on disk; None if it
        names none.

        Raises:
            ModelNotFound, DownloadFailed: it is not here.
        """
        return None if recipe.head is None else await self._find_named(recipe.head)

    async def _begin(self, model_id: str) -> Worker:
        """Start a worker and have it say hello."""
        try:
            end, process = self._start(model_id, self._log_settings)
        except OSError as error:
            raise WorkerFailed(f"No process can be started for {model_id}: {error}.") from error
        worker = Worker(model_id, end, process, self._hear, self._lost)
        self._workers[model_id] = worker
        self.grants.enter(worker)
        begun = False
        try:
            hello = await self._watched(worker, asyncio.wrap_future(worker.hello))
            self.grants.limit = self.grants.limit or hello.limit
            if not self._told_ready:
                self._told_ready = True
                self._tell("ready to load models")
            begun = True
            return worker
        finally:
            if not begun:
                worker.kill()

    async def _bring(self, worker: Worker, source: ModelSource, recipe: Recipe) -> None:
        """Load a model into a worker, and take it among the residents."""
        if self.pressure() is Pressure.CRITICAL:
            raise out_of_reach(f"{source.id} is not loaded")
        limit = self.grants.limit
        draft, head = await self._drafting(source, recipe), await self._head_of(recipe)
        prepare = Prepare(source, recipe, self._limits, self._engine, limit, draft, head)
        nbytes: int = await self._watched(worker, worker.ask(prepare))
        await self._make_place(worker, source.id, nbytes)
        facts: ModelFacts = await self._watched(worker, worker.ask(Load()))
        proxy = Proxy(worker, facts)
        for name in self._policy.warmed(source.id):
            await self._warm(worker, proxy, facts, name)
        if self._engine.prefix_disk is not None and facts.kind == "text":
            worker.parting = PARTING
        resident = Resident(source.id, facts, proxy, source, recipe, worker)
        self._residents.add(resident)
        if worker.ended:
            self._residents.remove(resident)
            raise worker.failure()
        self.done[source.id] += 1
        self.strikes.note_load(source.id)
        await self._look_at(worker)
        self._tell(
            f"{source.id} is loaded in {facts.seconds:.1f} s: {gigabytes(facts.nbytes)} of "
            f"weights, {facts.weights.name} ({facts.weights.reason})",
            model=source.id,
            seconds=round(facts.seconds, 3),
            weights_bytes=facts.nbytes,
        )

    async def _warm(self, worker: Worker, proxy: Proxy, facts: ModelFacts, name: str) -> None:
        """Have a worker read the prompts that the settings of `name` list.

        Raises:
            ModelLoadFailed: one can't be read; names the setting.
            WorkerFailed: the worker has ended.
        """
        settings = self._policy.of(name)
        for path in settings.warm:
            setting = f"models.{json.dumps(name)}.warm: {path}"
            if not self._engine.prefix_cache:
                log.warning("%s is not read ahead: MLX_SERVER_PREFIX_CACHE is false", setting)
                continue
            worker.begin(f"it reads {path.name}")
            work = read_system(proxy, facts, name, path, settings.overlay)
            try:
                usage = await self._watched(worker, work, stepping=True)
            except (OSError, UnicodeDecodeError, InvalidRequest) as error:
                raise ModelLoadFailed(f"{setting} can't be read ahead: {error}") from error
            except Overloaded as error:
                # It is a matter of speed alone, and the next request may find room.
                log.warning("%s is not read ahead: %s", setting, error)
            else:
                log.info("%s: %s tokens are read ahead", setting, f"{usage.prompt_tokens:,}")

    async def _watched(self, worker: Worker, work: Awaitable[T], *, stepping: bool = False) -> T:
        """Return the result of `work`, unless the worker makes no progress. stepping: steps count
        as progress.

        Raises:
            ModelLoadStalled: the worker reported no progress for `load_timeout` seconds.
        """
        loop, limit = asyncio.get_running_loop(), self._limits.load_timeout
        task = asyncio.ensure_future(work)
        progress, since = -1, 0.0
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=OFTEN)
                if done:
                    return task.result()
                if stepping:
                    since = max(since, loop.time() - worker.silence)
                if worker.progress != progress:
                    progress, since = worker.progress, loop.time()
                    log.info("loading %s: %s", worker.name, worker.doing)
                elif limit is not None and loop.time() > since + limit:
                    worker.kill(f"it got no further for {limit:g} s")
                    raise ModelLoadStalled(
                        f"The load of {worker.name} got no further for {limit:g} s "
                        f"(MLX_SERVER_LOAD_TIMEOUT_SECONDS), after this had begun: {worker.doing}."
                    )
        finally:
            task.cancel()

    async def _make_place(self, worker: Worker, model_id: str, nbytes: int) -> None:
        """Evict until one more model may be loaded, if it can be."""
        if nbytes > self.grants.attainable(worker):
            # Evictions would be in vain and repeat with the next request. The worker says why.
            return
        while len(self._residents.all()) >= self._limits.max_models:
            gone = self._residents.remove_idle(self._policy.may_make_place)
            if gone is None:
                raise OutOfMemory(self._crowd(), retry_after=10)
            await self.unload(gone)

    def _crowd(self) -> str:
        residents = self._residents.all()
        in_use = sum(map(self._residents.in_use, residents))
        pinned = sum(1 for resident in residents if self._policy.is_pinned(resident.id))
        return (
            f"{len(residents)} models are loaded, {in_use} in use and {pinned} pinned, and no more "
            "may be (MLX_SERVER_MAX_MODELS)."
        )

    # -- letting go ----------------------------------------------------------------------------

    async def unload(self, resident: Resident) -> Unloaded:
        """End the worker of a model that is no resident any more."""
        worker = resident.worker
        await self._look_at(worker)
        freed = worker.figures.memory.get("active", resident.facts.nbytes)
        before = self.figures()["mlx"]["active"] + freed
        self._let_go(resident)
        await asyncio.shield(asyncio.wrap_future(worker.over))
        said = f"{resident.id} is unloaded: {gigabytes(freed)} are free again"
        self._tell(said, model=resident.id)
        return Unloaded(resident.id, resident.facts.nbytes, before, before - freed)

    def _tell(self, said: str, **facts: object) -> None:
        """Log a message with MLX's memory use: in words, and in bytes for machines."""
        usage = self.figures()["mlx"]
        told = {f"memory_{name}_bytes": nbytes for name, nbytes in usage.items()}
        extra = {"facts": {**facts, **told}}
        log.info("%s; %s", said, in_words(usage), extra=extra)

    async def close(self) -> None:
        """Abandon loads and end every worker, in use or not."""
        tasks = list(self.under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = list(self._workers.values())
        for worker in workers:
            worker.kill()
        for worker in workers:
            await asyncio.shield(asyncio.wrap_future(worker.over))

    def _let_go(self, resident: Resident) -> None:
        self.gone[resident.id] += 1
        resident.worker.kill()

    def _let_go_for_room(self, worker: Worker) -> bool:
        """Unload an idle model whose memory is needed; False if somebody has come to use it."""

        def is_it(resident: Resident) -> bool:
            return resident.worker is worker and self._policy.may_make_place(resident)

        resident = self._residents.remove_idle(is_it)
        if resident is None:
            return False
        log.info("%s is unloaded to make room for another model", resident.id)
        self._let_go(resident)
        return True

    def _idle_workers(self) -> list[Worker]:
        """Return the workers whose models may be evicted, the least recently used first."""
        return [
            resident.worker
            for resident in self._residents.idle()
            if self._policy.may_make_place(resident)
        ]

    # -- workers' news, on threads of theirs ---------------------------------------------------

    def _hear(self, worker: Worker, news: MemoryNews) -> None:
        self.grants.heard(worker, news)

    def _lost(self, worker: Worker, how: str) -> None:
        """Clean up after a worker that has ended, on purpose or not."""
        resident = self._residents.of(worker)
        if resident is not None:
            self._residents.remove(resident)
            self.gone[resident.id] += 1
        if worker.served:
            # A worker that has served ends the row of failures.
            self.strikes.forget(worker.name)
        self.grants.ended(worker)
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]
        if worker.wanted:
            doing = ANSWERING if resident is not None else worker.doing
            self.strikes.note(worker.name, doing, how)
            log.error("the process of %s has failed while %s: %s", worker.name, doing, how)

    # -- watching them -------------------------------------------------------------------------

    async def look(self) -> None:
        """Have all workers tell their figures."""
        workers = [resident.worker for resident in self._residents.all()]
        await asyncio.gather(*map(self._look_at, workers))

    async def _look_at(self, worker: Worker) -> None:
        # A worker that does not answer keeps its last figures.
        with suppress(WorkerFailed, TimeoutError):
            async with asyncio.timeout(FIGURES_SECONDS):
                found: WorkerFigures = await worker.ask(Look())
                worker.figures = found

    def figures(self) -> dict[str, Any]:
        """Return the figures of `pool.figures`, as at the last look."""
        residents = [r for r in self._residents.all() if r.worker.figures.engine is not None]
        ledger: dict[str, int] = {}
        mlx = dict.fromkeys(("active", "peak", "cache"), 0)
        cache = 0
        for resident in residents:
            figures = resident.worker.figures
            ledger |= {n: nbytes for n, nbytes in figures.ledger.items() if n not in NOT_LINES}
            cache += figures.ledger.get("buffer_cache", 0)
            for name in mlx:
                mlx[name] += figures.memory.get(name, 0)
        limit = self.grants.limit
        available = limit - sum(ledger.values()) - cache
        return {
            "ledger": {**ledger, "buffer_cache": cache, "limit": limit, "available": available},
            "mlx": {**mlx, "limit": limit},
            "engines": {r.id: r.worker.figures.engine for r in residents},
            "loads": dict(self.done),
            "unloads": dict(self.gone),
            "failures": dict(self.strikes.counts),
            "down": self.strikes.down(),
        }

    def end_hanging(self, seconds: float) -> None:
        """End the workers that have had work and done no step for so long."""
        for resident in self._residents.all():
            worker = resident.worker
            if worker.silence > seconds and worker.wanted:
                worker.kill(f"no step was done for {seconds:g} s (MLX_SERVER_WATCHDOG_SECONDS)")

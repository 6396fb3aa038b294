"""Which models are in memory: loaded when asked for, kept while there is room, evicted when idle.

Loads run piece by piece on the MLX thread, between the steps of models that are answering. One
load a model, however many ask for it; who asks for a model that does not fit beside those in use
waits for them to be given back, for a while.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from mlx_manager.mlx_server.config import CatalogSources, PoolLimits
from mlx_manager.mlx_server.errors import (
    InvalidRequest,
    MLXManagerError,
    ModelNotFound,
    OutOfMemory,
)
from mlx_manager.mlx_server.models import hub
from mlx_manager.mlx_server.models.catalog import Catalog, ModelSource
from mlx_manager.mlx_server.models.loading import LoadedModel, advance, loading, weights_line
from mlx_manager.mlx_server.models.residents import ModelBackend, Resident, Residents
from mlx_manager.mlx_server.models.weights import WeightsForm
from mlx_manager.mlx_server.utils.memory import (
    Ledger,
    Relief,
    clear_cache,
    default_limit,
    get_memory_usage,
    set_memory_limit,
)

T = TypeVar("T")
State = Literal["loaded", "loading", "loadable"]
PATIENCE = 60.0
"""Seconds that a load waits for models in use to be given back."""
log = logging.getLogger(__name__)


class Thread(Protocol):
    """The MLX thread: everything that touches arrays runs there."""

    async def call(self, function: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What `/v1/models` says of one model. nbytes: measured once loaded, of its files before."""

    id: str
    state: State
    origin: str
    family: str
    model_type: str
    context_length: int
    nbytes: int
    weights: WeightsForm | None = None
    leases: int = 0


class ModelPoolManager:
    """Hands out loaded models. Its methods run in asyncio, `_on_mlx` ones on the MLX thread.

    make_backend: called on the MLX thread with a model just loaded.
    """

    def __init__(
        self,
        limits: PoolLimits,
        sources: CatalogSources,
        thread: Thread,
        make_backend: Callable[[LoadedModel, Ledger], ModelBackend],
        *,
        catalog: Catalog | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.ledger = Ledger(limits.memory_limit or default_limit())
        self.ledger.add_relief(Relief.IDLE_MODELS, self._relieve_on_mlx)
        self.catalog = catalog or Catalog(sources)
        self._default = sources.default_model
        self._aliases = sources.model_aliases
        self._limits = limits
        self._thread = thread
        self._make_backend = make_backend
        self._patience = patience
        self._residents = Residents()
        self._loads_done: Counter[str] = Counter()
        self._unloads_done: Counter[str] = Counter()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._loading = asyncio.Lock()
        self._returns = Returns()
        set_memory_limit(self.ledger.limit)

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
    async def lease(self, model_id: str | None = None) -> AsyncIterator[Resident]:
        """`get_model`, and the model stays in memory for the length of the context."""
        name = self.resolve(model_id)
        while (resident := self._residents.lease(name)) is None:
            await self._load_once(name)
        try:
            yield resident
        finally:
            self._residents.give_back(resident)
            self._returns.announce()

    def resolve(self, model_id: str | None) -> str:
        """The id that a request's `model` means: none, "" and "default" mean the default one.

        Any other name is an alias if it fits one's pattern, and else the id itself.
        """
        if model_id is None or model_id in ("", "default"):
            return self._default
        fits = (model for name, model in self._aliases if fnmatchcase(model_id, name))
        return next(fits, model_id)

    # -- looking at it -------------------------------------------------------------------------

    async def models(self) -> tuple[ModelStatus, ...]:
        """Every model that a request may name, also while one is loading."""
        sources = await asyncio.to_thread(self.catalog.models)
        residents = {resident.id: resident for resident in self._residents.all()}
        return tuple(self._status(source, residents.get(source.id)) for source in sources)

    def figures(self) -> dict[str, Any]:
        """`ledger` and `mlx` in bytes; `engines`, and `loads` and `unloads` so far, by model."""
        return {
            "ledger": self.ledger.figures(),
            "mlx": get_memory_usage(),
            "engines": {r.id: asdict(r.backend.stats()) for r in self._residents.all()},
            "loads": dict(self._loads_done),
            "unloads": dict(self._unloads_done),
        }

    def _status(self, source: ModelSource, resident: Resident | None) -> ModelStatus:
        status = ModelStatus(
            source.id,
            "loading" if source.id in self._loads else "loadable",
            source.origin,
            source.family,
            source.model_type,
            source.context_length,
            source.nbytes,
        )
        if resident is None:
            return status
        loaded = resident.loaded
        return replace(
            status,
            state="loaded",
            family=loaded.family,
            context_length=loaded.context_length,
            nbytes=loaded.nbytes,
            weights=loaded.weights,
            leases=resident.leases,
        )

    # -- letting go ----------------------------------------------------------------------------

    async def unload(self, model_id: str) -> None:
        """Free a model's memory; nothing happens if it is not loaded.

        Raises:
            InvalidRequest: it is answering requests.
        """
        if await self._thread.call(partial(self._evict_on_mlx, model_id)):
            return
        if any(resident.id == model_id for resident in self._residents.all()):
            raise InvalidRequest(f"{model_id} is answering requests.", param="model")

    async def close(self) -> None:
        """Abandon loads and free every model, in use or not."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
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
        # Everybody who waited may have gone: the failure is logged, and so retrieved, here.
        if not load.cancelled() and (error := load.exception()) is not None:
            level = logging.INFO if isinstance(error, ModelNotFound) else logging.WARNING
            log.log(level, "%s was not loaded: %s", model_id, error)

    async def _load(self, model_id: str) -> None:
        source = await asyncio.to_thread(self.catalog.find, model_id)
        if source.path is None:
            source = replace(source, path=await self._fetch(source))
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        while True:
            seen = self._returns.count
            try:
                return await self._load_pieces(source)
            except MLXManagerError as error:
                if not isinstance(error, OutOfMemory) or loop.time() >= give_up:
                    raise without_frames(error) from None
                in_use = any(resident.leases for resident in self._residents.all())
                if not in_use and seen == self._returns.count:
                    raise without_frames(error) from None
            await self._returns.wait(seen, give_up - loop.time())

    async def _fetch(self, source: ModelSource) -> Path:
        if not source.downloadable:
            raise ModelNotFound(
                f"{source.id} has not been downloaded. The server's owner can run "
                f"`mlx-manager pull {source.id}`, or set MLX_SERVER_ALLOW_DOWNLOAD=true.",
                param="model",
            )
        path = await in_daemon_thread(partial(hub.fetch, source.id))
        self.catalog.rescan()
        return path

    async def _load_pieces(self, source: ModelSource) -> None:
        """Load between other models' steps, one model at a time."""
        async with self._loading:
            steps = loading(source, self._limits, self.ledger)
            try:
                await self._thread.call(self._make_place_on_mlx)
                while (loaded := await self._thread.call(partial(advance, steps))) is None:
                    pass
                await self._thread.call(partial(self._take_on_mlx, loaded))
            finally:
                await self._thread.call(steps.close)

    def _make_place_on_mlx(self) -> None:
        """Evict until one more model may be loaded."""
        while len(self._residents.all()) >= self._limits.max_models:
            if not self._evict_on_mlx():
                raise OutOfMemory(
                    f"{self._limits.max_models} models are loaded and in use, and no more may be "
                    "(MLX_SERVER_MAX_MODELS).",
                    retry_after=10,
                )

    def _take_on_mlx(self, loaded: LoadedModel) -> None:
        backend: ModelBackend | None = None
        try:
            backend = self._make_backend(loaded, self.ledger)
        finally:
            if backend is None:
                self.ledger.record(weights_line(loaded.id), 0)
        self._residents.add(Resident(loaded.id, loaded, backend))
        self._loads_done[loaded.id] += 1
        log.info(
            "%s is loaded: %s bytes, weights %s (%s)",
            loaded.id,
            f"{loaded.nbytes:,}",
            loaded.weights.name,
            loaded.weights.reason,
        )

    # -- on the MLX thread ---------------------------------------------------------------------

    def _relieve_on_mlx(self, lacking: int) -> None:
        """Evict idle models, the least recently used first, until the bytes are there."""
        enough = self.ledger.available() + lacking
        while self.ledger.available() < enough and self._evict_on_mlx():
            pass

    def _evict_on_mlx(self, model_id: str | None = None) -> bool:
        """Free the least recently used idle model, or that one; False if there is none."""
        return self._free_on_mlx(partial(self._residents.remove_idle, model_id))

    def _close_on_mlx(self) -> None:
        while self._free_on_mlx(self._residents.remove_any):
            pass

    def _free_on_mlx(self, remove: Callable[[], Resident | None]) -> bool:
        resident = remove()
        if resident is None:
            return False
        log.info("%s is unloaded", resident.id)
        self._unloads_done[resident.id] += 1
        resident.backend.close()
        self.ledger.record(weights_line(resident.id), 0)
        # The last reference, but for those among modules and bound methods of their own.
        del resident
        gc.collect()
        clear_cache()
        return True


def without_frames(error: MLXManagerError) -> MLXManagerError:
    """The error without its tracebacks, whose frames would keep a model's weights alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """`asyncio.to_thread` for what may take hours: the program can end while it runs."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except (MLXManagerError, OSError, RuntimeError, ValueError) as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)


class Returns:
    """Counts the leases given back, and wakes who waits for the next."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def announce(self) -> None:
        self.count += 1
        self._next.set()

    async def wait(self, seen: int, seconds: float) -> None:
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

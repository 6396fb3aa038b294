"""Jobs of the tower (`vision/towers`): one for each picture that rows wait for, in slices between
steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import mlx.core as mx

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.engine.disk.pictures import KeptFeatures
from mlx_manager.mlx_server.engine.pictures.features import FeatureCache
from mlx_manager.mlx_server.engine.prompt_images import Tower
from mlx_manager.mlx_server.engine.sequence import Sequence as Row
from mlx_manager.mlx_server.errors import OutOfMemory
from mlx_manager.mlx_server.execution.images import Features
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads
from mlx_manager.mlx_server.utils.text import sized

# Pictures that are decoded at once, and jobs that may have pixels that the tower has not read.
DECODED_AT_ONCE = 1
PIXELS_AHEAD = 2
# Slices that are queued at once on a GPU while nobody waits for a step.
SLICES_ON_A_GPU = 4
# Slices whose seconds are kept. The longest does not count: the first of a kind loads its kernels.
SLICES_KEPT = 16
# Bytes that the tower works on for each row of features, until more have been seen.
ROW_BYTES = 1 << 18
# Seconds that a step without other work waits for pixels where nobody wakes the thread.
PATIENCE = 0.01


Stages = Generator[Sequence[mx.array], None, Features]


@dataclass(frozen=True, slots=True)
class TowerInput:
    """A picture's pixels, or its features from disk.

    stages: returns the slices of work that make features of it. nbytes: bytes that these work on;
    None: as many for each row as the tower takes.
    """

    stages: Callable[[], Stages]
    nbytes: int | None = None


class Job:
    """Work on one picture.

    digest, image: of the picture. count: its rows. kept: whether its features are on disk. rows:
    the rows that wait for it, by key. source: what the host gets ready. stages: what is left to do
    then. seconds: those that the tower has worked on it; None: it has not.
    """

    def __init__(self, digest: str, image: core.Image, count: int, kept: bool) -> None:
        self.digest = digest
        self.image = image
        self.count = count
        self.kept = kept
        self.rows: dict[int, Row] = {}
        self.source: Future[TowerInput] | None = None
        self.stages: Stages | None = None
        self.seconds: float | None = None

    @property
    def waits_for_host(self) -> bool:
        """True while there is nothing to go on with, as pixels, or features from disk, have not
        come."""
        return self.stages is None and not (self.source is not None and self.source.done())


class TowerJobs:
    """Jobs of one tower, the most urgent row's first.

    Args:
        tower: reads pictures.
        cache: takes features, and accounts for what the tower works on.
        wake: called on another thread when pixels have come; None: nobody need be woken.
        clock: returns seconds.

    Attributes:
        kept: features of pictures on disk, if some are kept there.
        slices: slices that have been run.
        at_fault: the job that is being worked on: an error then fails its rows alone.
    """

    def __init__(
        self,
        tower: Tower,
        cache: FeatureCache,
        wake: Callable[[], None] | None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.kept: KeptFeatures | None = None
        self.slices = 0
        self.at_fault: Job | None = None
        self._tower = tower
        self._cache = cache
        self._wake = wake
        self._clock = clock
        self._threads = DaemonThreads(DECODED_AT_ONCE)
        self._jobs: dict[str, Job] = {}
        self._current: Job | None = None
        self._row_bytes = ROW_BYTES
        # Seconds that slices may take beside steps, and those that the last slices took.
        self._credit = 0.0
        self._seconds: deque[float] = deque(maxlen=SLICES_KEPT)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of the rows that wait for any job."""
        return len({key for job in self._jobs.values() for key in job.rows})

    @property
    def waits_for_host(self) -> bool:
        """True while no job can go on before something has come: pixels, or features from disk."""
        return all(job.waits_for_host for job in self._jobs.values())

    # -- jobs ----------------------------------------------------------------------------------

    def want(self, digest: str, image: core.Image, count: int, row: Row) -> None:
        """Have a row wait for a picture's features."""
        job = self._jobs.get(digest)
        if job is None:
            kept = self.kept is not None and self.kept.has(digest, count)
            job = self._jobs[digest] = Job(digest, image, count, kept)
        job.rows[row.key] = row
        self._fetch()

    def leave(self, row: Row) -> None:
        """End the wait of a row; jobs that nobody waits for end with it."""
        for job in [job for job in self._jobs.values() if row.key in job.rows]:
            del job.rows[row.key]
            if not job.rows:
                self._end(job)

    def drop_all(self) -> None:
        """End all jobs."""
        for job in list(self._jobs.values()):
            self._end(job)
        self.at_fault = None

    def _end(self, job: Job) -> None:
        del self._jobs[job.digest]
        if job.source is not None:
            job.source.cancel()
        if job is self._current:
            self._current = None
            if job.stages is not None:
                job.stages.close()
            self._cache.record_working(0)
        self._fetch()

    def _in_order(self) -> list[Job]:
        return sorted(
            self._jobs.values(), key=lambda job: min(row.priority for row in job.rows.values())
        )

    def _fetch(self) -> None:
        for job in self._in_order()[:PIXELS_AHEAD]:
            if job.source is None and job.stages is None:
                read = self._read if job.kept else self._decode
                job.source = self._threads.submit(partial(read, job))
                job.source.add_done_callback(self._note_source)

    def _note_source(self, _: Future[TowerInput]) -> None:
        if self._wake is not None:
            self._wake()

    # -- on the host's thread ------------------------------------------------------------------

    def _decode(self, job: Job) -> TowerInput:
        """Return a picture's pixels."""
        return TowerInput(partial(self._tower.stages, self._tower.pixels(job.image)))

    def _read(self, job: Job) -> TowerInput:
        """Return a picture's features from disk, or its pixels if they can't be read."""
        kept, tower = self.kept, self._tower
        assert kept is not None
        block = kept.read(job.digest, (job.count, tower.width), tower.levels)
        if block is None:
            return self._decode(job)
        return TowerInput(partial(kept.stages, block), 2 * block.nbytes)

    # -- slices --------------------------------------------------------------------------------

    def advance(self, seconds: float | None) -> tuple[Job, Features] | None:
        """Run slices beside a step, for about so many seconds on average; None: there is no step.
        Return a job that they complete, with its features.

        Raises:
            OutOfMemory: there is no memory for what the tower works on, and no step that would free
                some.
            Exception: the tower's own, or that of pixels. `at_fault` then is the job.
        """
        alone = seconds is None
        self._credit += seconds or 0.0
        self._credit = 0.0 if alone else min(self._credit, max(seconds or 0.0, self._took))
        while alone or self._credit >= self._took:
            job = self._next(alone=alone)
            if job is None:
                return None
            self.at_fault = job
            features = self._run(job, self._at_once(alone=alone))
            self.at_fault = None
            if features is not None:
                # The next job's error must not lose them.
                self._end(job)
                if self.kept is not None and job.seconds is not None:
                    self.kept.observe(job.count, job.seconds)
                return job, features
            if alone:
                return None
        return None

    @property
    def _took(self) -> float:
        """Return the seconds that a slice is expected to take; 0: unknown."""
        return sorted(self._seconds)[-2] if len(self._seconds) > 1 else 0.0

    def _at_once(self, *, alone: bool) -> int:
        """Return how many slices are queued at once: a GPU idles between them."""
        if mx.default_device() == mx.cpu or not self._took:
            return 1
        return SLICES_ON_A_GPU if alone else max(1, int(self._credit / self._took))

    def _next(self, *, alone: bool) -> Job | None:
        """Return the job to go on with, if one can; its pixels, or features, have been taken and
        there is memory for it."""
        if self._current is not None:
            return self._current
        ready = next((job for job in self._in_order() if not job.waits_for_host), None)
        if ready is None:
            if alone and self._wake is None:
                wait([job.source for job in self._jobs.values() if job.source], PATIENCE)
            return None
        self.at_fault = ready
        assert ready.source is not None
        # Raises what the pixels' thread has raised.
        source = ready.source.result()
        read = source.nbytes
        nbytes = ready.count * self._row_bytes if read is None else read
        if not self._cache.reserve_working(nbytes):
            if alone:
                raise OutOfMemory(
                    f"To read the picture takes about {sized(nbytes)}, which can't be had.",
                    retry_after=10,
                )
            self.at_fault = None
            return None
        ready.source, ready.stages = None, source.stages()
        ready.seconds = 0.0 if read is None else None
        self._current, self.at_fault = ready, None
        return ready

    def _run(self, job: Job, most: int) -> Features | None:
        """Run up to `most` slices; return the features if the last was among them."""
        assert job.stages is not None
        began, active, peak = self._clock(), mx.get_active_memory(), mx.get_peak_memory()
        arrays: Sequence[mx.array] = ()
        features, run = None, 0
        while run < most and features is None:
            try:
                arrays = next(job.stages)
            except StopIteration as end:
                features = end.value
                arrays = [features.rows, *features.levels]
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]
            run += 1
        mx.eval(arrays)
        self.slices += run
        took = self._clock() - began
        # Some slices take next to nothing. The next one may take as long as the longest.
        self._seconds.append(took / run)
        # A slice that has taken much longer than others does not hold up the next ones.
        self._credit = max(self._credit - took, -self._took)
        if job.seconds is not None:
            job.seconds += took
            if mx.get_peak_memory() > peak:
                self._learn(job, mx.get_peak_memory() - active)
        return features

    def _learn(self, job: Job, nbytes: int) -> None:
        """Learn that slices of a job have worked on so many bytes."""
        if nbytes > job.count * self._row_bytes:
            self._row_bytes = -(-nbytes // job.count)
            self._cache.record_working(nbytes)

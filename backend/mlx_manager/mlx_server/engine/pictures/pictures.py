"""Pictures of an engine's rows, and their features."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from mlx_manager.mlx_server.engine.disk.pictures import KeptFeatures
from mlx_manager.mlx_server.engine.memory.line import Line
from mlx_manager.mlx_server.engine.pictures.features import FeatureCache
from mlx_manager.mlx_server.engine.pictures.jobs import TowerJobs
from mlx_manager.mlx_server.engine.prompt_images import Picture, Tower
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.errors import GenerationFailed, MLXManagerError


class Pictures:
    """Pictures of the rows of an engine whose model sees.

    Args:
        tower: reads pictures.
        line: `images:<model>` in the ledger.
        most: bytes of features that are kept for reuse.
        wake, clock: see `TowerJobs`.
    """

    def __init__(
        self,
        tower: Tower,
        line: Line,
        most: int,
        wake: Callable[[], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self.cache = FeatureCache(line, most)
        self._jobs = TowerJobs(tower, self.cache, wake, clock)
        self._wakes = wake is not None

    @property
    def busy(self) -> bool:
        """True while rows wait for the tower."""
        return bool(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of the rows that wait for the tower."""
        return self._jobs.waiting

    @property
    def awaited(self) -> bool:
        """True while rows wait for the tower, and it for pixels, whose coming wakes the thread."""
        return self._wakes and bool(self._jobs) and self._jobs.waits_for_host

    @property
    def slices(self) -> int:
        """Number of the tower's slices that have been run."""
        return self._jobs.slices

    # -- disk ----------------------------------------------------------------------------------

    def keep_on(self, kept: KeptFeatures) -> None:
        """Have features kept on disk: those that are used a second time, and those that memory is
        about to give up."""
        self._jobs.kept = kept

    def keep_all(self) -> None:
        """Have all features written that are in memory, those used last first."""
        self._keep(reversed(list(self.cache)))

    def _keep(self, digests: Iterable[str]) -> None:
        kept = self._jobs.kept
        if kept is not None:
            for digest in digests:
                kept.want(digest, partial(self.cache.find, digest))

    # -- rows ----------------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> None:
        """Find the features that an admitted sequence lacks behind what is computed, or have the
        tower make them. Again once tokens have come from disk, or have not."""
        images = sequence.images
        assert images is not None
        for picture in images.pictures:
            first, last = picture.places[0], picture.places[-1]
            from_disk = sequence.awaits <= first and last < sequence.arrives < sys.maxsize
            if last < sequence.computed or from_disk or picture.digest in sequence.features:
                continue
            features = self.cache.hold(picture.digest, sequence.key)
            if features is not None:
                sequence.features[picture.digest] = features
                self._keep([picture.digest])
            else:
                count = len(picture.places)
                self._jobs.want(picture.digest, picture.image, count, sequence)
        _set_ready(sequence)

    def passed(self, sequence: Sequence) -> None:
        """Release the features of a prompt that has been launched as far as `computed`."""
        images = sequence.images
        if images is None or not sequence.features:
            return
        ahead = {p.digest for p in images.pictures if p.places[-1] >= sequence.computed}
        for digest in [digest for digest in sequence.features if digest not in ahead]:
            del sequence.features[digest]
            self.cache.release(digest, sequence.key)

    def forget(self, sequence: Sequence) -> None:
        """Release all that a sequence holds or waits for: it has ended or is paused."""
        if sequence.images is None:
            return
        for digest in sequence.features:
            self.cache.release(digest, sequence.key)
        sequence.features.clear()
        sequence.ready = sys.maxsize
        self._jobs.leave(sequence)

    # -- the tower -----------------------------------------------------------------------------

    def advance(self, seconds: float | None) -> None:
        """Run slices of the tower; see `TowerJobs.advance`."""
        completed = self._jobs.advance(seconds)
        if completed is None:
            return
        job, features = completed
        self.cache.put(job.digest, features)
        for row in job.rows.values():
            self.cache.hold(job.digest, row.key)
            row.features[job.digest] = features
            _set_ready(row)
        self._keep(self.cache.next_to_go(features.nbytes))
        self.cache.trim()

    def take_fault(self, error: Exception) -> tuple[list[Sequence], MLXManagerError] | None:
        """Return the rows that an error of the tower fails, and their failure; None if the error is
        none of the tower's."""
        job, self._jobs.at_fault = self._jobs.at_fault, None
        if job is None:
            return None
        if isinstance(error, MLXManagerError):
            return list(job.rows.values()), error
        failure = GenerationFailed(
            "The model failed while reading a picture. The request can be retried."
        )
        return list(job.rows.values()), failure

    def drop_all(self) -> None:
        """Drop all features and jobs."""
        self._jobs.drop_all()
        self.cache.drop_all()


def _set_ready(sequence: Sequence) -> None:
    """Set the first token behind `computed` whose features are not there."""
    assert sequence.images is not None
    lacking = [p for p in sequence.images.pictures if p.digest not in sequence.features]
    firsts = [_first_from(picture, sequence.computed) for picture in lacking]
    sequence.ready = min(firsts, default=sys.maxsize)


def _first_from(picture: Picture, computed: int) -> int:
    """Return the picture's first place from `computed` on; `sys.maxsize` if there is none."""
    at = int(np.searchsorted(picture.places, computed))
    return int(picture.places[at]) if at < len(picture.places) else sys.maxsize

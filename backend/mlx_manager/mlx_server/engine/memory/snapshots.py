"""Memory of the kept states of recurrent layers, which prompts with the same beginning go on
from."""

from __future__ import annotations

from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.memory.line import Line
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.execution.forward import Forward, Snapshot

# States of recurrent layers kept for reuse. Each may be as large as many pages.
MOST_SNAPSHOTS = 16


class SnapshotMemory:
    """Snapshots that are attached to pages; those used least recently go first.

    Args:
        forward: how the model is run; makes snapshots.
        pool: the pages.
        line: `snapshots:<model>`; its ledger is asked before a snapshot is kept.
    """

    def __init__(self, forward: Forward, pool: PagePool, line: Line) -> None:
        self.line = line
        self._forward = forward
        self._pool = pool
        # Bytes of the last snapshot that there was no room for.
        self._lacking = 0

    def take(self, sequence: Sequence) -> None:
        """Keep the state of a prompt, whose pages have been shared, after its last step. That step
        has been queued, and none after it, whose rows may go on from there."""
        snapshot = self._forward.snapshot(sequence.key)
        if snapshot is not None:
            self.keep(sequence, snapshot)

    def keep(self, sequence: Sequence, snapshot: Snapshot) -> None:
        """Keep the state of a sequence after `computed`, whose pages have been shared."""
        size = self._pool.page_size
        # The pages that are found: where an equal one was known, not the row's own. Others may have
        # gone on from there.
        known = self._pool.match(sequence.content)[: sequence.computed // size]
        if known and len(known) * size == sequence.computed:
            self._keep(known[-1], snapshot)

    def restore(self, sequence: Sequence, snapshot: object) -> None:
        """Begin a sequence with the state of another one that had the same prefix."""
        assert isinstance(snapshot, Snapshot)
        self._forward.restore(sequence.key, snapshot)

    def give_up(self, lacking: int) -> None:
        """Give up snapshots until `lacking` bytes are free, or none is left."""
        while lacking > 0 and isinstance(given_up := self._pool.detach_oldest(), Snapshot):
            self._lacking = given_up.nbytes
            lacking -= given_up.nbytes
        self.record()

    def take_lacking(self) -> int:
        """Return the bytes of as many snapshots as may be kept, if the last one found no room and
        none is kept; 0 otherwise, and until another finds none."""
        nbytes, self._lacking = self._lacking, 0
        return 0 if self._pool.attachments else MOST_SNAPSHOTS * nbytes

    def record(self) -> None:
        """Enter what is kept into the ledger: pages that go take their snapshots with them."""
        kept = [s.nbytes for s in self._pool.attachments if isinstance(s, Snapshot)]
        self.line.record(sum(kept))

    def _keep(self, page: int, snapshot: Snapshot) -> None:
        if len(self._pool.attachments) >= MOST_SNAPSHOTS:
            self._pool.detach_oldest()
        # Those of pages that have been given up since are gone, too.
        self.record()
        while not self.line.ledger.spare(snapshot.nbytes):
            if self._pool.detach_oldest() is None:
                self._lacking = snapshot.nbytes
                return
            self.record()
        self._pool.attach(page, snapshot)
        self.record()

"""Features of pictures, kept for those who ask about the same picture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from mlx_manager.mlx_server.engine.memory.line import Line
from mlx_manager.mlx_server.execution.images import Features


class FeatureCache:
    """Features by digest; those used least recently go first, and none that a row holds.

    Args:
        line: `images:<model>`, which has the features, and what the tower works on.
        most: bytes that are kept. Those that rows hold may be more.

    Attributes:
        working: bytes that the tower works on.
    """

    def __init__(self, line: Line, most: int) -> None:
        self.line = line
        self.working = 0
        self._most = most
        self._features: OrderedDict[str, Features] = OrderedDict()
        self._holders: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._features)

    def __iter__(self) -> Iterator[str]:
        """Yield the digests, those of features used least recently first."""
        return iter(self._features)

    def hold(self, digest: str, row: int) -> Features | None:
        """Return the features, which are kept until the row with this key releases them; None if
        they are not here."""
        features = self._features.get(digest)
        if features is not None:
            self._features.move_to_end(digest)
            self._holders.setdefault(digest, set()).add(row)
        return features

    def find(self, digest: str) -> Features | None:
        """Return the features, whose next use this is not; None if they are not here."""
        return self._features.get(digest)

    def next_to_go(self, lacking: int) -> list[str]:
        """Return the digests of the features that would be forgotten so that `lacking` more bytes
        are kept, the first to go first."""
        left, found = self.nbytes + lacking - self._most, []
        for digest, features in self._features.items():
            if left <= 0:
                break
            found.append(digest)
            left -= features.nbytes
        return found

    def put(self, digest: str, features: Features) -> None:
        """Add features that somebody is about to hold."""
        self._features[digest] = features
        self._record()

    def release(self, digest: str, row: int) -> None:
        """Let a row's hold go; it need not have one."""
        holders = self._holders.get(digest, set())
        holders.discard(row)
        if not holders and self._holders.pop(digest, None) is not None:
            self.trim()

    def trim(self) -> None:
        """Forget what is beyond the bytes that are kept."""
        self._forget_down_to(self._most)

    def give_up(self, lacking: int) -> None:
        """Forget features until `lacking` bytes are free, or rows hold all that are left."""
        self._forget_down_to(self.nbytes - lacking)

    def reserve_working(self, nbytes: int) -> bool:
        """Return whether the ledger grants what the tower works on."""
        # A vain attempt, at each step, would cost others their caches.
        granted = nbytes <= self.line.ledger.attainable() and self.line.reserve(nbytes)
        if granted:
            self.working += nbytes
        return granted

    def record_working(self, nbytes: int) -> None:
        """Set the bytes that the tower works on."""
        self.working = nbytes
        self._record()

    def drop_all(self) -> None:
        """Forget all features, whoever holds them, and the work under way."""
        self._features.clear()
        self._holders.clear()
        self.record_working(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all features."""
        return sum(features.nbytes for features in self._features.values())

    @property
    def spare(self) -> int:
        """Bytes that `give_up` could free."""
        held = sum(self._features[digest].nbytes for digest in self._holders)
        return self.nbytes - held

    def _forget_down_to(self, most: int) -> None:
        left = self.nbytes
        for digest in [digest for digest in self._features if digest not in self._holders]:
            if left <= most:
                break
            left -= self._features.pop(digest).nbytes
        self._record()

    def _record(self) -> None:
        self.line.record(self.nbytes + self.working)

"""How many files this process may have open; each connection is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

OPEN_FILES = 65_536


def allow_many() -> None:
    """As many as are of use, or as it may: macOS allows 256 unless it is asked for more."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def as_many_as_before() -> Iterator[None]:
    """What is imported here changes nothing of it.

    `mlx_lm.utils` asks for 2 048, and 4 096 at most, which nobody but root could take back, and
    fails where that is more than may be.
    """
    try:
        import resource
    except ImportError:
        yield
        return
    real = resource.setrlimit

    def others(which: int, limits: tuple[int, int], /) -> None:
        if which != resource.RLIMIT_NOFILE:
            real(which, limits)

    resource.setrlimit = others
    try:
        yield
    finally:
        resource.setrlimit = real

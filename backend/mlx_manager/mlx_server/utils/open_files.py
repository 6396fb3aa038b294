"""The limit of files that this process may have open; each connection is one."""

from __future__ import annotations

OPEN_FILES = 65_536


def allow_many() -> None:
    """Raise the limit to `OPEN_FILES`, or as far as allowed: macOS's default is 256."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""Kinds of kernels, and the checks by which a device's kernels may serve."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.nvrtc import nvrtc
from mlx_manager.mlx_server.devices.kept import Kept
from mlx_manager.mlx_server.devices.kernel import Unsupported

log = logging.getLogger(__name__)

S = TypeVar("S")
K = TypeVar("K")

Outcome = str | Unsupported | None
"""Outcome of a check: the text of an error, the reason for having no kernel, or None if right."""

DTYPES = (mx.bfloat16, mx.float16, mx.float32)
"""Types of numbers that models have."""

_HERE = Path(__file__).parent
_DRIVER = Path("/proc/driver/nvidia/version")
_PASSED = b"passed"


@dataclass(frozen=True, slots=True)
class Case(Generic[S]):
    """A shape that a report checks. head_size None: the kernels have no heads."""

    head_size: int | None
    dtype: mx.Dtype
    of: S


@dataclass(frozen=True, slots=True)
class KernelKind(Generic[S, K]):
    """One kind of kernels.

    name: name for people. build: returns the kernels for a shape on the default device, the best
    first, or the reason why there are none; nothing is compiled before the first use. check:
    returns the difference of the kernels' results from the reference, None if there is none. cases:
    returns what a report checks.
    """

    name: str
    build: Callable[[S], Sequence[K] | Unsupported]
    check: Callable[[K, S], str | None]
    cases: Callable[[], Iterable[Case[S]]] = tuple

    def serving(self, of: S, checks: Checks | None = None) -> K | Unsupported:
        """Return the first kernels for `of` that are right.

        checks: those passed on this machine before, which are not run again; None to run all.
        """
        found = self.build(of)
        if isinstance(found, Unsupported):
            return found
        wrong = "there is no kernel"
        for number, kernels in enumerate(found):
            check = partial(self._checked, kernels, of)
            of_check = f"{self.name} {number} {of!r}"
            found_wrong = check() if checks is None else checks.outcome(of_check, check)
            if found_wrong is None:
                return kernels
            wrong = found_wrong
            log.warning("the kernels for %s are not used: %s", self.name, wrong)
        return Unsupported(wrong)

    def outcome(self, of: S) -> Outcome:
        """Return the outcome of checking all kernels for `of`."""
        found = self.build(of)
        if isinstance(found, Unsupported):
            return found
        outcomes = (self._checked(kernels, of) for kernels in found)
        return "; ".join(wrong for wrong in outcomes if wrong is not None) or None

    def _checked(self, kernels: K, of: S) -> str | None:
        try:
            return self.check(kernels, of)
        except (RuntimeError, ValueError) as error:
            # MLX raises these if a kernel can't be compiled, loaded or launched.
            return f"the kernel can't be run: {error}"


def alone(build: Callable[[S], K | Unsupported]) -> Callable[[S], Sequence[K] | Unsupported]:
    """Return `build` for a kind that has one choice of kernels for a shape."""

    def built(of: S) -> Sequence[K] | Unsupported:
        kernels = build(of)
        return kernels if isinstance(kernels, Unsupported) else [kernels]

    return built


class Checks:
    """Checks that were passed on this machine, on disk. Failures are not kept.

    machine: returns all that the outcome depends on, beside what is checked. It is not called
    before there are kernels to check.
    """

    def __init__(self, kept: Kept, machine: Callable[[], str]) -> None:
        self._kept = kept
        self._machine = cache(machine)

    def outcome(self, of: str, check: Callable[[], str | None]) -> str | None:
        """Return None if `check`, of the kernels `of`, was passed before or passes now.

        of: kind and shape of the kernels.
        """
        key = hashlib.sha256(f"{self._machine()}\0{of}".encode()).hexdigest()
        if self._kept.read(key) == _PASSED:
            return None
        wrong = check()
        if wrong is None:
            self._kept.write(key, _PASSED)
        return wrong


@cache
def checks() -> Checks:
    """Return the checks that this user's processes passed with these kernels on this device."""
    return Checks(Kept.in_cache("checks"), machine)


def machine() -> str:
    """Return all that kernels' results depend on: the device, its driver and compiler, MLX's
    version, and the sources of the kernels, of what launches them and of their references."""
    info = mx.device_info()
    parts = [str(info[name]) for name in ("device_name", "architecture") if name in info]
    parts += [version("mlx"), platform.platform(), platform.mac_ver()[0], sources_digest(_HERE)]
    with suppress(OSError):
        parts.append(_DRIVER.read_text())
    with suppress(RuntimeError):
        parts.append(nvrtc().version)
    return "\0".join(parts)


def sources_digest(folder: Path) -> str:
    """Return a digest of all source files in `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".py", ".cu", ".h", ".metal"}:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder)}\0{content}\0".encode())
    return digest.hexdigest()

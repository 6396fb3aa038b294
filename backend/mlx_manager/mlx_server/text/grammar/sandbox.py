"""Grammars are compiled in a process of their own first, so that one that overflows a stack, takes
all memory or has no end costs the request that brought it, and nothing else.

llguidance's compiler follows references by recursion, on the stack of whoever calls it, and one
derivative of a regular expression takes as long as it likes; neither can be caught or ended within
a process. `mlx_manager/sandbox.py` is what runs in the other.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from time import monotonic
from typing import Any

from mlx_manager.mlx_server.errors import GenerationFailed
from mlx_manager.mlx_server.limits import COMPILE_MEMORY, COMPILE_SECONDS
from mlx_manager.mlx_server.utils.daemon_threads import Waiting
from mlx_manager.sandbox import PATIENCE, TOO_MUCH_MEMORY, read_frame, write_frame

log = logging.getLogger(__name__)

PROGRAM = "mlx_manager.sandbox"
IDLE = 2
"""Processes that are kept for the next grammar."""
GROWN = 32 * 2**20
"""Bytes by which a grammar may make a process grow that is kept: these hide what others take."""
VERDICTS = 4096
"""Grammars whose verdict is remembered."""
FORGET = 60.0
"""Seconds after which a grammar that took too long may be tried again: the machine may have been
busy."""


@dataclass(frozen=True, slots=True)
class SandboxVocabulary:
    """Facts of a model's vocabulary for the sandbox: size, special tokens, and a token that
    ends."""

    size: int
    special: Mapping[str, int]
    end: int
    wire: Mapping[str, Any] = field(init=False, compare=False)
    digest: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        wire = {"size": self.size, "special": dict(self.special), "end": self.end}
        object.__setattr__(self, "wire", wire)
        object.__setattr__(self, "digest", sha256(json.dumps(wire).encode()).digest())


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of trying a grammar.

    error: why it is of no use; None if it can be compiled here. size: bytes it took. fatal: whether
    the process died of it. until: when it may be tried again, in `time.monotonic`'s seconds; None:
    never.
    """

    error: str | None
    size: int = 0
    fatal: bool = False
    until: float | None = None


class SandboxProcess:
    """One process that tries grammars.

    Raises:
        GenerationFailed: it does not start.
    """

    def __init__(self) -> None:
        try:
            # Out of the terminal's reach: Ctrl-C begins the drain, in which grammars are compiled.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise GenerationFailed(f"The form of the answer can't be tried: {error}.") from error
        # The process ends when its stdin does, also where this program is killed.
        self._end = weakref.finalize(self, _end, self._process)
        assert self._process.stdout is not None
        if read_frame(self._process.stdout) is None:
            self._end()
            raise GenerationFailed(
                "The form of the answer can't be tried: the process for it ended as it started "
                f"(exit {self._process.returncode})."
            )

    def kill(self) -> None:
        """Kill the process, whatever it is doing. Safe on any thread."""
        self._process.kill()

    def close(self) -> None:
        self._end()

    def try_out(self, job: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the process's answer to `job`; None if the process has died of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            write_frame(self._process.stdin, job)
        except OSError:
            return None
        answer: Mapping[str, Any] | None = read_frame(self._process.stdout)
        return answer

    def exit_code(self) -> int:
        """Return the exit code of the process, once it has ended; negative if a signal ended it."""
        return self._process.wait()


class Sandbox:
    """Pool of processes in which grammars are tried. Safe to use from several threads, each of
    which has a process of its own.

    seconds: processor time that a grammar may take. memory: bytes that a grammar may take.
    """

    def __init__(self, seconds: float = COMPILE_SECONDS, memory: int = COMPILE_MEMORY) -> None:
        self._seconds = seconds
        self._memory = memory
        self._lock = threading.Lock()
        self._idle: list[SandboxProcess] = []
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._closed = False

    def make_ahead(self) -> None:
        """Have a process ready.

        Raises:
            GenerationFailed: none starts.
        """
        with self._lock:
            ready = bool(self._idle)
        if not ready:
            self._give_back(SandboxProcess())

    def verdict(
        self, vocabulary: SandboxVocabulary, grammar: str, most: int | None, waiting: Waiting
    ) -> Verdict:
        """Return the verdict on whether `grammar` can be compiled here without harm.

        most: ways in which a text may be read so far, as for `Grammars.matcher`.

        Raises:
            GenerationFailed: there is no process to try it.
            AbandonedError: nobody waits for it any more.
        """
        key = sha256(vocabulary.digest + f"{most} ".encode() + grammar.encode()).digest()
        with self._lock:
            known = self._verdicts.get(key)
            if known is not None and (known.until is None or monotonic() < known.until):
                self._verdicts.move_to_end(key)
                return known
        found = self._tried(vocabulary, grammar, most, waiting)
        with self._lock:
            self._verdicts[key] = found
            self._verdicts.move_to_end(key)
            while len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        return found

    def close(self) -> None:
        """End the processes; those at work end with what they do."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def _tried(
        self, vocabulary: SandboxVocabulary, grammar: str, most: int | None, waiting: Waiting
    ) -> Verdict:
        job = {
            "vocabulary": vocabulary.wire,
            "grammar": grammar,
            "most": most,
            "seconds": self._seconds,
            "memory": self._memory,
        }
        process = self._taken()
        whole = False
        try:
            with waiting.stopping(process.kill):
                answer = process.try_out(job)
            if answer is None:
                return self._of_death(process.exit_code())
            whole = answer["grown"] <= GROWN
            return Verdict(answer["error"], answer["grown"])
        finally:
            if whole:
                self._give_back(process)
            else:
                process.close()

    def _of_death(self, code: int) -> Verdict:
        """Return the verdict on a grammar from the exit code of the process that tried it."""
        until = None
        if code == -signal.SIGPROF:
            error = f"to compile it took more than {self._seconds:g} s"
        elif code == -signal.SIGALRM:
            error = f"to compile it took more than {PATIENCE:g} s"
            until = monotonic() + FORGET
        elif code in (TOO_MUCH_MEMORY, -signal.SIGKILL, -signal.SIGABRT):
            error = f"to compile it took more than {self._memory >> 20} MiB"
        else:
            how = signal.Signals(-code).name if code < 0 else f"exit {code}"
            error = f"it is nested too deeply: the process that compiled it has died ({how})"
        log.warning("the form of an answer was refused: %s", error)
        return Verdict(error, fatal=True, until=until)

    def _taken(self) -> SandboxProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return SandboxProcess()

    def _give_back(self, process: SandboxProcess) -> None:
        with self._lock:
            kept = not self._closed and len(self._idle) < IDLE
            if kept:
                self._idle.append(process)
        if not kept:
            process.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it at once, and leave nothing of it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        # What was to be sent is for nobody.
        with suppress(BrokenPipeError):
            pipe.close()

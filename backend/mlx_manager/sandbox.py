"""A process in which grammars are compiled before the server compiles them; see
`mlx_server/text/grammar/sandbox.py`.

What overflows a stack, takes all memory or has no end in native code ends this process alone. Its
compiler runs in a thread of `STACK` bytes, half of what any thread of the server has that compiles
a grammar or fills its masks: what fits here fits there.

Frames go both ways, each a length of four bytes (big-endian) and JSON. The first one that is sent
says that the process is ready. It ends when its stdin does.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import struct
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STACK = 2**20
"""Stack in bytes. Rust's threads, which fill masks, have 2 MiB; Python's have more."""
PATIENCE = 10.0
"""Seconds that a grammar may take on a machine that is busy."""
LOOK = 0.01
"""Seconds between two looks at the memory."""
TOO_MUCH_MEMORY = 75
"""Exit code of a process that took too much memory."""
STEPS = 16
"""Number of bytes of an answer that are tried."""
SLOWEST_STEP = 0.25
"""Seconds of the processor for a mask. It is filled between the steps of everybody's answers."""
KEPT = 4
"""Number of vocabularies that are kept."""
BYTES = 256

LENGTH = struct.Struct(">I")


def read_frame(pipe: IO[bytes]) -> Any:
    """Return the next frame, decoded from JSON, or None at the end."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = pipe.read(size)
    return json.loads(data) if len(data) == size else None


def write_frame(pipe: IO[bytes], value: Any) -> None:
    """Send it as JSON.

    Raises:
        OSError: nobody reads any more.
    """
    data = json.dumps(value).encode()
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


class StandIn:
    """A vocabulary with a model's size and its special tokens; of other tokens it has the bytes.

    A model's own takes as long to make as to load, and a grammar asks no more of it until masks
    are filled.
    """

    bos_token_id = None

    def __init__(self, size: int, special: dict[str, int], end: int) -> None:
        self.tokens = [bytes([byte]) for byte in range(BYTES)]
        self.tokens += [b""] * (size - BYTES)
        for name, number in special.items():
            if BYTES <= number < size:
                self.tokens[number] = name.encode()
        self.special_token_ids = [number for number in special.values() if number >= BYTES]
        self.eos_token_id = end

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def vocabulary(size: int, special: dict[str, int], end: int) -> LLTokenizer:
    """Return llguidance's form of a stand-in."""
    from llguidance import LLTokenizer, TokenizerWrapper

    # The end may be one of the bytes here: one more token is none of theirs.
    stand_in = StandIn(max(size, BYTES) + 1, special, max(size, BYTES) if end < BYTES else end)
    stand_in.tokens[stand_in.eos_token_id] = stand_in.tokens[stand_in.eos_token_id] or b"\xffend"
    stand_in.special_token_ids.append(stand_in.eos_token_id)
    return LLTokenizer(TokenizerWrapper(stand_in))


def peak() -> int:
    """Return the peak memory of the process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def private() -> int | None:
    """Return the bytes of memory that the process may write and shares with none, as Linux counts
    them for `RLIMIT_DATA`; None elsewhere."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmData:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


class Watch:
    """Watch that ends the process when a job takes too long or too much memory.

    Linux itself refuses the memory, at which the compiler aborts. Elsewhere a thread looks at the
    peak, which works only while native code releases Python's lock.
    """

    def __init__(self) -> None:
        self._most = 0
        self._before = 0
        self._working = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self, seconds: float, memory: int) -> None:
        """Begin a job. seconds: of CPU time. memory: bytes by which the process may grow."""
        self._before = peak()
        self._most = self._before + memory
        held = private()
        if held is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (held + memory, resource.RLIM_INFINITY))
        # Nobody handles the signals, which end the program, also in native code.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        self._working.set()

    def end(self) -> int:
        """End a job; return the bytes by which the process has grown."""
        self._working.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if private() is not None:
            resource.setrlimit(
                resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
        return peak() - self._before

    def _look(self) -> None:
        while self._working.wait():
            if peak() > self._most:
                os._exit(TOO_MUCH_MEMORY)
            time.sleep(LOOK)


def tried(texts: LLTokenizer, grammar: str, most: int | None) -> str | None:
    """Compile a grammar and write the beginning of an answer; return why it fails, or None."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(texts, grammar, log_level=0, limits=LLParserLimits(max_items_in_row=most))
    if matcher.is_error():
        return str(matcher.get_error())
    dice = random.Random(0)  # nosec B311  # not for secrets
    for step in range(STEPS):
        begun = time.thread_time()
        mask = matcher.compute_bitmask()
        took = time.thread_time() - begun
        if took > SLOWEST_STEP:
            return f"finding out what may come next takes {took:.2g} s; at most {SLOWEST_STEP:g}"
        if matcher.is_error():
            # Later on it is the answer that fails.
            return None if step else f"nothing fits it ({matcher.get_error()})"
        matcher.consume_token(_one_of(mask, dice))
        if matcher.is_stopped():
            break
    return None


def _one_of(mask: bytes, dice: random.Random) -> int:
    """One of the tokens that a mask allows, a byte if any is."""
    single = [token for token in range(BYTES) if mask[token // 8] >> token % 8 & 1]
    if single:
        return dice.choice(single)
    allowed = int.from_bytes(mask, "little")
    return (allowed & -allowed).bit_length() - 1


def serve(source: IO[bytes], target: IO[bytes]) -> None:
    """Try one grammar after the other until there are no more."""
    # The server, which reads the frames' form here, need not have it yet.
    import llguidance  # noqa: F401

    watch = Watch()
    known: OrderedDict[str, LLTokenizer] = OrderedDict()
    write_frame(target, {"ready": True})
    while (job := read_frame(source)) is not None:
        key = json.dumps(job["vocabulary"])
        if key not in known:
            known[key] = vocabulary(**job["vocabulary"])
            while len(known) > KEPT:
                known.popitem(last=False)
        known.move_to_end(key)
        watch.begin(job["seconds"], job["memory"])
        error = tried(known[key], job["grammar"], job["most"])
        grown = watch.end()
        write_frame(target, {"error": error, "grown": grown})


def on_small_stack(function: Callable[[], None]) -> None:
    """Call `function` in a thread with a stack of `STACK` bytes."""
    threading.stack_size(STACK)
    thread = threading.Thread(target=function)
    thread.start()
    threading.stack_size(0)
    thread.join()


def main() -> None:
    """Try the grammars that come on stdin."""
    # A core of each process that dies would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for ending in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(ending, signal.SIG_DFL)
    source, target = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    # Nothing but frames goes to the pipe.
    os.dup2(2, 1)
    on_small_stack(lambda: serve(source, target))


if __name__ == "__main__":
    main()

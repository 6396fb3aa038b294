"""Host memory that an NVIDIA GPU reads and writes in place.

MLX on CUDA puts arrays that the host makes or reads into managed memory. Managed memory migrates to
the side that touches it, by page faults of 100 to 600 us each, and MLX reuses the same memory for
arrays that only the device touches. So data exchanged while steps run goes through boxes that stay
on the host, and a kernel copies it into a box or out of a box.
"""

from __future__ import annotations

import ctypes
import logging
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices.cuda.compiler.device import cuda_device
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel, CudaSource
from mlx_manager.mlx_server.devices.cuda.driver import Driver
from mlx_manager.mlx_server.devices.kernel import Kernel, Size, Unsupported

log = logging.getLogger(__name__)

THREADS = 256

# Most arrays of one size under way. The device fetches a step's arrays after the step before, so
# this covers some steps of some models.
UNDER_WAY = 32
LEAST_ROOM = 1 << 14
MOST_ROOM = 1 << 19
"""Words of the smallest and of the largest box for arrays."""

TOKENS = 4096
"""Words (32 bits) of a box for a step's tokens."""

# Constants of cuMemAdvise (CUDA driver API, unified addressing).
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5
_HOST, _DEVICE = -1, 0

_FILE = Path(__file__).with_name("mapped.cu")
TELL = CudaSource(
    name="mapped_tell",
    files=(_FILE,),
    function="tell",
    arguments=("words", Size("words", 0), "box", "told"),
    inputs=("words", "box"),
    outputs=("told",),
)
FETCH = CudaSource(
    name="mapped_fetch",
    files=(_FILE,),
    function="fetch",
    arguments=("box", "words"),
    inputs=("box",),
    outputs=("words",),
)


@dataclass(frozen=True, slots=True)
class Box:
    """Memory that host and device share, (words,) uint32.

    array: the memory as an MLX array. seen: the same memory as a numpy array.
    """

    array: mx.array
    seen: NDArray[np.uint32]

    @staticmethod
    def of(words: int) -> Box:
        """Return a new box of `words`, filled with zeros.

        Raises:
            OSError, RuntimeError: CUDA's driver does not keep memory on the host.
        """
        array = mx.array(np.zeros(words, np.uint32))
        box = Box(array, np.array(array, copy=False))
        driver = Driver()
        start, size = ctypes.c_uint64(box.seen.ctypes.data), ctypes.c_size_t(box.seen.nbytes)
        for advice, place in ((_PREFERRED_LOCATION, _HOST), (_ACCESSED_BY, _DEVICE)):
            driver.call("cuMemAdvise", start, size, ctypes.c_int(advice), ctypes.c_int(place))
        return box


class Carrier:
    """Boxes of the process, for its MLX thread only, with the kernels that copy words in and out.

    A box is never freed: MLX would reuse its memory for arrays that only the device touches.
    """

    def __init__(self, tell: Kernel, fetch: Kernel) -> None:
        self._tell = tell
        self._fetch = fetch
        # By size: each box with the array sent through it last. Once that array is evaluated, the
        # box is free.
        self._sent: dict[int, deque[tuple[Box, mx.array]]] = defaultdict(deque)
        self._free: list[Box] = []
        self._made: list[Box] = []
        # Arrays to be sent together at the end of `together`; None outside of it.
        self._waiting: list[mx.array] | None = None

    def send(self, numbers: NDArray[np.int32]) -> mx.array:
        """Return an array equal to `numbers`, already queued for copying to the device.

        There are at most `MOST_ROOM` - 1 numbers. A recorded step that is repeated takes the array
        as a plain input, since its copy is not part of the step.
        """
        room = max(LEAST_ROOM, 1 << numbers.size.bit_length())
        sent = self._sent[room]
        box = self._free_of(sent) if len(sent) == UNDER_WAY else self._box(room)
        box.seen[0], box.seen[1 : numbers.size + 1] = numbers.size, numbers.reshape(-1)
        (fetched,) = self._fetch(
            inputs=[box.array],
            grid=_grid(numbers.size),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[numbers.shape],
            output_dtypes=[mx.int32],
        )
        sent.append((box, fetched))
        if self._waiting is None:
            mx.async_eval(fetched)  # type: ignore[no-untyped-call]
        else:
            self._waiting.append(fetched)
        return fetched

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send arrays together; see the function `together`. Must not be nested."""
        waiting = self._waiting = []
        try:
            yield
        finally:
            self._waiting = None
            if waiting:
                mx.async_eval(waiting)  # type: ignore[no-untyped-call]

    @staticmethod
    def _free_of(sent: deque[tuple[Box, mx.array]]) -> Box:
        box, fetched = sent.popleft()
        mx.eval(fetched)
        return box

    def tell(self, tokens: mx.array) -> tuple[mx.array, Box]:
        """Return an unevaluated array (1,), and the box that holds `tokens` once it is evaluated.

        tokens: (n,) uint32, `TOKENS` at most. `release` the box after reading them.
        """
        box = self._free.pop() if self._free else self._box(TOKENS)
        (told,) = self._tell(
            inputs=[tokens, box.array],
            grid=_grid(tokens.size),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
        return told, box

    def release(self, box: Box) -> None:
        self._free.append(box)

    def _box(self, words: int) -> Box:
        box = Box.of(words)
        self._made.append(box)
        return box

    def check(self) -> str | None:
        """Return an error if words do not arrive as they are sent, else None."""
        for first in (5, 2**31 - 1 - THREADS):
            numbers = np.arange(first, first + THREADS + 1, dtype=np.int64).astype(np.int32)
            there = self.send(numbers)
            told, box = self.tell(there.view(mx.uint32))
            mx.eval(told)
            arrived = box.seen[: numbers.size].astype(np.int32)
            self.release(box)
            if (arrived != numbers).any():
                return "words do not arrive as they are sent"
        return None


def _grid(words: int) -> tuple[int, int, int]:
    return -(-words // THREADS) * THREADS, 1, 1


@cache
def carrier() -> Carrier | Unsupported:
    """Return the carrier of the default device, checked once; `Unsupported` if it fails."""
    device = cuda_device()
    if isinstance(device, Unsupported):
        return device
    found = Carrier(CudaKernel(TELL), CudaKernel(FETCH))
    try:
        wrong = found.check()
    except (OSError, RuntimeError) as error:
        # The compiler or the driver failed, or the driver lacks these functions.
        wrong = str(error)
    if wrong is None:
        return found
    log.info("arrays go between the host and the GPU by MLX alone: %s", wrong)
    return Unsupported(wrong)


@contextmanager
def together() -> Iterator[None]:
    """Queue all arrays sent within this context at its end, at once.

    Queueing each by itself would release the GIL and wait for it each time.
    """
    match carrier():
        case Carrier() as found:
            with found.together():
                yield
        case _:
            yield


def send(numbers: NDArray[np.int32]) -> mx.array:
    """Return an array equal to `numbers`; on an NVIDIA GPU, already queued for copying."""
    match carrier():
        case Carrier() as found if 0 < numbers.size < MOST_ROOM:
            return found.send(numbers)
    return mx.array(numbers)

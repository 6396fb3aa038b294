"""Detection that a Mac's GPU takes no more work from this process.

MLX raises the error of a failed command buffer. After several failures macOS ignores everything
that the process queues, so the process must be restarted. It is also ended earlier, when command
buffers fail repeatedly within a short time.

Source: `CommandEncoder` in mlx/backend/metal/device.cpp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

FAILED = "[METAL] Command buffer execution failed"
"""Beginning of MLX's error for a failed command buffer; macOS's own words follow."""
IGNORED = "SubmissionsIgnored"
"""Part of macOS's words once all work is ignored: `Ignored (for causing prior/excessive GPU errors)
(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)`."""
MOST, WITHIN = 3, 60.0
"""`MOST` errors within `WITHIN` seconds are fatal."""


class GPUFaults:
    """Errors of the GPU so far. One thread notes them; any thread may read `fatal`.

    Attributes:
        fatal: why the process can't go on with its GPU; None while it can.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.fatal: str | None = None
        self._clock = clock
        self._at: deque[float] = deque(maxlen=MOST)

    def note(self, error: Exception) -> None:
        """Count `error`, if it is one of the GPU's."""
        said = str(error)
        if FAILED not in said:
            return
        self._at.append(self._clock())
        if IGNORED in said:
            self.fatal = f"macOS ignores what it is given: {said}"
        elif len(self._at) == MOST and self._at[-1] - self._at[0] <= WITHIN:
            self.fatal = f"{MOST} errors in {WITHIN:g} s, the last of which was: {said}"

"""Order of launches that write into their inputs, for devices that do not keep the order."""

from __future__ import annotations

import mlx.core as mx

from mlx_manager.mlx_server.devices import table as devices


class LaunchOrder:
    """Order of launches: later ones depend on the result of a step or a write before them.

    MLX on Metal orders launches by the arrays that they bind: a launch waits for those whose
    results it takes. A write into an input gives no result that later readers and writers of the
    same pages take, so one of their other inputs is made to depend on the earlier launch. Launches
    of a CPU's or an NVIDIA GPU's stream run in the order in which they are queued, and cost nothing
    here.

    Source: `CommandEncoder` in mlx/backend/metal/device.cpp.

    Attributes:
        kept: whether the device keeps the order by itself.
    """

    def __init__(self, *, kept: bool | None = None) -> None:
        self.kept = devices.current().in_order if kept is None else kept
        # (1,) int32, 0: later launches depend on it.
        self._last: mx.array | None = None

    def after(self, x: mx.array) -> mx.array:
        """Return `x`, made to depend on all launches that `then` was told of."""
        return x if self._last is None else x + self._last.astype(x.dtype)

    def then(self, result: mx.array) -> None:
        """Order later launches after the launch that gives `result`. The launch that gives `result`
        itself follows all earlier launches: its inputs went through `after`."""
        if not self.kept:
            self._last = (result.reshape(-1)[:1] < -mx.inf).astype(mx.int32)

    def wait(self) -> None:
        """Wait for all that is under way: before what launches write to is read without them.

        Raises:
            RuntimeError: some of it failed.
        """
        if not self.kept:
            mx.synchronize()

    def forget(self) -> None:
        """Forget the earlier launches, which are over or have failed. Whoever takes a failed step's
        results fails, too."""
        self._last = None


IN_ORDER = LaunchOrder(kept=True)

"""Depthwise convolutions over time on a CPU.

Layers with a recurrent state (Qwen 3.5, Mamba, LFM 2) begin with one, over four tokens. MLX's CPU
backend copies each channel's windows and multiplies each: 512 tokens of 6 144 channels take 130 ms,
and one token 1.3 ms. A sum over the taps, each multiplied with all channels at once, takes 12 and
0.1 ms.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten


class Taps(nn.Conv1d):  # type: ignore[misc] # mlx is not typed
    """Depthwise convolution with the parameters of `conv`, but with its weight stored as `taps`.

    taps: (taps, channels) float32.
    """

    def __init__(self, conv: nn.Conv1d) -> None:
        nn.Module.__init__(self)
        for name in ("padding", "dilation", "stride", "groups"):
            setattr(self, name, getattr(conv, name))
        self.taps = mx.contiguous(conv.weight[:, :, 0].T.astype(mx.float32))
        if "bias" in conv:
            self.bias = conv.bias
        self._dtype = conv.weight.dtype
        self.eval()

    @property
    def weight(self) -> mx.array:
        """Weight as (channels, taps, 1), assembled at each access."""
        turned: mx.array = self.taps.T[..., None].astype(self._dtype)
        return turned

    def __call__(self, x: mx.array) -> mx.array:
        """Return (rows, tokens, channels); `x` also holds the taps - 1 tokens before these."""
        dtype, x = mx.result_type(x, self._dtype), x.astype(mx.float32)
        count = self.taps.shape[0]
        tokens = x.shape[1] - count + 1
        out = x[:, :tokens] * self.taps[0]
        for i in range(1, count):
            out = out + x[:, i : i + tokens] * self.taps[i]
        out = out.astype(dtype)
        return out + self.bias if "bias" in self else out


def with_taps(model: nn.Module) -> None:
    """Replace the depthwise convolutions of `model` by `Taps`."""
    found = [(name, Taps(module)) for name, module in model.named_modules() if can_be_taps(module)]
    model.update_modules(tree_unflatten(found))
    mx.eval([module.taps for _, module in found])


def can_be_taps(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv1d
        and module.weight.shape[0] == module.groups > 1
        and module.weight.shape[2] == 1
        and (module.stride, module.padding, module.dilation) == (1, 0, 1)
    )

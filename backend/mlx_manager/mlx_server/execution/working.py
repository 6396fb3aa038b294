"""Sizes of a model's products, and the memory that its steps work on."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.table import Device
from mlx_manager.mlx_server.execution.attention.paged import is_flash
from mlx_manager.mlx_server.execution.forward import Forward


def vocabulary_of(model: nn.Module) -> int:
    """Return the size of the vocabulary, which is that of the widest product."""
    return max(_widths(model))


def _widths(model: nn.Module) -> list[int]:
    """Return the number of outputs of each product of the model."""
    # Modules are asked, not the parameters: weights stored in blocks are no parameter of the name.
    weights = [getattr(module, "weight", None) for _, module in model.named_modules()]
    return [w.shape[-2] for w in weights if isinstance(w, mx.array) and w.ndim > 1]


def working_bytes(model: nn.Module, forward: Forward | None, tokens: int, rows: int) -> int:
    """Return an estimate of the bytes that a step of so many tokens holds at its peak, in all
    processes that run it in this memory. See `_own_bytes`."""
    copies = 1 if forward is None else forward.copies
    return copies * _own_bytes(model, forward, tokens, rows)


def _own_bytes(model: nn.Module, forward: Forward | None, tokens: int, rows: int) -> int:
    """Return an estimate of the bytes that a step of so many tokens holds at its peak.

    rows: the number of tokens whose logits the step makes. forward: the way the model is run; None
    where that is not known yet: then the estimate is at most that of any way.

    On a CPU a layer's results are gone before the next one's. The estimate counts, for each token,
    the widest product's result as float32 with its inputs and the results made of it; for each row,
    the logits and their copies; and the scores of the blocks of attention under way (MLX queues
    some operations ahead). On a GPU, a queued operation's results are held until it has run: about
    twice the products' results, in half precision (measured: 166 kB a token and layer of an 8B).
    """
    outputs = _widths(model)
    vocabulary = max(outputs)
    widest: int = max([n for n in outputs if n != vocabulary] or outputs)
    logits = 4 * 4 * rows * vocabulary
    device = devices.current()
    if device.kind == "cpu":
        return logits + 4 * (6 * tokens * widest + 20 * (device.scores or 0))
    if forward is None:
        return logits
    products: int = sum(n for n in outputs if n != vocabulary)
    unpacked = forward.unpacked_bytes(tokens) + _scores_bytes(forward, device)
    return logits + unpacked + 4 * forward.tokens_at_once(tokens) * products


def _scores_bytes(forward: Forward, device: Device) -> int:
    """Return the bytes of a block's scores that a GPU holds, where MLX's attention of many queries
    makes the scores one by one. The scores are held in half precision before and after the softmax,
    and masked."""
    shapes = [store.shape for store in forward.stores]
    held = forward.attends_whole or not all(
        is_flash(shape.key_dim, shape.value_dim) for shape in shapes
    )
    return 8 * device.scores if held and device.scores is not None else 0


HEADS = ("n_heads", "num_heads", "num_attention_heads")
"""Names of the attribute in mlx-lm's attention modules that holds the number of query heads."""
MANY_HEADS = 128
"""The largest number of query heads of any model: that of DeepSeek V3."""


def query_heads(model: nn.Module) -> int:
    """Return the number of query heads of the model's attention, as its modules say; `MANY_HEADS`
    if none does."""
    said = [vars(module).get(name) for module in model.modules() for name in HEADS]
    return max((heads for heads in said if isinstance(heads, int)), default=MANY_HEADS)

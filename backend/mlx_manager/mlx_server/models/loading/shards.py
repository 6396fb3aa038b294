"""A model's weights on several devices: every rank keeps its share of each layer.

mlx-lm's models share themselves out (`shard`), where they can: heads of attention, columns and rows
of the MLPs and of experts. A product with the vocabulary that has a weight of its own is shared
out, too. Embeddings, norms and routers are on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from operator import itemgetter
from typing import Protocol

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_manager.mlx_server.devices.gathered import gathered
from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.models.facts import FormName

NOT_SHARED = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
)
"""Errors of mlx-lm's `shard` over a model that does not divide."""
BEHIND = frozenset({"o_proj", "out_proj", "down_proj"})
"""Names of the layers that mlx-lm divides along their inputs."""
ON_ONE = "`devices = 1` in its settings runs it on one device."


@dataclass(frozen=True, slots=True)
class ReadShare:
    """Read this rank's share of the weights, in a form; the answer comes when it is there."""

    form: FormName


class Spread(Protocol):
    """The devices that a model is spread over.

    Attributes:
        size: their number, one rank each.
        copies: ranks that keep their shares in one memory with this one's, this one included.
        group: MLX's group of them, which has come about at the latest when this returns.
    """

    @property
    def size(self) -> int: ...

    @property
    def copies(self) -> int: ...

    @property
    def group(self) -> mx.distributed.Group: ...

    def begin(self, share: ReadShare) -> None:
        """Have the other ranks read their shares; does not wait."""
        ...

    def wait(self) -> None:
        """Wait until the other ranks have their shares."""
        ...


def held(nbytes: int, spread: Spread | None) -> int:
    """Return the bytes that a spread model of so many bytes takes of this memory, about: what every
    rank has whole is not counted twice."""
    return nbytes if spread is None else -(-nbytes * spread.copies // spread.size)


def copies_of(spread: Spread | None) -> int:
    """Return the number of ranks in this memory; 1 for a model on one device."""
    return 1 if spread is None else spread.copies


def check_shared(model_id: str, model: nn.Module, model_type: str) -> None:
    """Check that mlx-lm can share the model out.

    Raises:
        ModelNotSupported: its architecture can't be.
    """
    if sharer(model) is None:
        raise ModelNotSupported(
            f"{model_id} is a {model_type!r} model, which mlx-lm {version('mlx-lm')} can't spread "
            f"over several devices. {ON_ONE}"
        )


def shard(model_id: str, model: nn.Module, group: mx.distributed.Group) -> None:
    """Keep this rank's share of the weights, lazily.

    Raises:
        ModelNotSupported: heads, or anything else, can't be divided by the number of ranks.
    """
    holder = sharer(model)
    assert holder is not None, "it has been checked"
    size, before = group.size(), _numbers(model)
    try:
        holder.shard(group)
    except NOT_SHARED as error:
        reason = _packing(holder, size) or (str(error) or type(error).__name__).removesuffix(".")
        raise ModelNotSupported(
            f"{model_id} can't be spread over {size} devices: {reason}. {ON_ONE}"
        ) from error
    _share_vocabulary(holder, group)
    for (path, name), whole in before.items():
        part = _numbers_of(dict(model.named_modules()).get(path)).get(name, whole)
        repeated = part == 1 and whole < size and size % whole == 0
        if part not in (whole, whole / size) and not repeated:
            raise ModelNotSupported(
                f"{model_id} can't be spread over {size} devices: {whole} ({name} of {path}) is no "
                f"multiple of {size}. {ON_ONE}"
            )


def _share_vocabulary(model: nn.Module, group: mx.distributed.Group) -> None:
    """Keep this rank's rows of the product with the vocabulary. It stays whole where its weight is
    the embeddings', or does not divide."""
    while (inner := model.get("language_model")) is not None:
        model = inner
    head = model.get("lm_head")
    share = None if head is None else gathered(head, group)
    if share is not None:
        model.lm_head = share


def _packing(model: nn.Module, size: int) -> str | None:
    """Return why the packed weights of a layer that is still whole don't divide along their inputs,
    as those behind attention and in MLPs must; None if all do."""
    for path, module in sorted(model.named_modules(), key=itemgetter(0)):
        if not isinstance(module, nn.QuantizedLinear | QuantizedSwitchLinear):
            continue
        name, groups = path.rpartition(".")[2], module.scales.shape[-1]
        if name in BEHIND and groups % size:
            return (
                f"{path} has {groups} groups of {module.group_size} packed weights along its "
                f'inputs, no multiple of {size} (`weights = "dequantize"` shares out dense ones)'
            )
    return None


def sharer(model: nn.Module) -> nn.Module | None:
    """Return the part of the model that can share itself out: a model that sees has it within."""
    part: nn.Module | None = model
    while part is not None and not hasattr(part, "shard"):
        part = part.get("language_model")
    return part


def _numbers(model: nn.Module) -> dict[tuple[str, str], int]:
    """Return the counts that modules keep, such as those of heads, by module and name."""
    return {
        (path, name): number
        for path, module in model.named_modules()
        for name, number in _numbers_of(module).items()
    }


def _numbers_of(module: nn.Module | None) -> dict[str, int]:
    if module is None:
        return {}
    return {
        name: number
        for name, number in vars(module).items()
        if type(number) is int and not name.startswith("_")
    }

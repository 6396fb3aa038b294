"""Models whose few rows are multiplied by packed weights."""

from __future__ import annotations

from mlx import nn

from mlx_manager.mlx_server.engine.fused.anatomy import Anatomy, Common, NotFusable
from mlx_manager.mlx_server.engine.fused.projections import packing_of
from mlx_manager.mlx_server.engine.kernels.cuda import TYPES, cuda_device
from mlx_manager.mlx_server.engine.kernels.kernel import Unsupported
from mlx_manager.mlx_server.engine.products import ProductKernels

# Of pages; the answer does not depend on it.
_PAGE_SIZE = 16


def multiplies_packed(model: nn.Module) -> bool:
    """Whether the default device has kernels for few rows and all of `model`'s packed weights, if
    they are all packed alike: of a common decoder that is stored so."""
    packed = any(type(module) is nn.QuantizedLinear for _, module in model.named_modules())
    # The device is asked first: to take a decoder to pieces computes a little.
    if not packed or isinstance(cuda_device(), Unsupported):
        return False
    try:
        common = Common.of(model, _PAGE_SIZE)
    except NotFusable:
        return False
    return common.layers[0].shape.dtype in TYPES and are_packed_alike(common)


def are_packed_alike(common: Common) -> bool:
    """Whether there are kernels for all of a decoder's layers and its head, and of one kind."""
    layers = [layer for anatomy in common.layers for layer in _multiplying(anatomy)]
    layers.append(common.head)
    if not all(type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding) for layer in layers):
        return False
    kinds = {(layer.bits, layer.group_size) for layer in layers}
    return len(kinds) == 1 and all(ProductKernels.serves(packing_of(layer)) for layer in layers)


def _multiplying(anatomy: Anatomy) -> tuple[nn.Module, ...]:
    return (*anatomy.qkv, anatomy.output, *anatomy.gate_up, anatomy.down)

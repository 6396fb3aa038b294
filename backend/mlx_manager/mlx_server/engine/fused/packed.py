"""Models whose few rows are multiplied by packed weights."""

from __future__ import annotations

from mlx import nn

from mlx_manager.mlx_server.engine.fused.anatomy import Common, Gates, NotFusable, Routes
from mlx_manager.mlx_server.engine.fused.mlps import flat, stored_in
from mlx_manager.mlx_server.engine.fused.projections import packing_of
from mlx_manager.mlx_server.engine.kernels.cuda import TYPES, cuda_device
from mlx_manager.mlx_server.engine.kernels.kernel import Unsupported
from mlx_manager.mlx_server.engine.products import ProductKernels
from mlx_manager.mlx_server.engine.products.factors import Packed, Weight

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
    head = _packed(common.head)
    found: list[Weight | None] = []
    for anatomy in common.layers:
        found += [_packed(layer) for layer in (*anatomy.qkv, anatomy.output)]
        match anatomy.mlp:
            case Gates(gate_up=gate_up, down=down):
                found += [_packed(layer) for layer in (*gate_up, down)]
            case Routes(gate_up=gate_up, down=down):
                found += [flat(stored_in(layer)) for layer in (*gate_up, down)]
    weights = [weight for weight in (head, *found) if isinstance(weight, Packed)]
    kinds = {(weight.bits, weight.group_size) for weight in weights}
    return (
        len(weights) == 1 + len(found)
        and len(kinds) == 1
        and ProductKernels.serves(weights[0], last=True)
        and all(map(ProductKernels.serves, weights[1:]))
    )


def _packed(layer: nn.Module) -> Packed | None:
    is_packed = type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
    return packing_of(layer) if is_packed else None

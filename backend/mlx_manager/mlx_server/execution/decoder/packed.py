"""Models whose few rows are multiplied by packed weights."""

from __future__ import annotations

from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_manager.mlx_server.devices.cuda.compiler.device import TYPES, cuda_device
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Packed, Weight
from mlx_manager.mlx_server.devices.cuda.matmul.forms import knows
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.execution.decoder.mlps import flat, stored_in
from mlx_manager.mlx_server.execution.decoder.projections import packing_of
from mlx_manager.mlx_server.execution.spec.decoder import DecoderSpec
from mlx_manager.mlx_server.execution.spec.layers import AttentionSpec, MLASpec
from mlx_manager.mlx_server.execution.spec.mlps import MLPAndMoESpec, MLPSpec, MoESpec
from mlx_manager.mlx_server.execution.spec.parts import NotFusable

_PACKED = (nn.QuantizedLinear, QuantizedSwitchLinear)
# Tokens a page; the answer does not depend on it.
_PAGE_SIZE = 16


def multiplies_packed(model: nn.Module) -> bool:
    """Return whether `model` is a common decoder with packed weights, and the default device has
    kernels for few rows that take these weights packed."""
    packed = any(isinstance(module, _PACKED) for _, module in model.named_modules())
    # The device is asked first: taking a decoder to pieces computes a little.
    if not packed or isinstance(cuda_device(), Unsupported):
        return False
    try:
        spec = DecoderSpec.of(model, _PAGE_SIZE)
    except NotFusable:
        return False
    return spec.layers[0].shape.dtype in TYPES and are_served(spec)


def are_served(spec: DecoderSpec) -> bool:
    """Return whether there are kernels for all packed weights of a decoder's layers and its head.

    Where there are experts, some layers may be packed and others not, each in its own way. A
    decoder without experts is served if all its weights are packed alike: then a layer is
    multiplied in one launch, which is worth it.
    """
    found: list[Weight | None] = [_packed(spec.head)]
    joined: list[Weight | None] = []
    experts: list[Weight] = []
    for layer in spec.layers:
        found.append(_packed(layer.output))
        # Projections of layers other than common attention are joined, and padded to as many
        # outputs as the kernels need.
        first = found if isinstance(layer, AttentionSpec) else joined
        first += [_packed(linear) for linear in layer.qkv]
        if isinstance(layer, MLASpec) and layer.queries is not None:
            found.append(_packed(layer.queries))
        of = layer.mlp
        for mlp in (of.mlp, of.moe) if isinstance(of, MLPAndMoESpec) else (of,):
            match mlp:
                case MLPSpec(gate_up=gate_up, down=down):
                    found += [_packed(linear) for linear in (*gate_up, down)]
                case MoESpec(gate_up=gate_up, down=down):
                    experts += [flat(stored_in(linear)) for linear in (*gate_up, down)]
    alone = [weight for weight in found if isinstance(weight, Packed)]
    weights = [*alone, *(weight for weight in joined if isinstance(weight, Packed))]
    if not (all(map(ProductKernels.serves, alone)) and all(map(knows, [*weights, *experts]))):
        return False
    kinds = {(weight.bits, weight.group_size) for weight in weights}
    whole = len(weights) == len(found) + len(joined)
    return bool(experts) or (whole and len(kinds) == 1)


def _packed(layer: nn.Module) -> Packed | None:
    is_packed = type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
    return packing_of(layer) if is_packed else None

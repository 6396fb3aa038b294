"""The form of a model's weights in memory: as stored, in float32, or dequantised.

MLX's quantised and 16-bit products are fast on Metal and slow elsewhere. So at load one product
is timed in every form that memory allows, and the fastest is taken (design, "Weights policy").
Where the engine multiplies few rows by packed weights faster than by any dense ones, and many
rows not, a model has both, if they fit.
A conversion is lazy: `evaluate` carries it out a piece at a time, and a piece's stored form is
freed before the next is read, so that both forms of a whole model are never in memory together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.errors import ModelTooLarge
from mlx_manager.mlx_server.models.facts import FormName
from mlx_manager.mlx_server.utils.progress import Doing, counted, unheard
from mlx_manager.mlx_server.utils.text import sized

Setting = Literal["auto", "keep", "dequantize"]
Device = devices.Kind


class Sized(Protocol):
    """What takes memory."""

    @property
    def nbytes(self) -> int: ...


Measured = TypeVar("Measured", bound=Sized)

PIECE = 128 * 2**20
"""Bytes evaluated at once."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form that a model could take, of `nbytes` bytes.

    dense: quantised layers are dequantised. wide: floats of 16 bits become float32. keeps: dense
    layers have what they were made of beside their weights; see `dequantized`.
    """

    name: FormName
    nbytes: int
    dense: bool = False
    wide: bool = False
    keeps: bool = False


def default_device() -> Device:
    return devices.current().kind


def forms_of(model: nn.Module, device: Device, *, multiplies_packed: bool = False) -> list[Form]:
    """The forms that the device can compute with and might be fast with, the stored one first.

    multiplies_packed: the engine has kernels for few rows and this model's packed weights.
    """
    quantized = [module for _, module in model.named_modules() if is_quantized(module)]
    arrays: list[mx.array] = [array for _, array in tree_flatten(model.parameters())]
    stored = sum(array.nbytes for array in arrays)
    widening = sum(array.nbytes for array in arrays if is_narrow(array))
    forms = [Form("stored", stored)]
    if multiplies_packed and any(isinstance(layer, QuantizedSwitchLinear) for layer in quantized):
        # Of an expert's rows there are few, whatever comes: packed weights serve them all.
        return forms
    if quantized and device != "metal":
        gain = sum(dense_bytes(layer) - packed_bytes(layer) for layer in quantized)
        forms.append(Form("dequantized", stored + gain, dense=True))
        if multiplies_packed:
            kept = sum(packed_bytes(layer) for layer in quantized if keeps(model, layer))
            nbytes = stored + gain + kept
            forms.append(Form("stored+dequantized", nbytes, dense=True, keeps=True))
    if device == "cpu" and (widening or any(dense_dtype(layer).size < 4 for layer in quantized)):
        gains = [(wide_bytes(layer) - widened_packed_bytes(layer), layer) for layer in quantized]
        gain = sum(gain for gain, layer in gains if not follows(layer))
        forms.append(Form("float32", stored + widening + gain, wide=True))
        if quantized:
            nbytes = stored + widening + sum(gain for gain, _ in gains)
            forms.append(Form("dequantized-float32", nbytes, dense=True, wide=True))
    if device == "cpu":
        forms = [form for form in forms if form.wide or not has_narrow_experts(model, form)]
    return forms


def has_narrow_experts(model: nn.Module, form: Form) -> bool:
    """Whether experts would be dense and not float32, which MLX can't multiply on a CPU."""
    return any(
        (form.dense and isinstance(module, QuantizedSwitchLinear) and dense_dtype(module).size < 4)
        or (isinstance(module, SwitchLinear) and is_narrow(module.weight))
        for _, module in model.named_modules()
    )


def shortlist(forms: list[Form], setting: Setting, room: int) -> tuple[list[Form], str]:
    """The forms to choose from, and the reason where that leaves one.

    `room`: bytes that a converted model may take; the stored form has been granted its own.

    Raises:
        ModelTooLarge: none of those that the owner asked for, or the device can compute, fits.
    """
    reason = "this device is fast with no other form"
    match setting:
        case "keep":
            forms, reason = forms[:1], "the setting is keep"
        case "dequantize" if any(form.dense for form in forms):
            forms = [form for form in forms if form.dense and not form.keeps]
            reason = "the setting is dequantize"
        case _ if any(form.keeps for form in forms):
            # Dense weights alone would be slower for few rows, and leave no memory for many.
            forms = [form for form in forms if form.keeps or not form.dense]
        case _:
            pass
    fitting = [form for form in forms if form.name == "stored" or form.nbytes <= room]
    if not fitting:
        least = min(forms, key=lambda form: form.nbytes)
        raise ModelTooLarge(
            f"The weights take {sized(least.nbytes)} in the form {least.name}, "
            f"and there is room for {sized(max(room, 0))}."
        )
    if len(fitting) < len(forms):
        others = ", ".join(f"{f.name} {sized(f.nbytes)}" for f in forms if f not in fitting)
        reason = f"for other forms the room of {sized(max(room, 0))} is too small: {others}"
    return fitting, reason


# ---------------------------------------------------------------------------------------------
# Conversion
# ---------------------------------------------------------------------------------------------


def convert(model: nn.Module, form: Form) -> None:
    """Bring `model` into `form`, lazily: nothing is computed before `evaluate`."""
    layers = [(name, layer) for name, layer in model.named_modules() if unpacks(layer, form)]
    dense = [
        (name, dequantized(layer, form, keep=form.keeps and keeps(model, layer)))
        for name, layer in layers
    ]
    model.update_modules(tree_unflatten(dense))
    if form.wide:
        model.update(tree_map(widened, model.parameters()))


def keeps(model: nn.Module, layer: nn.Module) -> bool:
    """Whether a dense `layer` of `model` is to have its packed weights, too: not a mere embedding,
    which multiplies nothing."""
    return not isinstance(layer, nn.QuantizedEmbedding) or "lm_head" not in model


def converted(layer: nn.Module, form: Form) -> nn.Module:
    """A single layer in `form`; `layer` may be changed."""
    if unpacks(layer, form):
        layer = dequantized(layer, form)
    if form.wide:
        layer.update(tree_map(widened, layer.parameters()))
    return layer


def evaluate(model: nn.Module, doing: Doing = unheard) -> None:
    """Compute (read, convert) the parameters, and what the modules keep beside them."""
    kept = [value for module in model.modules() for value in kept_by(module)]
    parameters = [array for _, array in tree_flatten(model.parameters())]
    # A piece that nothing refers to any more is freed before the next one is computed.
    pieces = list(in_groups([*parameters, *kept], PIECE))
    for piece in counted(doing, "its weights are read", pieces):
        mx.eval(piece)


def in_groups(items: Iterable[Measured], most: int) -> Iterator[list[Measured]]:
    """Neighbours together until they have `most` bytes, with the one that reaches it."""
    group: list[Measured] = []
    for item in items:
        group.append(item)
        if sum(item.nbytes for item in group) >= most:
            yield group
            group = []
    if group:
        yield group


def kept_by(module: nn.Module) -> list[mx.array]:
    """What is no parameter by its name, such as a rotation's frequencies."""
    return [
        value
        for name, value in module.items()
        if name.startswith("_") and isinstance(value, mx.array)
    ]


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """What the embedding puts out, and every layer after it."""
    for _, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            dtype: mx.Dtype = module(mx.array([0])).dtype
            return dtype
    return mx.float32


def is_quantized(module: nn.Module) -> bool:
    """Whether it is a layer that `dequantized` knows; others are left as they are."""
    match module:
        case nn.QuantizedLinear() | nn.QuantizedEmbedding() | QuantizedMultiLinear():
            return True
        case QuantizedSwitchLinear():
            return module.get("global_scale") is None
    return False


def unpacks(module: nn.Module, form: Form) -> bool:
    """Whether `form` has `module` dequantised."""
    return is_quantized(module) and (form.dense or (form.wide and not follows(module)))


def follows(layer: nn.Module) -> bool:
    """Whether a quantised layer's output is float32 once its scales, or its inputs, are.

    An embedding whose scales are not floats puts out bfloat16 whatever is done to the rest.
    """
    return not isinstance(layer, nn.QuantizedEmbedding) or mx.issubdtype(
        layer.scales.dtype, mx.floating
    )


def dequantized(layer: nn.Module, form: Form, *, keep: bool = False) -> nn.Module:
    """The same layer with a dense weight: float32, or of the scales' type where that is a float.

    keep: with `packed`, `packed_scales` and `packed_biases`, too, which are as
    `mx.quantized_matmul` takes them with its `group_size` and `bits`; the engine finds them there.
    """
    match layer:
        case nn.QuantizedLinear():
            dense = nn.Linear(1, 1, bias=False)
        case nn.QuantizedEmbedding():
            dense = nn.Embedding(1, 1)
        case QuantizedSwitchLinear():
            dense = SwitchLinear(1, 1, 1, bias=False)
        case QuantizedMultiLinear():
            dense = MultiLinear(1, 1, 1)
        case _:
            raise TypeError(f"{type(layer).__name__} is no quantised layer known here")
    # Widened before, not after: a product of two 16-bit numbers rarely fits 16 bits.
    scales, biases = layer.scales, layer.get("biases")
    if form.wide:
        scales, biases = widened(scales), None if biases is None else widened(biases)
    dense.weight = mx.dequantize(
        layer.weight,
        scales,
        biases,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=mx.float32 if form.wide else dense_dtype(layer),
    )
    if "bias" in layer:
        dense.bias = layer.bias
    if keep:
        dense.packed, dense.packed_scales, dense.packed_biases = packing(layer)
        dense.group_size, dense.bits = layer.group_size, layer.bits
    dense.eval()
    return dense


def dense_dtype(layer: nn.Module) -> mx.Dtype:
    scales: mx.Dtype = layer.scales.dtype
    return scales if mx.issubdtype(scales, mx.floating) else mx.bfloat16


def packing(layer: nn.Module) -> list[mx.array]:
    """A quantised layer's weight, scales and biases."""
    arrays = (layer.weight, layer.scales, layer.get("biases"))
    return [array for array in arrays if array is not None]


def packed_bytes(layer: nn.Module) -> int:
    return sum(array.nbytes for array in packing(layer))


def widened_packed_bytes(layer: nn.Module) -> int:
    return sum(array.nbytes * (2 if is_narrow(array) else 1) for array in packing(layer))


def dense_bytes(layer: nn.Module) -> int:
    return elements(layer) * dense_dtype(layer).size


def wide_bytes(layer: nn.Module) -> int:
    return 4 * elements(layer)


def elements(layer: nn.Module) -> int:
    """Numbers in a layer's weight, packed or not."""
    size: int = layer.weight.size
    return size * 32 // layer.bits if is_quantized(layer) else size


def is_narrow(array: mx.array) -> bool:
    return array.dtype in (mx.float16, mx.bfloat16)


def widened(array: Any) -> Any:
    return array.astype(mx.float32) if is_narrow(array) else array

"""The form of a model's weights in memory: as stored, in float32, or dequantised.

MLX's quantised and 16-bit products are fast on Metal and slow elsewhere. So at load one product
is timed in every form that memory allows, and the fastest is taken (design, "Weights policy").
Where packed weights are faster than dense ones for few rows and slower for many, a model has both,
if they fit.

A conversion is lazy: `evaluate` carries it out a piece at a time. The stored form of a piece is
freed before the next is read, so both forms of a whole model are never in memory together.
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
    """Anything that takes `nbytes` bytes of memory."""

    @property
    def nbytes(self) -> int: ...


Measured = TypeVar("Measured", bound=Sized)

PIECE = 128 * 2**20
"""Bytes evaluated at once."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form that a model's weights could take, of `nbytes` bytes.

    dense: quantised layers are dequantised. wide: floats of 16 bits become float32. keeps: dense
    layers keep their packed weights, too; see `dequantized`.
    """

    name: FormName
    nbytes: int
    dense: bool = False
    wide: bool = False
    keeps: bool = False


def default_device() -> Device:
    return devices.current().kind


def forms_of(model: nn.Module, device: Device, *, multiplies_packed: bool = False) -> list[Form]:
    """Return the forms that the device can compute with and that may be fast, the stored one first.

    multiplies_packed: the engine has kernels for few rows and this model's packed weights.
    """
    quantized = [module for _, module in model.named_modules() if is_quantized(module)]
    arrays: list[mx.array] = [array for _, array in tree_flatten(model.parameters())]
    stored = sum(array.nbytes for array in arrays)
    widening = sum(array.nbytes for array in arrays if is_narrow(array))
    forms = [Form("stored", stored)]
    if multiplies_packed and any(isinstance(layer, QuantizedSwitchLinear) for layer in quantized):
        # An expert has few rows in any step, so packed weights serve all steps.
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
    """Return whether `form` makes experts dense but not float32, which MLX can't multiply on a
    CPU."""
    return any(
        (form.dense and isinstance(module, QuantizedSwitchLinear) and dense_dtype(module).size < 4)
        or (isinstance(module, SwitchLinear) and is_narrow(module.weight))
        for _, module in model.named_modules()
    )


def shortlist(forms: list[Form], setting: Setting, room: int) -> tuple[list[Form], str]:
    """Return the forms to choose from, and the reason if only one is left.

    room: bytes that a converted model may take; the stored form has been granted its own.

    Raises:
        ModelTooLarge: no form that the owner asked for and the device can compute fits.
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
    """Return whether a dense `layer` of `model` keeps its packed weights, too. An embedding that
    is not also the head does not: it multiplies nothing."""
    return not isinstance(layer, nn.QuantizedEmbedding) or "lm_head" not in model


def converted(layer: nn.Module, form: Form) -> nn.Module:
    """Return a single layer in `form`; `layer` may be changed."""
    if unpacks(layer, form):
        layer = dequantized(layer, form)
    if form.wide:
        layer.update(tree_map(widened, layer.parameters()))
    return layer


def evaluate(model: nn.Module, doing: Doing = unheard) -> None:
    """Compute (read, convert) the parameters, and the arrays that modules keep beside them."""
    kept = [value for module in model.modules() for value in kept_by(module)]
    parameters = [array for _, array in tree_flatten(model.parameters())]
    # A piece that nothing refers to any more is freed before the next one is computed.
    pieces = list(in_groups([*parameters, *kept], PIECE))
    for piece in counted(doing, "its weights are read", pieces):
        mx.eval(piece)


def in_groups(items: Iterable[Measured], most: int) -> Iterator[list[Measured]]:
    """Yield groups of neighbours. A group ends with the item with which it reaches `most` bytes."""
    group: list[Measured] = []
    for item in items:
        group.append(item)
        if sum(item.nbytes for item in group) >= most:
            yield group
            group = []
    if group:
        yield group


def kept_by(module: nn.Module) -> list[mx.array]:
    """Return a module's arrays that are no parameters by their names, such as RoPE frequencies."""
    return [
        value
        for name, value in module.items()
        if name.startswith("_") and isinstance(value, mx.array)
    ]


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """Return the dtype of the embedding's output, which every layer after it has, too."""
    for _, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
            dtype: mx.Dtype = module(mx.array([0])).dtype
            return dtype
    return mx.float32


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module is a quantised layer that `dequantized` knows; others stay packed."""
    match module:
        case nn.QuantizedLinear() | nn.QuantizedEmbedding() | QuantizedMultiLinear():
            return True
        case QuantizedSwitchLinear():
            return module.get("global_scale") is None
    return False


def unpacks(module: nn.Module, form: Form) -> bool:
    """Return whether `form` dequantises `module`."""
    return is_quantized(module) and (form.dense or (form.wide and not follows(module)))


def follows(layer: nn.Module) -> bool:
    """Return whether a quantised layer's output is float32 once its scales or inputs are.

    An embedding whose scales are not floats always has bfloat16 output.
    """
    return not isinstance(layer, nn.QuantizedEmbedding) or mx.issubdtype(
        layer.scales.dtype, mx.floating
    )


def dequantized(layer: nn.Module, form: Form, *, keep: bool = False) -> nn.Module:
    """Return the layer with a dense weight: float32 if `form` is wide, else of the scales' type, or
    bfloat16 if that is no float.

    keep: add `packed`, `packed_scales` and `packed_biases` for the engine, as `mx.quantized_matmul`
    takes them, with their `group_size` and `bits`.
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
    # The scales are widened first: a product of two 16-bit numbers rarely fits 16 bits.
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
    """Return a quantised layer's weight, its scales and, if it has them, its biases."""
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
    """Return the number of elements in a layer's weight, packed or not."""
    size: int = layer.weight.size
    return size * 32 // layer.bits if is_quantized(layer) else size


def is_narrow(array: mx.array) -> bool:
    return array.dtype in (mx.float16, mx.bfloat16)


def widened(array: Any) -> Any:
    return array.astype(mx.float32) if is_narrow(array) else array

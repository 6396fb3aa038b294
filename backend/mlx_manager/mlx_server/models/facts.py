"""Facts about a loaded model, without the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mlx_manager.mlx_server.core import Kind, TokenizerInfo

FormName = Literal["stored", "float32", "dequantized", "dequantized-float32", "stored+dequantized"]


@dataclass(frozen=True, slots=True)
class WeightsForm:
    """The form that was chosen for the weights, and the reason. `dtype` is that of the
    activations, hence of the KV pages."""

    name: FormName
    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model.

    nbytes: measured bytes of its weights. context_length: tokens of prompt and answer, or of an
    encoder's input. sampling: the makers' sampling values. thinks: True if its answers may begin
    with thinking; None for an encoder. input_modalities: "text", and "image" if it sees. seconds:
    duration of the load. draft_model: the id of the model that drafts for it; None: there is none.
    mtp: the id of the model or folder whose MTP head does.
    devices: the number that it is spread over.
    """

    id: str
    kind: Kind
    family: str
    context_length: int
    nbytes: int
    weights: WeightsForm
    tokenizer: TokenizerInfo
    sampling: Mapping[str, float] = field(default_factory=dict)
    thinks: bool | None = None
    input_modalities: tuple[str, ...] = ("text",)
    seconds: float = 0.0
    draft_model: str | None = None
    mtp: str | None = None
    devices: int = 1

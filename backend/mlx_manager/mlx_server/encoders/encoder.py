"""Encoders: mlx-embeddings' architectures, and layers that turn their output to vectors or scores.

Of mlx-embeddings only the architectures are used, which need nothing but MLX: importing the
package itself would import mlx-vlm, and with it OpenCV, SciPy, datasets and sound.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.models.architectures import ENCODERS
from mlx_manager.mlx_server.models.checkpoint.sentence import Activation, Pooling
from mlx_manager.mlx_server.models.loading.weights import default_device

ALIAS = "mlx_manager_architectures"
"""The name that `mlx_embeddings.models` is imported by."""
SEGMENTED = ("bert", "xlm_roberta")
"""Architectures that are told which of two texts a token belongs to."""
SHORTEST = 64
"""Tokens of the shortest batch, where batches are filled up to few shapes."""


def architecture(name: str) -> ModuleType:
    """Return a module of `mlx_embeddings.models`.

    Raises:
        ModelNotSupported: mlx-embeddings is not installed.
    """
    if ALIAS not in sys.modules:
        package = importlib.util.find_spec("mlx_embeddings")
        if package is None or package.origin is None:
            raise ModelNotSupported(
                "Embedding models and rerankers need mlx-embeddings: "
                "pip install --no-deps 'mlx-embeddings>=0.1,<0.2'."
            )
        folder = Path(package.origin).parent / "models"
        spec = importlib.util.spec_from_file_location(
            ALIAS, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[ALIAS] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{ALIAS}.{name}")


class Encoder(nn.Module):  # type: ignore[misc]
    """The architecture, its pooling or head, and the layers after it.

    Without a head a row becomes a vector, not yet normalised; with one, its logits.
    """

    def __init__(self, config: Mapping[str, Any], pooling: Pooling, head: nn.Module | None) -> None:
        super().__init__()
        name = ENCODERS[config["model_type"]]
        module = architecture(name)
        self.body = module.Model(module.ModelArgs.from_dict(arguments(config)))
        if name == "modernbert":
            # mlx-embeddings takes GELU's approximation by tanh; the model was trained without.
            for layer in self.body.model.layers:
                layer.mlp.act = nn.GELU()
        self.dense: list[nn.Module] = []
        if head is not None:
            self.head = head
        self._name, self._pooling, self._scores = name, pooling, head is not None
        self._listener = listened_to(self._layers)
        device = default_device()
        # MLX's fused attention.
        self._fused = device != "cpu" and name in ("modernbert", "qwen3")
        self._few_shapes = self._fused and device == "cuda"
        self._padding = int(config.get("pad_token_id") or 0)

    @property
    def _layers(self) -> list[nn.Module]:
        body = self.body
        layers: list[nn.Module] = (
            body.encoder.layer if self._name in SEGMENTED else body.model.layers
        )
        return layers

    @property
    def padding(self) -> int:
        """Return the id that fills up short rows."""
        return self._padding

    @property
    def needs_pooler(self) -> bool:
        """Return whether the architecture's own pooler is read."""
        return self._scores and self._name == "bert"

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""
        return int(self.body.config.vocab_size)

    @property
    def segments(self) -> int:
        """Return the number of segments; 2 for an architecture that does not read segments."""
        return int(self.body.config.type_vocab_size) if self._name in SEGMENTED else 2

    @property
    def dimensions(self) -> int:
        """Return the number of values in a vector."""
        last = self.dense[-1].linear.weight.shape[0] if self.dense else self.body.config.hidden_size
        return int(last)

    def filled_up(self, rows: int, longest: int) -> tuple[int, int]:
        """Return the shape that a batch is filled up to. There are few shapes on NVIDIA, where each
        new one stops the streams beside it for 40 ms and up to a second: cuDNN, MLX's fused
        attention there, prepares itself.
        """
        return next_shape(rows, longest) if self._few_shapes else (rows, longest)

    def working_bytes(self, rows: int, longest: int) -> int:
        """Return an estimate of the bytes that a batch holds at its worst moment.

        A layer's results are gone before the next one's: the widest product's, as float32 and with
        what it is made from and into, for each token; and the scores of attention, of every head
        where MLX has no kernel that keeps them to itself.
        """
        config = self.body.config
        gated = 2 if self._name in ("modernbert", "qwen3") else 1
        widest = max(3 * config.hidden_size, gated * config.intermediate_size)
        rows, longest = self.filled_up(rows, longest)
        scores = longest * longest * (1 if self._fused else config.num_attention_heads)
        nbytes: int = 4 * rows * (6 * longest * widest + 4 * scores)
        return nbytes

    def __call__(
        self,
        ids: mx.array,
        segments: mx.array,
        lengths: mx.array,
        made: list[mx.array] | None = None,
    ) -> mx.array:
        """Return (rows, dimensions or labels) in float32 for rows that are padded at their ends.

        ids, segments: int32 (rows, longest); a segment is 1 in the second text of a pair.
        lengths: int32 (rows,). made: gets each layer's result, not evaluated.
        """
        mask = mx.arange(ids.shape[1])[None] < lengths[:, None]
        with self._listener.listening(made):
            hidden, first = self.read(ids, segments, mask)
        if self._scores:
            logits: mx.array = self.head(first if first is not None else hidden, mask)
            return logits.astype(mx.float32)
        vectors = pooled(hidden, mask, lengths, self._pooling)
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors

    def read(
        self, ids: mx.array, segments: mx.array, mask: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Return the last layer's output, and what BERT's own pooler makes of it."""
        match self._name:
            case "bert":
                weight = self.body.embeddings.LayerNorm.weight
                out = self.body(ids, segments, mask.astype(weight.dtype))
                return out.last_hidden_state, out.pooler_output
            case "xlm_roberta":
                weight = self.body.embeddings.LayerNorm.weight
                out = self.body(ids, mask.astype(weight.dtype), token_type_ids=segments)
                return out.last_hidden_state, None
            case "modernbert":
                weight = self.body.model.embeddings.norm.weight
                out = self.body.model(ids, attention_mask=mask.astype(weight.dtype))
                return out["last_hidden_state"], None
            case _:
                return self.body.model(ids, attention_mask=mask.astype(mx.int32)), None


class Listener:
    """Gets the results of layers as they are put together, while somebody listens."""

    def __init__(self) -> None:
        self._made: list[mx.array] | None = None

    @contextmanager
    def listening(self, made: list[mx.array] | None) -> Iterator[None]:
        self._made = made
        try:
            yield
        finally:
            self._made = None

    def hear(self, result: mx.array) -> None:
        if self._made is not None:
            self._made.append(result)


def listened_to(layers: Sequence[nn.Module]) -> Listener:
    """Return a listener that is told of the results of `layers`, which are of one class. Change the
    layers to a class that tells it: mlx-embeddings' own loops over them have no hook."""
    listener = Listener()

    class Telling(type(layers[0])):  # type: ignore[misc]
        def __call__(self, *given: Any, **named: Any) -> Any:
            result = super().__call__(*given, **named)
            listener.hear(result[0] if isinstance(result, tuple) else result)
            return result

    for layer in layers:
        layer.__class__ = Telling
    return listener


def next_shape(rows: int, longest: int) -> tuple[int, int]:
    """Return the next power of two of rows, and the next of four lengths in each octave from 64
    tokens on: in the mean a tenth more tokens in each row."""
    step = max(SHORTEST, 1 << max(0, (longest - 1).bit_length() - 3))
    return 1 << (rows - 1).bit_length(), -(-longest // step) * step


def arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` as mlx-embeddings knows it: the bare model, whatever head the checkpoint came
    with, and RoPE's bases by the names they had before transformers 5."""
    ropes = config.get("rope_parameters") or {}
    bases = {
        "rope_theta": ropes.get("rope_theta"),
        "global_rope_theta": ropes.get("full_attention", {}).get("rope_theta"),
        "local_rope_theta": ropes.get("sliding_attention", {}).get("rope_theta"),
    }
    given = {name: base for name, base in bases.items() if base is not None}
    return {**config, **given, "architectures": ["Model"], "add_pooling_layer": True}


def pooled(hidden: mx.array, mask: mx.array, lengths: mx.array, pooling: Pooling) -> mx.array:
    """Pool `hidden`, (rows, longest, dimensions), to (rows, dimensions) in float32."""
    match pooling:
        case "mean":
            shown = mx.where(mask[..., None], hidden.astype(mx.float32), 0.0)
            return shown.sum(axis=1) / lengths[:, None]
        case "cls":
            return hidden[:, 0].astype(mx.float32)
        case "last":
            return hidden[mx.arange(hidden.shape[0]), lengths - 1].astype(mx.float32)


class DenseLayer(nn.Module):  # type: ignore[misc]
    """sentence-transformers' Dense."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: Activation) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self._activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        match self._activation:
            case "tanh":
                return mx.tanh(y)
            case "sigmoid":
                return mx.sigmoid(y)
            case "identity":
                return y


# ---------------------------------------------------------------------------------------------
# Heads, which mlx-embeddings lacks or mixes with the pooling
# ---------------------------------------------------------------------------------------------


class BertHead(nn.Module):  # type: ignore[misc]
    """`BertForSequenceClassification`'s: one layer on what the model's own pooler gives."""

    def __init__(self, hidden: int, labels: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(hidden, labels)

    def __call__(self, first: mx.array, mask: mx.array) -> mx.array:
        logits: mx.array = self.classifier(first)
        return logits


class RobertaHead(nn.Module):  # type: ignore[misc]
    """`RobertaClassificationHead`: a layer, tanh and a layer on the first token."""

    def __init__(self, hidden: int, labels: int) -> None:
        super().__init__()
        self.classifier = {
            "dense": nn.Linear(hidden, hidden),
            "out_proj": nn.Linear(hidden, labels),
        }

    def __call__(self, hidden: mx.array, mask: mx.array) -> mx.array:
        logits: mx.array = self.classifier["out_proj"](
            mx.tanh(self.classifier["dense"](hidden[:, 0]))
        )
        return logits


class ModernBertHead(nn.Module):  # type: ignore[misc]
    """`ModernBertForSequenceClassification`'s: a prediction head on the pooled tokens."""

    def __init__(self, config: Mapping[str, Any], labels: int) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.head = {
            "dense": nn.Linear(size, size, bias=config.get("classifier_bias", False)),
            "norm": nn.LayerNorm(
                size, eps=config.get("norm_eps", 1e-5), bias=config.get("norm_bias", False)
            ),
        }
        self.classifier = nn.Linear(size, labels)
        self._pooling: Pooling = "mean" if config.get("classifier_pooling") == "mean" else "cls"

    def __call__(self, hidden: mx.array, mask: mx.array) -> mx.array:
        vectors = pooled(hidden, mask, mask.sum(axis=1), self._pooling).astype(hidden.dtype)
        logits: mx.array = self.classifier(self.head["norm"](nn.gelu(self.head["dense"](vectors))))
        return logits


def head_of(config: Mapping[str, Any], labels: int, model_id: str) -> nn.Module:
    """
    Raises:
        ModelNotSupported: the architecture has none that is known here.
    """
    match ENCODERS[config["model_type"]]:
        case "bert":
            return BertHead(config["hidden_size"], labels)
        case "xlm_roberta":
            return RobertaHead(config["hidden_size"], labels)
        case "modernbert":
            return ModernBertHead(config, labels)
        case _:
            raise ModelNotSupported(
                f"{model_id} is a {config['model_type']} reranker; of that architecture only "
                "embedding models can be served."
            )

"""Language models inside checkpoints that see and for which mlx-lm has no class.

mlx-lm has a class for the language model itself. It is built from `text_config`, and its tensors
are found under any of the names that transformers and mlx-vlm give them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.models.checkpoint.heads import TIE
from mlx_manager.mlx_server.models.families import vision_facts
from mlx_manager.mlx_server.models.family import VisionFacts

AROUND = ("model.", "language_model.", "text_model.")
"""Modules that hold the language model, in any nesting."""
HEAD = "lm_head."
INNER = "language_model."
QUANTISATIONS = ("quantization", "quantization_config")


def with_whole_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a checkpoint that sees with all settings of its language model in
    `text_config`.

    transformers writes whether embeddings are tied beside it. Where the language model is built
    from `text_config` alone, that has transformers' defaults, too, and layers' own quantisations
    get the names that the layers have here. Other configs are returned as they are.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    facts, text = vision_facts(config), config.get("text_config")
    if facts is None or not isinstance(text, Mapping):
        return dict(config)
    if TIE in config:
        text = {TIE: config[TIE], **text}
    if not facts.language:
        return {**config, "text_config": text}
    kind = text.get("model_type", "llama")
    defaults: Mapping[str, Any] = {}
    if kind in CONFIG_MAPPING:
        defaults = CONFIG_MAPPING[kind](**text).to_dict()

    def own(path: str) -> str:
        is_layer = "." in path and not path.startswith(facts.tensors)
        return renamed(path) if is_layer else path

    changed = {
        name: {own(path): value for path, value in found.items()}
        for name in QUANTISATIONS
        if isinstance(found := config.get(name), Mapping)
    }
    return {**config, **changed, "text_config": {**defaults, **text, "model_type": kind}}


def renamed(name: str) -> str:
    """Return the name of a language model's tensor or layer in `LanguageModel`."""
    rest, stripped = name, True
    while stripped:
        stripped = False
        for module in AROUND:
            if rest.startswith(module):
                rest, stripped = rest.removeprefix(module), True
    return INNER + (rest if rest.startswith(HEAD) or rest == HEAD[:-1] else f"model.{rest}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of `LanguageModel`: the class of the language model, and its arguments."""

    make: Callable[[Any], nn.Module]
    text: Any
    facts: VisionFacts


@dataclass(frozen=True, slots=True)
class Inner:
    """Maker of `Arguments`, in the form in which `load_model` wants it."""

    make: Callable[[Any], nn.Module]
    arguments: Any
    facts: VisionFacts

    def from_dict(self, config: Mapping[str, Any]) -> Arguments:
        """Return the arguments by a whole config.json."""
        text = self.arguments.from_dict(config["text_config"])
        return Arguments(self.make, text, self.facts)


class LanguageModel(nn.Module):  # type: ignore[misc]
    """A checkpoint that sees, without what it sees by."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.args = arguments.text
        self.model_type = arguments.text.model_type
        self.language_model = arguments.make(arguments.text)
        self._facts = arguments.facts

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        more = {} if input_embeddings is None else {"input_embeddings": input_embeddings}
        logits: mx.array = self.language_model(inputs, cache=cache, **more)
        return logits

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the language model's tensors under this module's names."""
        own = {
            renamed(name).removeprefix(INNER): array
            for name, array in weights.items()
            if not name.startswith(self._facts.tensors)
        }
        if hasattr(self.language_model, "sanitize"):
            own = self.language_model.sanitize(own)
        return {INNER + name: array for name, array in own.items()}

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.language_model.layers)

    def make_cache(self) -> list[Any]:
        """Return the language model's caches, one for each layer."""
        from mlx_lm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self.language_model))


def language_classes(
    config: Mapping[str, Any], classes: Callable[..., tuple[Any, Any]]
) -> tuple[Callable[[Any], nn.Module], Any] | None:
    """Return the classes of a checkpoint whose language model is built alone, as `load_model` wants
    them; None for other checkpoints.

    classes: mlx-lm's function that finds the classes of a config.
    """
    facts = vision_facts(config)
    if facts is None or not facts.language:
        return None
    make, arguments = classes(config=config["text_config"])
    return LanguageModel, Inner(make, arguments, facts)

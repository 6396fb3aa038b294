"""Settings that transformers 5 writes by another name than mlx-lm reads, rotary ones aside.

Where mlx-lm has a default, it would take that silently: every fourth layer of Cohere 2 and every
sixth of Gemma 3 would have full attention, whatever `layer_types` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.models.families import CONFIG

EITHER = ("num_experts", "num_local_experts")
"""Two names of one setting, of which transformers 5 always writes `num_local_experts`."""
EVERY_FROM_THE_FIRST = {"modernbert": "global_attn_every_n_layers"}
"""As `ConfigFacts.periods`, where the first of so many layers has full attention."""
FULL = "full_attention"


def with_old_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config`, and its text model's, with the settings by transformers 4's names added.

    Raises:
        ModelNotSupported: the class can't have the order of its layers.
    """
    changed = {**config, **dict(_missing(config))}
    if isinstance(text := config.get("text_config"), Mapping):
        changed["text_config"] = with_old_names(text)
    return changed


def _missing(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    known = [name for name in EITHER if config.get(name) is not None]
    if len(known) == 1:
        yield from ((name, config[known[0]]) for name in EITHER)
    kinds, model_type = config.get("layer_types"), config.get("model_type")
    for old, new in CONFIG.names.get(str(model_type), {}).items():
        if old not in config and new in config:
            yield old, config[new]
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or not kinds:
        return
    if not isinstance(model_type, str):
        return
    if names := CONFIG.layer_types.get(model_type):
        yield "layer_types", [names.get(kind, kind) for kind in kinds]
    if name := CONFIG.periods.get(model_type):
        yield name, period(kinds, model_type)
    if name := EVERY_FROM_THE_FIRST.get(model_type):
        yield name, period([*kinds[1:], kinds[0]], model_type)


def period(kinds: Sequence[str], model_type: str) -> int:
    """Return the number of layers of which the last has full attention.

    Raises:
        ModelNotSupported: the layers with full attention come at no regular distance.
    """
    every = next((i + 1 for i, kind in enumerate(kinds) if kind == FULL), len(kinds) + 1)
    if any((kind == FULL) != ((i + 1) % every == 0) for i, kind in enumerate(kinds)):
        raise ModelNotSupported(
            f"Its config.json has layer_types in which {FULL!r} is not every {every}th layer; "
            f"mlx-lm's {model_type} can't be built so."
        )
    return every

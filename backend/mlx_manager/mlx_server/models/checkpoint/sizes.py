"""Size of a model by its config.json, compared with the headers of its weights.

A module for each layer is made before any weight is read. For a config with a billion layers that
would never end and fill the memory, so the sizes are checked first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.checkpoint.weight_files import StoredTensor

LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_transformer_layers",
)
LAYER = re.compile(r"^(.*?\b\w*(?:layers|blocks?|h))\.(\d+)\.")
COUNT = re.compile(
    r"(hidden|intermediate|vocab|embedding)_size|n_(embd|head|heads|inner|kv_heads|routed_experts)"
    r"|(\w+_)?head_dim|\w*num_\w*(heads|experts|inputs|loops|embeddings)|hc_mult"
)
PER_DIMENSION = 32
"""Most numbers that one stored element may hold: the packed bits of a word."""
UNBOUNDED = frozenset({"max_position_embeddings"})


def check_sizes(file: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Check the layers and counts of a config against the weights' tensors.

    Raises:
        ModelLoadFailed: the weights hold fewer layers than `config`, read from `file`, says, or no
            dimension as large as one of its counts; the message names the setting.
    """
    if not tensors:
        return
    largest = PER_DIMENSION * max(max(tensor.shape, default=1) for tensor in tensors.values())
    layers = layers_in(tensors) or len(tensors)
    for name, value in counts(config):
        if name in LAYER_COUNTS and value > layers:
            raise ModelLoadFailed(
                f"{file} says {name} {value:,}, and the weights hold {layers:,} layers."
            )
        if COUNT.fullmatch(name) and name not in UNBOUNDED and value > largest:
            raise ModelLoadFailed(
                f"{file} says {name} {value:,}, and no tensor of the weights is as large in any "
                "dimension."
            )


def counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a config and of its text model's, with their names."""
    sections = (config, config.get("text_config"))
    for section in sections:
        if isinstance(section, Mapping) and "block_configs" not in section:
            yield from ((name, n) for name, n in section.items() if type(n) is int)


def layers_in(tensors: Mapping[str, StoredTensor]) -> int:
    """Return the number of layers by the tensors' names, over all stacks; 0 if none has one."""
    stacks: dict[str, int] = {}
    for name in tensors:
        if match := LAYER.match(name):
            stacks[match[1]] = max(stacks.get(match[1], 0), int(match[2]) + 1)
    return sum(stacks.values())

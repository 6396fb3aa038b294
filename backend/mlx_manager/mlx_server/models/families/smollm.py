"""SmolLM 3, of whose layers some have no rotation. SmolLM 1 and 2 are Llama models."""

from mlx_manager.mlx_server.models.family import Family
from mlx_manager.mlx_server.models.module_facts import ModuleFacts

FAMILY = Family("smollm", named=r"smollm3", modules=ModuleFacts(unrotated=("smollm3.NoPE",)))

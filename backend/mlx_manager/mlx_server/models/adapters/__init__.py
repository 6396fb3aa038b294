"""Families of models: their prompts, their turn ends, the form of their answers."""

from mlx_manager.mlx_server.models.adapters.base import DefaultAdapter, ModelAdapter
from mlx_manager.mlx_server.models.adapters.llama import LlamaAdapter
from mlx_manager.mlx_server.models.adapters.registry import get_adapter
from mlx_manager.mlx_server.models.family import detect_model_family

__all__ = [
    "DefaultAdapter",
    "LlamaAdapter",
    "ModelAdapter",
    "detect_model_family",
    "get_adapter",
]

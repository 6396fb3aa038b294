"""Prompts and answers of models in the form of their templates."""

from mlx_manager.mlx_server.models.adapters.adapter import Adapter, LlamaAdapter, get_adapter
from mlx_manager.mlx_server.models.families import detect_model_family

__all__ = ["Adapter", "LlamaAdapter", "detect_model_family", "get_adapter"]

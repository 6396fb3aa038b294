"""Apertus."""

from mlx_manager.mlx_server.models.family import Family

FAMILY = Family("apertus", named=r"apertus", thinking=(("<|inner_prefix|>", "<|inner_suffix|>"),))

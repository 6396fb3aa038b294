"""Mellum."""

from mlx_manager.mlx_server.models.family import ConfigFacts, Family

FAMILY = Family("mellum", named=r"mellum", config=ConfigFacts(rope_by_layer=("mellum",)))

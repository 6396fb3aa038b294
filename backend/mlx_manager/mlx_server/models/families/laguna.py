"""Laguna."""

from mlx_manager.mlx_server.models.family import ConfigFacts, Family

FAMILY = Family("laguna", named=r"laguna", config=ConfigFacts(rope_by_layer=("laguna",)))

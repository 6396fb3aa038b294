"""Spark 2.5."""

from mlx_manager.mlx_server.models.family import ConfigFacts, Family

FAMILY = Family("spark", named=r"spark2_5", config=ConfigFacts(rope_by_layer=("spark2_5",)))
